"""What modules do between their layers, in torch's own functions, becomes a plan's, to rounding.

A plan has functions of its own, so that no number depends on how many rows there are; hence not torch's last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid_model.contract import Attend
from pellucid_model.kernels import NativeKernels, accelerate
from pellucid_model.kernels.plan import fuse, record
from pellucid_testing.plans import VARIANTS, Odd, assert_close, needs_kernels


class Functional(Odd):
    """As a batch of one sequence, with functions in place of layers, and tables looked up by index."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.shift = nn.Parameter(torch.randn(300, 24)), nn.Parameter(torch.randn(1, 1, 24))

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embedding(tokens[None]) + self.table[positions] + self.shift
        x = F.layer_norm(x, (24,), self.gain, None, 1e-5)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain
        q, k, v = self.qkv(F.silu(x)).split(32, dim=-1)
        q, k, v = (part[0].view(-1, 4, 8) for part in (q, k, v))
        k = k / (k**2).mean(dim=-1, keepdim=True).add(1e-5).sqrt()
        mixed = attend(0, F.rms_norm(q, (8,), eps=1e-4), k, v, rotary=self.rotary)
        x = x + F.gelu(self.out(mixed.flatten(1)))[None]
        return torch.cat((F.relu(x), F.gelu(x, approximate="tanh")), dim=-1)[0]


@needs_kernels
@pytest.mark.parametrize("fused", [False, True])
def test_functions_become_the_kernels_own(fused: bool) -> None:
    """Theirs may give other last bits for another number of rows, so a plan calls ours; hence not bit for bit."""
    kernels, model = NativeKernels(VARIANTS[0]), Functional().eval()
    accelerate(model, kernels, "float32")
    program = record(model, model)  # type: ignore[arg-type]
    if fused:
        fuse(program)
    assert_close(model, program, kernels, tolerance=1e-5)


