"""What stands behind `attend` in serving: writes the new keys and values into the cache and attends over it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pellucid_model.attention import rotated
from pellucid_model.contract import Attend, AttentionOptions, Rotary
from pellucid_model.gathered import Gathered, Rolling, Rows, gather
from pellucid_model.kernels import Kernels, RotaryTables
from pellucid_server.engine.cache import KVCache
from pellucid_server.engine.ragged import RaggedBatch


class PagedAttend(Attend):
    """One step's attention over the paged cache. Made anew for every step."""

    def __init__(self, kernels: Kernels, cache: KVCache, angles: Angles, batch: RaggedBatch) -> None:
        self._kernels = kernels
        self._cache = cache
        self._angles = angles
        self._batch = batch

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        options: AttentionOptions,
        kv_from: int | None,
    ) -> Tensor:
        rotary = options.rotary
        keys, values = self._cache.layers[layer]
        cos, sin = (None, None) if rotary is None else self._angles.upto(self._batch.length, rotary)
        return self._kernels.paged_attention(
            q,
            k,
            v,
            keys,
            values,
            row_sequence=self._batch.row_sequence,
            positions=self._batch.positions32,
            block_tables=self._batch.block_tables,
            scale=options.scale,
            cos=cos,
            sin=sin,
            interleaved=rotary is not None and rotary.interleaved,
            alibi_slopes=_float32(options.alibi_slopes, q.device),
            distance_bias=_float32(options.distance_bias, q.device),
            softcap=options.softcap,
            **self._windows(options.window),
        )

    def gathered(
        self, layer: int, k: Tensor, v: Tensor, *, rotary: Rotary | None = None, window: int | None = None
    ) -> Gathered:
        batch, positions, sequence = self._batch, self._batch.positions, self._batch.row_sequence.long()
        size = self._cache.block_size
        blocks = batch.block_tables[sequence, positions // size].long()
        layout, cache = self._kernels.cache_layout, self._cache.layers[layer]
        layout.write(cache, blocks, positions % size, rotated(k, positions, rotary), v)
        held = batch.block_tables[:, : -(-batch.length // size)].clamp(min=0).long()  # [S, n]
        keys, values = (
            each.flatten(1, 2)[:, : batch.length].to(k.dtype) for each in layout.read(cache, held, k.shape[2])
        )
        rolling = None if batch.rolling is None else Rolling(**vars(batch.rolling))
        return gather(
            keys,
            values,
            torch.arange(batch.length, device=k.device).expand(len(held), -1),
            Rows.of(positions, sequence, len(held)),
            rotary=rotary,
            window=window,
            rolling=rolling,
        )

    def _windows(self, own: int | None) -> dict[str, Tensor]:
        """What the operator is told of windows in a layer with a window of its `own`, or without."""
        window, rolling = self._batch.windows(own), self._batch.rolling
        if window is None:
            return {}
        return vars(rolling) if rolling is not None and own is None else {"window": window}


class Angles:
    """The cos and sin tables of every rotary embedding that the model hands over."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[Rotary, RotaryTables] = {}

    def upto(self, length: int, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """cos, sin [at least length, dim / 2] float32."""
        if rotary not in self._tables:
            on_device = replace(rotary, inv_freq=rotary.inv_freq.to(self._device))
            self._tables[rotary] = RotaryTables(on_device)
        return self._tables[rotary].table(length)


def _float32(table: Tensor | None, device: torch.device) -> Tensor | None:
    return None if table is None else table.to(device, torch.float32).contiguous()
