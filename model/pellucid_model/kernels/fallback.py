"""The same operators in plain torch: for devices and machines without compiled kernels, and easy to read.

Any device and any float dtype. Slower, and a row's last bits may depend on the batch it is in.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid_model.kernels.cache_layout import PlainLayout
from pellucid_model.kernels.interface import Function, PackedLinear, Table, WeightFormat
from pellucid_model.kernels.native import FUNCTIONS, check_attention_shapes, check_indices
from pellucid_model.kernels.packing import check_linear_shapes
from pellucid_model.kernels.quantization import round_activations, round_weight


class TorchKernels:
    """The `Kernels` protocol on torch's own operators."""

    name = "torch"
    batch_invariant = False
    cache_layout = PlainLayout()

    def pack_linear(self, weight: Tensor, bias: Tensor | None, format: WeightFormat) -> PackedLinear:
        check_linear_shapes(weight, bias)
        own_bias = None if bias is None else bias.detach().clone()
        return PackedLinear(
            _rounded_weight(weight.detach(), format), own_bias, weight.shape[1], weight.shape[0], format
        )

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        if x.shape[-1] != packed.in_features:
            raise ValueError(f"x must be [..., {packed.in_features}], not {list(x.shape)}")
        rounded = round_activations(x, packed.format) if packed.format in ("int8", "int4") else x
        out = F.linear(rounded.to(packed.weight.dtype), packed.weight).to(x.dtype)
        return out if packed.bias is None else out + packed.bias.to(x.dtype)

    def make_table(self, rows: Tensor, format: Literal["float32", "bfloat16"]) -> Table:
        return Table(_rounded_weight(rows.detach(), format), rows.shape[0], rows.shape[1], format)

    def table_of(self, packed: PackedLinear) -> Table | None:
        if packed.format == "float32" or packed.format == "bfloat16":
            return Table(packed.weight, packed.out_features, packed.in_features, packed.format)
        return None

    def look_up(self, indices: Tensor, table: Table) -> Tensor:
        check_indices(indices, table)
        return F.embedding(indices, table.weight).float()

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def activation(self, kind: Function, x: Tensor) -> Tensor:
        match kind:
            case "relu":
                return F.relu(x)
            case "gelu":
                return F.gelu(x)
            case "gelu_tanh":
                return F.gelu(x, approximate="tanh")
            case "silu":
                return F.silu(x)
            case "absolute":
                return x.abs()
        if kind not in FUNCTIONS:
            raise ValueError(f"kind must be one of {', '.join(FUNCTIONS)}, not {kind!r}")
        function: Tensor = getattr(torch, kind)(x)
        return function

    def paged_attention(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        row_sequence: Tensor,
        positions: Tensor,
        block_tables: Tensor,
        scale: float,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        interleaved: bool = False,
        alibi_slopes: Tensor | None = None,
        distance_bias: Tensor | None = None,
        window: Tensor | None = None,
        sinks: Tensor | None = None,
        sink_query_positions: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        check_attention_shapes(q, k, v, k_cache, block_tables, cos, sin, distance_bias)
        angles = None if cos is None or sin is None else (cos, sin)
        positions = positions.long()
        sink_positions = positions if sink_query_positions is None else sink_query_positions.long()
        if k is not None and v is not None:
            blocks, slots = _slots(k_cache, row_sequence, positions, block_tables)
            self.cache_layout.write((k_cache, v_cache), blocks, slots, rotate(k, positions, angles, interleaved), v)

        group = q.shape[1] // k_cache.shape[1]
        out = torch.empty_like(q)
        for sequence in row_sequence.unique().tolist():
            rows = (row_sequence == sequence).nonzero().squeeze(1)
            at, length = positions[rows], int(positions[rows].max()) + 1
            # What no block holds is whatever block 0 contains.
            held = block_tables[sequence, : -(-length // k_cache.shape[2])].clamp(min=0).long()
            keys, values = (
                each.flatten(0, 1)[:length].transpose(0, 1).to(q.dtype).repeat_interleave(group, dim=0)  # [Hq, j, D]
                for each in self.cache_layout.read((k_cache, v_cache), held, q.shape[2])
            )

            def score(query_positions: Tensor, rows: Tensor = rows, keys: Tensor = keys) -> Tensor:
                query = rotate(q[rows], query_positions, angles, interleaved)
                scores = torch.einsum("thd,hjd->htj", query, keys) * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                distance = query_positions[:, None] - torch.arange(keys.shape[1], device=q.device)
                if alibi_slopes is not None:
                    scores = scores - alibi_slopes[:, None, None].to(q.dtype) * distance
                if distance_bias is not None:
                    scores = scores + distance_bias[:, distance.clamp(0, distance_bias.shape[1] - 1)].to(q.dtype)
                return scores

            key = torch.arange(length, device=q.device)
            start = at - (int(window[sequence]) or length) + 1 if window is not None else torch.zeros_like(at)
            in_window = (key >= start[:, None]) & (key <= at[:, None])  # [t, length]
            is_sink = (key < (int(sinks[sequence]) if sinks is not None else 0)) & (key < start[:, None])
            scores = torch.where(is_sink, score(sink_positions[rows]), score(at))
            out[rows] = _weighted_values(scores, in_window | is_sink, values)
        return out


def _rounded_weight(weight: Tensor, format: WeightFormat) -> Tensor:
    """A copy in the float format, or in float32 the numbers that the integers stand for."""
    if format in ("int8", "int4"):
        return round_weight(weight, format)
    return weight.to(torch.float32 if format == "float32" else torch.bfloat16, copy=True)


def rotate(x: Tensor, positions: Tensor, angles: tuple[Tensor, Tensor] | None, interleaved: bool) -> Tensor:
    """x [T, H, D] with its first dimensions rotated by the rows `positions` of cos and sin [P, dim / 2], in float32."""
    if angles is None:
        return x
    cos, sin = (table[positions][:, None] for table in angles)  # [T, 1, dim / 2]
    dim = 2 * cos.shape[-1]
    head, rest = x[..., :dim], x[..., dim:]
    pairs = head.unflatten(-1, (dim // 2, 2)) if interleaved else head.unflatten(-1, (2, dim // 2)).transpose(-1, -2)
    first, second = pairs.unbind(-1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    head = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat((head.to(x.dtype), rest), dim=-1)


def _slots(cache: Tensor, row_sequence: Tensor, positions: Tensor, block_tables: Tensor) -> tuple[Tensor, Tensor]:
    """The block and the slot in it [T] int64 of each row's own position. cache [blocks, Hkv, block_size, W]."""
    size = cache.shape[2]
    held = block_tables.shape[1] * size
    if positions.numel() and (int(positions.min()) < 0 or int(positions.max()) >= held):
        raise ValueError(f"positions holds a value below 0 or beyond block_tables ({held} slots)")
    blocks = block_tables[row_sequence.long(), positions // size].long()
    if blocks.numel() and (int(blocks.min()) < 0 or int(blocks.max()) >= cache.shape[0]):
        raise ValueError(f"block_tables has no block in 0 to {cache.shape[0]} - 1 for a position that a row writes")
    return blocks, positions % size


def _weighted_values(scores: Tensor, visible: Tensor, values: Tensor) -> Tensor:
    """softmax(scores) · values over what is visible. scores [H, t, j], visible [t, j], values [H, j, D] -> [t, H, D].

    0 times NaN is NaN, so a value that is not finite is taken out and reaches only the rows that see it.
    """
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
    finite = values.isfinite()
    out = weights @ values.where(finite, 0)
    spoiled = visible.to(values.dtype) @ (~finite).to(values.dtype)
    return out.masked_fill(spoiled > 0, torch.nan).transpose(0, 1)
