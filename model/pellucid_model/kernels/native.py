"""The compiled operators behind the `Kernels` protocol: checks shapes and types, then calls C through ctypes.

ctypes lets go of Python's lock during a call. Every operator returns a new tensor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Literal, get_args

import torch
from torch import Tensor

from pellucid_model.kernels import library
from pellucid_model.kernels.cache_layout import GRANULE, INT8, GranuleLayout, stored_width
from pellucid_model.kernels.huge_pages import WeightMemory
from pellucid_model.kernels.interface import Function, PackedLinear, Table, TableFormat, WeightFormat
from pellucid_model.kernels.packing import check_linear_shapes, pack

FUNCTIONS: tuple[str, ...] = get_args(Function)
TABLE_FORMATS: tuple[str, ...] = get_args(TableFormat)
"""Numbers of the C++ enumeration are places in it."""
_PANELS: dict[WeightFormat, TableFormat] = {"float32": "float32 panels", "bfloat16": "bfloat16 panels"}


class AttentionArguments(ctypes.Structure):
    """Mirrors Arguments in src/attention_arguments.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "k_cache", "v_cache", "out")),
        *((name, c_void_p) for name in ("row_sequence", "positions", "block_tables")),
        *((name, c_void_p) for name in ("window", "sinks", "sink_query_positions")),
        *((name, c_void_p) for name in ("cos", "sin", "alibi_slopes", "distance_bias")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride", "rounded_stride")),
        *((name, c_int64) for name in ("rows", "query_heads", "kv_heads", "head_dim")),
        *((name, c_int64) for name in ("blocks", "block_size", "block_stride", "sequences", "table_width")),
        *((name, c_int64) for name in ("rotary_positions", "rotary_dim", "bias_width")),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int32) for name in ("interleaved", "cache_format", "threads")),
        *((name, c_void_p) for name in ("partials", "status")),
    )


CACHE_FORMATS = (torch.float32, torch.bfloat16, INT8)
"""Of a KV cache that these kernels read, as `cache_format` counts them."""
ATTENTION_ERRORS = (
    None,
    "row_sequence holds a value outside 0 to {sequences} - 1",
    "positions holds a value below 0, or beyond block_tables ({slots} slots) or the rows of cos and sin",
    "sink_query_positions holds a value below 0 or beyond the rows of cos and sin",
    "block_tables has no block in 0 to {blocks} - 1 for a position that a row writes or sees",
)


