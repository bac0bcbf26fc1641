"""From a step's chunks to logits: the ragged batch, the paged `attend`, one forward."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pellucid_model.contract import DecoderModel, Rotary
from pellucid_model.kernels import Kernels, RotaryTables
from pellucid_server.engine.cache import KVCache
from pellucid_server.engine.scheduler import Step
from pellucid_server.kv.window import FULL


@dataclass(frozen=True)
class RollingWindows:
    """Windows and sinks of a batch in which some sequence rolls."""

    window: Tensor
    """[S] int32; 0: the sequence does not roll."""
    sinks: Tensor
    """[S] int32."""
    sink_query_positions: Tensor
    """[T] int32: where a row stands when it looks at sinks that its window has left behind."""

    @staticmethod
    def of(step: Step, device: torch.device) -> RollingWindows | None:
        contexts = [chunk.sequence.request.context for chunk in step.chunks]
        if all(context.kind != "roll" for context in contexts):
            return None
        rolls = [context if context.kind == "roll" else FULL for context in contexts]
        stand: list[int] = []
        for chunk, context in zip(step.chunks, rolls, strict=True):
            rows = range(chunk.start, chunk.start + chunk.count)
            stand += [min(t, context.span - 1) for t in rows] if context.kind == "roll" else rows
        return RollingWindows(
            window=torch.tensor([context.window for context in rolls], dtype=torch.int32, device=device),
            sinks=torch.tensor([context.sinks for context in rolls], dtype=torch.int32, device=device),
            sink_query_positions=torch.tensor(stand, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class RaggedBatch:
    """A step's tokens laid end to end: T tokens of S sequences, R of which need a next token."""

    tokens: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, each token's place in its sequence's view."""
    row_sequence: Tensor
    """[T] int32, which of the S sequences a token belongs to."""
    block_tables: Tensor
    """[S, most blocks] int32, -1 beyond a sequence's own."""
    sampled_rows: Tensor
    """[R] int64, rows whose logits are wanted, in the order of the chunks."""
    rolling: RollingWindows | None
    """None where no sequence rolls."""

    @staticmethod
    def of(step: Step, device: torch.device) -> RaggedBatch:
        tokens: list[int] = []
        positions: list[int] = []
        row_sequence: list[int] = []
        sampled_rows: list[int] = []
        width = max(len(chunk.sequence.blocks) for chunk in step.chunks)
        tables = []
        for index, chunk in enumerate(step.chunks):
            tokens += chunk.sequence.view(chunk.start, chunk.count)
            positions += range(chunk.start, chunk.start + chunk.count)
            row_sequence += [index] * chunk.count
            tables.append(chunk.sequence.blocks + [-1] * (width - len(chunk.sequence.blocks)))
            if chunk.samples:
                sampled_rows.append(len(tokens) - 1)
        return RaggedBatch(
            tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            row_sequence=torch.tensor(row_sequence, dtype=torch.int32, device=device),
            block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
            sampled_rows=torch.tensor(sampled_rows, dtype=torch.int64, device=device),
            rolling=RollingWindows.of(step, device),
        )


class PagedAttend:
    """What stands behind `attend` in serving: writes the new keys and values into the cache and attends over it."""

    def __init__(self, kernels: Kernels, cache: KVCache, angles: Angles, batch: RaggedBatch) -> None:
        self._kernels = kernels
        self._cache = cache
        self._angles = angles
        self._batch = batch
        self._positions = batch.positions.to(torch.int32)
        self._length = int(batch.positions.max()) + 1

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        rotary: Rotary | None = None,
        alibi_slopes: Tensor | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        keys, values = self._cache.layers[layer]
        cos, sin = (None, None) if rotary is None else self._angles.upto(self._length, rotary)
        return self._kernels.paged_attention(
            q,
            k,
            v,
            keys,
            values,
            row_sequence=self._batch.row_sequence,
            positions=self._positions,
            block_tables=self._batch.block_tables,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            cos=cos,
            sin=sin,
            interleaved=rotary is not None and rotary.interleaved,
            alibi_slopes=alibi_slopes,
            softcap=softcap,
            **self._windows(window),
        )

    def _windows(self, own: int | None) -> dict[str, Tensor]:
        """What the operator is told of windows in a layer with a window of its `own`, or without."""
        rolling = self._batch.rolling
        if own is None:
            return {} if rolling is None else vars(rolling)
        window = torch.full_like(self._batch.block_tables[:, 0], own)
        if rolling is not None:
            window = torch.where(rolling.window > 0, torch.minimum(window, rolling.window), window)
        return {"window": window}


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


class ModelRunner:
    """Runs steps. Owns the model and its cache, knows nothing of requests."""

    def __init__(self, model: DecoderModel, kernels: Kernels, cache: KVCache, device: torch.device) -> None:
        self._model = model
        self._kernels = kernels
        self._cache = cache
        self._device = device
        self._angles = Angles(device)

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor:
        """Compute the step's chunks -> logits [R, V] float32 on the CPU, a row for each chunk that samples."""
        batch = RaggedBatch.of(step, self._device)
        attend = PagedAttend(self._kernels, self._cache, self._angles, batch)
        hidden = self._model.forward(batch.tokens, batch.positions, attend)
        logits = self._model.logits(hidden.index_select(0, batch.sampled_rows))
        return logits.to(device="cpu", dtype=torch.float32)
