"""The parts of an adopted module while its forward runs: what attention, positions and the end of it become.

`Interception` lives for one forward and sees every function of torch that is called in it; written_out.py is about
attention that is no single one. The functions below make the forwards that stand in for those of the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pellucid_model.contract import Attend
from pellucid_model.errors import ModelError
from pellucid_model.kernels.modules import Embedding
from pellucid_model.written_out import (
    PRODUCTS,
    Scores,
    einsum_product,
    einsum_values,
    is_product_with_keys,
    looks_causal,
    scores_after,
)

Forward = Callable[..., Any]


class Arrived(BaseException):
    """Leaves forward where it comes to the output layer. No Exception, so that no `except Exception` on the way stops
    it."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Interception(TorchFunctionMode):
    """Catches attention, and slices of position tables, in one forward of `module` over T rows."""

    def __init__(self, module: nn.Module, attend: Attend, positions: Tensor, tables: Iterable[Tensor]) -> None:
        super().__init__()
        self.positions = positions
        self._module = module
        self._attend = attend
        self._tables = {id(table) for table in tables}
        self._layer = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._fused(*args, **kwargs)
        if func is Tensor.__getitem__ and id(args[0]) in self._tables:
            return func(args[0], self._at_positions(args[1]))
        if func in PRODUCTS and is_product_with_keys(*args, rows=len(self.positions)) and not self._is_weight(args[1]):
            return Scores(args[0], args[1].transpose(-2, -1))
        if func is torch.einsum and len(args) == 3 and isinstance(args[2], Tensor):
            return self._einsum(*args)
        if any(isinstance(value, Scores) for value in args):
            return self._written_out(func, args, kwargs)
        return func(*args, **kwargs)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """q [1, Hq, T, D] or [Hq, T, D], k and v alike -> as q. The next layer's attention."""
        rows, shape = len(self.positions), q.shape
        layer, self._layer = self._layer, self._layer + 1
        if q.dim() not in (3, 4) or shape[-2] != rows or (q.dim() == 4 and shape[0] != 1):
            raise ModelError(
                f"attention {layer} gets q {list(shape)} for {rows} tokens; accepted: [1, H, T, D] or [H, T, D]"
            )
        if k.shape[-2] != rows or v.shape[-2] != rows:
            raise ModelError(f"attention {layer} gets k {list(k.shape)} for {rows} tokens: only self-attention serves")
        q, k, v = (x.reshape(-1, rows, x.shape[-1]).transpose(0, 1) for x in (q, k, v))  # [T, H, D]
        with torch._C.DisableTorchFunction():  # what attend itself computes is not the module's
            mixed = self._attend(layer, q, k, v, scale=scale)
        return mixed.transpose(0, 1).reshape(*shape[:-1], v.shape[-1])

    def _is_weight(self, x: Tensor) -> bool:
        """A weight may have as many columns as there are rows by chance."""
        memory = x.untyped_storage().data_ptr()
        return any(memory == weight.untyped_storage().data_ptr() for weight in self._module.parameters())

    def _written_out(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Whatever is done to the product of queries and keys, until it meets the values."""
        if func in PRODUCTS and isinstance(args[0], Scores):
            return self._with_values(args[0], args[1])
        return scores_after(func, args, kwargs)

    def _with_values(self, weights: Scores, v: Tensor) -> Tensor:
        self._require_causal(weights.mask_is_causal(len(self.positions)))
        return self.attention(weights.q, weights.k, v, weights.normalised().scale)

    def _einsum(self, equation: str, a: Tensor, b: Tensor) -> Tensor:
        if isinstance(a, Scores):
            v, result = einsum_values(equation, b)
            return result(self._with_values(a, v))
        product = einsum_product(equation, a, b, len(self.positions))
        return torch.einsum(equation, a, b) if product is None else product

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        self.check_causal(attn_mask, is_causal)
        return self.attention(query, key, value, scale)

    def check_causal(self, mask: Tensor | None, is_causal: bool) -> None:
        """Refuse, as far as can be seen, attention that looks ahead: a server's rows see only what came before."""
        self._require_causal(is_causal or (mask is not None and looks_causal(mask, len(self.positions))))

    def _require_causal(self, causal: bool) -> None:
        if len(self.positions) > 1 and not causal:
            raise ModelError(f"attention {self._layer} has no causal mask: only causal attention serves")

    def _at_positions(self, index: Any) -> Any:
        """A slice by length, or the numbers 0 … T - 1, becomes the rows' true positions."""
        parts = list(index) if isinstance(index, tuple) else [index]
        for place, part in enumerate(parts):
            if isinstance(part, slice) and part.stop is not None and part.start in (None, 0):
                parts[place] = self.positions
                break
            if isinstance(part, Tensor) and part.numel() == len(self.positions):
                parts[place] = self.positions.view(part.shape)
                break
        return tuple(parts)


def torch_attention_forward(run: Interception, module: nn.MultiheadAttention) -> Forward:
    """For torch's own module, whose projections have been made layers that the engine can replace."""
    heads, batch_first = module.num_heads, module.batch_first

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        if key is not query or value is not query:
            raise ModelError("nn.MultiheadAttention gets keys of another sequence: only self-attention serves")
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = ~attn_mask  # of this module's masks, true hides a key
        run.check_causal(attn_mask, is_causal)
        q, k, v = module.get_submodule(PROJECTION)(query).chunk(3, dim=-1)  # each [1, T, d], or [T, 1, d]
        q, k, v = (
            (x if batch_first else x.transpose(0, 1)).unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v)
        )
        mixed = run.attention(q, k, v, None).transpose(1, 2).flatten(-2)
        return module.get_submodule(OUTPUT)(mixed if batch_first else mixed.transpose(0, 1)), None

    return forward