class NativeKernels:
    """One compiled variant. A row's result does not depend on the batch, the chunk or the number of threads."""

    batch_invariant = True
    cache_layout = GranuleLayout()

    def __init__(self, variant: str) -> None:
        self.name = variant
        self.library = library.load_variant(variant)
        self.library.pellucid_paged_attention.restype = c_int32
        self.library.pellucid_rounded_stride.restype = c_int64
        linears = (f"linear_{format}" for format in get_args(WeightFormat))
        for function in ("rms_norm", "layer_norm", "look_up", *FUNCTIONS, *linears):
            getattr(self.library, f"pellucid_{function}").restype = None
        self._weights = WeightMemory()

    def pack_linear(self, weight: Tensor, bias: Tensor | None, format: WeightFormat) -> PackedLinear:
        check_linear_shapes(weight, bias)
        own_bias = None if bias is None else bias.detach().float().clone()
        packed = self._weights.copy(pack(weight, format))
        return PackedLinear(packed, own_bias, weight.shape[1], weight.shape[0], format)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        _check("x", x, torch.float32, (*x.shape[:-1], packed.in_features))
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], packed.out_features)
        call = getattr(self.library, f"pellucid_linear_{packed.format}")
        rows = x.numel() // packed.in_features
        sizes = (c_int64(rows), c_int64(packed.in_features), c_int64(packed.out_features))
        call(_address(x), _address(packed.weight), _address(packed.bias), _address(out), *sizes, library.threads())
        return out

    def make_table(self, rows: Tensor, format: Literal["float32", "bfloat16"]) -> Table:
        weight = rows.detach().to(torch.float32 if format == "float32" else torch.bfloat16).contiguous()
        held = self._weights.copy(weight.view(torch.uint8))
        return Table(held, rows.shape[0], rows.shape[1], format)

    def table_of(self, packed: PackedLinear) -> Table | None:
        format = _PANELS.get(packed.format)
        return None if format is None else Table(packed.weight, packed.out_features, packed.in_features, format)

    def look_up(self, indices: Tensor, table: Table) -> Tensor:
        _check("indices", indices, torch.int64, indices.shape)
        check_indices(indices, table)
        indices = indices.contiguous()
        out = torch.empty(*indices.shape, table.width)
        sizes = (c_int64(indices.numel()), c_int64(table.width), library.threads())
        format = TABLE_FORMATS.index(table.format)
        self.library.pellucid_look_up(_address(table.weight), format, _address(indices), _address(out), *sizes)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        x, size, rows = _rows(x, weight=weight)
        out = torch.empty_like(x)
        sizes = (c_int64(rows), c_int64(size), c_float(eps), library.threads())
        self.library.pellucid_rms_norm(_address(x), _address(weight), _address(out), *sizes)
        return out

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        x, size, rows = _rows(x, weight=weight, bias=bias)
        out = torch.empty_like(x)
        sizes = (c_int64(rows), c_int64(size), c_float(eps), library.threads())
        self.library.pellucid_layer_norm(_address(x), _address(weight), _address(bias), _address(out), *sizes)
        return out

    def activation(self, kind: Function, x: Tensor) -> Tensor:
        if kind not in FUNCTIONS:
            raise ValueError(f"kind must be one of {', '.join(FUNCTIONS)}, not {kind!r}")
        _check("x", x, torch.float32, x.shape)
        x = x.contiguous()
        out = torch.empty_like(x)
        call = getattr(self.library, f"pellucid_{kind}")
        call(_address(x), _address(out), c_int64(x.numel()), library.threads())
        return out

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
        rows, query_heads, dim = q.shape
        blocks, kv_heads, block_size, _ = k_cache.shape
        if block_size % GRANULE and GRANULE % block_size:
            raise ValueError(
                f"k_cache has blocks of {block_size} tokens; accepted: divisors and multiples of {GRANULE}"
            )
        sequences, table_width = block_tables.shape
        floats, ints = torch.float32, torch.int32
        _check("q", q, floats, (rows, query_heads, dim))
        q = q.contiguous()
        if k is not None and v is not None:
            _check("k", k, floats, (rows, kv_heads, dim))
            _check("v", v, floats, (rows, kv_heads, dim))
            k, v = k.contiguous(), v.contiguous()
        out = torch.empty_like(q)
        held = k_cache.dtype if k_cache.dtype in CACHE_FORMATS else floats
        angles = None if cos is None else (cos.shape[0], cos.shape[1])
        bias_width = 0 if distance_bias is None else distance_bias.shape[1]
        arguments = AttentionArguments(
            q=q.data_ptr(),
            k=None if k is None else k.data_ptr(),
            v=None if v is None else v.data_ptr(),
            out=out.data_ptr(),
            k_cache=_blocks_in_place("k_cache", k_cache, held, k_cache),
            v_cache=_blocks_in_place("v_cache", v_cache, held, k_cache),
            row_sequence=_in_place("row_sequence", row_sequence, ints, (rows,)),
            positions=_in_place("positions", positions, ints, (rows,)),
            block_tables=_in_place("block_tables", block_tables, ints, block_tables.shape),
            window=_in_place("window", window, ints, (sequences,)),
            sinks=_in_place("sinks", sinks, ints, (sequences,)),
            sink_query_positions=_in_place("sink_query_positions", sink_query_positions, ints, (rows,)),
            cos=_in_place("cos", cos, floats, angles),
            sin=_in_place("sin", sin, floats, angles),
            alibi_slopes=_in_place("alibi_slopes", alibi_slopes, floats, (query_heads,)),
            distance_bias=_in_place("distance_bias", distance_bias, floats, (query_heads, bias_width)),
            q_stride=query_heads * dim,
            k_stride=kv_heads * dim,
            v_stride=kv_heads * dim,
            rows=rows,
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=dim,
            blocks=blocks,
            block_size=block_size,
            block_stride=k_cache.stride(0),
            sequences=sequences,
            table_width=table_width,
            rotary_positions=angles[0] if angles else 0,
            rotary_dim=2 * angles[1] if angles else 0,
            bias_width=bias_width,
            scale=scale,
            softcap=softcap or 0.0,
            interleaved=interleaved,
            cache_format=CACHE_FORMATS.index(held),
            threads=library.threads(),
        )
        status: int = self.library.pellucid_paged_attention(ctypes.byref(arguments))
        if status:
            raise attention_error(status, block_tables.shape, k_cache)
        return out