class Between(Odd):
    """One of many things that modules do between their layers; what follows attention is [T, 24] again."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.what = BETWEEN[name]
        self.shift = nn.Parameter(torch.randn(24))

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).view(-1, 3, 4, 8).unbind(1)
        y = self.what(self, x + self.out(attend(0, q, k, v, rotary=self.rotary).flatten(1)))
        both: Tensor = torch.cat((x, y), dim=1)
        return both


def assigned(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 3:9] = x[:, :6]
    y[:, 20:] = 0.5
    return y


def factor(x: Tensor) -> Tensor:
    """Of the RMS norm."""
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def in_layout_of_heads(model: Any, x: Tensor) -> Tensor:
    """[1, H, T, D], as attention has it elsewhere."""
    heads = x.view(1, -1, 3, 8).transpose(1, 2)
    y: Tensor = (model.key_norm(heads) * 0.5 + heads).tanh() * heads
    return y.transpose(1, 2).reshape(-1, 24)


BETWEEN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "softcap": lambda m, x: 3 * torch.tanh(x / 3),
    "functions": lambda m, x: x.sigmoid() * x.exp() + (x.abs() + 1).sqrt() - 1 / (2 + x.abs()),
    "constants first": lambda m, x: (1 - x) + (m.shift - x) + m.shift / (1 + x * x) - (-x),
    "limits": lambda m, x: x.clamp(-0.3, 0.4) + F.relu6(x) + x.clamp(min=0.1) + x.clamp(max=m.shift),
    "limits by column": lambda m, x: torch.clamp(x[:, :1], min=m.shift) + torch.clamp(x[:, :1], max=m.shift),
    "powers": lambda m, x: x**3 + x.pow(2) * 0.5 + x.square() + (1 + x * x) ** -0.5 + (1 + x * x) ** 0.5,
    "squared relu": lambda m, x: F.relu(x).square() * m.shift,
    "gelu by hand": lambda m, x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x.pow(3)))),
    "quick gelu": lambda m, x: x * torch.sigmoid(1.702 * x),
    "gates": lambda m, x: F.glu(torch.cat((x, x * 2), dim=-1)) + F.silu(x.chunk(2, -1)[0]).repeat(1, 2),
    "layer norm by hand": lambda m, x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(),
    "norm by deviation": lambda m, x: m.shift * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6),
    "biased variance": lambda m, x: x / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5),
    "rms of products": lambda m, x: m.gain * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)),
    "half a norm": lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1) + x.pow(2).mean(-1, keepdim=True),
    "norm by half the squares": lambda m, x: x * torch.rsqrt((x**2)[:, :12].mean(-1, keepdim=True) + 1e-6),
    "norm by some squares": lambda m, x: x / ((x * x)[..., ::2].mean(-1, keepdim=True) + 1e-6).sqrt(),
    "norm by a head's factor": lambda m, x: (x.view(-1, 3, 8) * factor(x.view(-1, 3, 8))[:, :1]).flatten(1),
    "norm by one for all": lambda m, x: (x.view(-1, 3, 8) * factor(x.view(-1, 3, 8))[:, 1:2].expand(-1, 3, -1)).flatten(
        1
    ),
    "unit length": lambda m, x: F.normalize(x.view(-1, 3, 8), dim=-1).flatten(1),
    "sums": lambda m, x: x * x.view(-1, 3, 8).sum(1).amax(-1, keepdim=True) + x.view(-1, 3, 8).sum((1, 2))[:, None],
    "softmax": lambda m, x: x.view(-1, 3, 8).softmax(-1).flatten(1),
    "mixture": lambda m, x: (x[:, :3].softmax(-1)[..., None] * x.view(-1, 3, 8)).flatten(1),
    "stacked": lambda m, x: torch.stack((x[:, ::2], x[:, 1::2]), dim=1).flatten(1),
    "turned pairs": lambda m, x: torch.stack((-x[:, 1::2], x[:, ::2]), dim=-1).flatten(1),
    "halves": lambda m, x: torch.cat((-x[:, 12:], x[:, :12]), dim=-1) * m.shift,
    "inner cat": lambda m, x: torch.cat((x.view(-1, 3, 8), x.view(-1, 3, 8)), dim=1)[:, 1:4].flatten(1),
    "joined constants": lambda m, x: torch.cat((x[:, :20], torch.full((len(x), 4), -1)), dim=1),
    "stacked constant": lambda m, x: torch.stack((x[:, 0], torch.full((len(x),), -1e4)), dim=1).repeat(1, 12) * x,
    "sink logit": lambda m, x: torch.cat((x[:, :1], -m.shift[:1].abs().expand(len(x), 1)), 1).softmax(-1).repeat(1, 12),
    "padded": lambda m, x: F.pad(x.view(-1, 3, 8), (0, 2), value=1.5)[:, :, 2:].flatten(1),
    "repeated": lambda m, x: x.view(-1, 3, 8)[:, :1].repeat_interleave(3, dim=1).flatten(1),
    "expanded": lambda m, x: x.view(-1, 3, 8)[:, :1].expand(-1, 3, -1).reshape(-1, 24) + x.view(-1, 1, 24)[:, 0],
    "transposed": lambda m, x: (x.view(-1, 3, 8).transpose(1, 2) + 1).flatten(1) + x.flip(-1),
    "masked": lambda m, x: x.masked_fill(m.shift > 0, -2.0) + torch.where(m.shift > 0, x, torch.tensor(0.25)),
    "assigned": lambda m, x: assigned(x),
    "permuted": lambda m, x: x[:, torch.arange(23, -1, -1)] + x.index_select(1, torch.arange(24).roll(5)),
    "layer scale": lambda m, x: x + m.gain * m.out(torch.cat((x, x[:, :8]), dim=1)) + m.shift.exp() * x,
    "layout of heads": in_layout_of_heads,
}


@needs_kernels
@pytest.mark.parametrize("name", BETWEEN)
def test_what_modules_do_between_their_layers(name: str) -> None:
    """A plan has functions of its own, so that no number depends on how many rows there are: not torch's last bits."""
    kernels, model = NativeKernels(VARIANTS[0]), Between(name).eval()
    accelerate(model, kernels, "float32")
    program = record(model, model)  # type: ignore[arg-type]
    fuse(program)
    assert_close(model, program, kernels, tolerance=1e-4)