PROJECTION, OUTPUT = "pellucid_projection", "pellucid_output"


def prepare_torch_attention(module: nn.MultiheadAttention) -> None:
    """Gives it its projections as layers of the exact type that the engine replaces, on the same parameters."""
    if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
        raise ModelError("nn.MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn is not served")
    module.add_module(PROJECTION, tied_linear(module.in_proj_weight, module.in_proj_bias))
    module.add_module(OUTPUT, tied_linear(cast("nn.Parameter", module.out_proj.weight), module.out_proj.bias))


def tied_linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    """An nn.Linear on parameters that exist. weight [N, K]."""
    linear = nn.Linear(1, 1, bias=bias is not None)
    linear.out_features, linear.in_features = weight.shape
    linear.weight = weight
    if bias is not None:
        linear.bias = bias
    return linear


def position_forward(run: Interception, module: nn.Module, encoding: AddedEncoding) -> Forward:
    """For an embedding of positions, or a module that adds an encoding to what it is given."""
    if isinstance(module, nn.Embedding | Embedding):
        look_up: Forward = type(module).forward
        return lambda index: look_up(module, run.positions).view(*index.shape, -1)
    return lambda x: encoding.at(x, run.positions)


class AddedEncoding:
    """A module that returns factor · x + table[position], taken to pieces by giving it numbers of our own."""

    def __init__(self, module: nn.Module, length: int | None, batch_first: bool) -> None:
        self._module, self._length, self._batch_first = module, length, batch_first
        self._factor = 1.0
        self._table: Tensor | None = None
        """[N, d] float64."""
        self._cast: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def at(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [1, T, d], or [T, 1, d] -> the same with the encoding of `positions` [T] added."""
        if self._table is None:
            self._table = self._take_apart(x)
        key = (x.dtype, x.device)
        if key not in self._cast:
            self._cast[key] = self._table.to(dtype=x.dtype, device=x.device)
        added = self._cast[key].index_select(0, positions)
        return x * self._factor + (added if self._batch_first else added[:, None])

    def _take_apart(self, like: Tensor) -> Tensor:
        name = type(self._module).__name__
        if self._length is None:
            raise ModelError(f"positions: {name} needs to know how far to go; give the adapter a context_length")
        shape = (1, self._length, like.shape[-1]) if self._batch_first else (self._length, 1, like.shape[-1])
        zeros = torch.zeros(shape, dtype=torch.float64, device=like.device)
        original = type(self._module).forward
        with torch.no_grad():
            table: Tensor = original(self._module, zeros)
            ones: Tensor = original(self._module, zeros + 1)
        factors = ones - table
        self._factor = float(factors.flatten()[0])
        if table.shape != shape or (factors - self._factor).abs().max() > 1e-9 * abs(self._factor):
            raise ModelError(f"positions: {name} does more than add an encoding by position to what it is given")
        return table.reshape(self._length, -1)


def arrival_forward(module: nn.Module, after: bool) -> Forward:
    """For the module at which forward ends: with what it returns, or with what it is given."""
    original = module.forward

    def forward(x: Tensor, *rest: Any, **named: Any) -> Any:
        raise Arrived(original(x, *rest, **named) if after else x)

    return forward