def check_indices(indices: Tensor, table: Table) -> None:
    """IndexError where one is beyond the table."""
    if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < table.count):
        raise IndexError(f"indices holds a value outside 0 to {table.count} - 1")


def attention_error(status: int, tables: Sequence[int], k_cache: Tensor) -> ValueError:
    """What a status other than 0 says. `tables`: the shape of the block tables."""
    sequences, table_width = tables
    blocks, _, block_size, _ = k_cache.shape
    text = ATTENTION_ERRORS[status] or "unknown status"
    return ValueError(text.format(sequences=sequences, slots=table_width * block_size, blocks=blocks))


def check_attention_shapes(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    block_tables: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    distance_bias: Tensor | None,
) -> None:
    """What every implementation of paged_attention asks of the tensors that set the sizes."""
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together")
    if distance_bias is not None and (distance_bias.dim() != 2 or distance_bias.shape[1] == 0):
        raise ValueError(f"distance_bias must be [Hq, B] with B >= 1, not {list(distance_bias.shape)}")
    if q.dim() != 3 or 0 in q.shape[1:]:
        raise ValueError(f"q must be [T, Hq, D], not {list(q.shape)}")
    width = stored_width(q.shape[2], k_cache.dtype)
    if k_cache.dim() != 4 or k_cache.shape[3] != width or 0 in k_cache.shape[1:]:
        raise ValueError(f"k_cache must be [blocks, Hkv, block_size, {width}], not {list(k_cache.shape)}")
    if q.shape[1] % k_cache.shape[1] != 0:
        raise ValueError(f"q has {q.shape[1]} heads, which is no multiple of the {k_cache.shape[1]} heads of k_cache")
    if block_tables.dim() != 2:
        raise ValueError(f"block_tables must be [S, n], not {list(block_tables.shape)}")
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin must be given together")
    if cos is not None and (cos.dim() != 2 or 2 * cos.shape[1] > q.shape[2]):
        raise ValueError(f"cos must be [P, dim / 2] with dim <= {q.shape[2]}, not {list(cos.shape)}")


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.device.type != "cpu":
        raise ValueError(f"{name} must be {dtype} on the CPU, not {tensor.dtype} on {tensor.device}")
    if tensor.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, not {list(tensor.shape)}")


def _in_place(name: str, tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...] | None) -> int | None:
    """Address of a tensor that is used where it lies, so must be contiguous."""
    if tensor is None or shape is None:
        return None
    _check(name, tensor, dtype, shape)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous")
    return tensor.data_ptr()


def _blocks_in_place(name: str, cache: Tensor, dtype: torch.dtype, k_cache: Tensor) -> int:
    """Address of a cache whose blocks lie as far apart as those of k_cache."""
    _check(name, cache, dtype, k_cache.shape)
    if cache.stride(0) != k_cache.stride(0) or not (len(cache) == 0 or cache[0].is_contiguous()):
        raise ValueError(f"{name} must be contiguous within its blocks, which lie as far apart as those of k_cache")
    return cache.data_ptr()


def _address(tensor: Tensor | None) -> c_void_p:
    return c_void_p(None if tensor is None else tensor.data_ptr())


def _rows(x: Tensor, **parameters: Tensor | None) -> tuple[Tensor, int, int]:
    """x contiguous, its last dimension, and the number of rows of that size; checks the per-column parameters."""
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension")
    _check("x", x, torch.float32, x.shape)
    size = x.shape[-1]
    for name, parameter in parameters.items():
        if parameter is not None:
            _in_place(name, parameter, torch.float32, (size,))
    return x.contiguous(), size, x.numel() // max(1, size)
