"""A recorded program computes what the module computes, to the last bit, however it is fused and laid out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from pellucid_model.config import DecoderConfig
from pellucid_model.contract import Attend
from pellucid_model.kernels import NativeKernels, accelerate
from pellucid_model.kernels.interface import WeightFormat
from pellucid_model.kernels.plan import Plan, fuse, record
from pellucid_model.kernels.plan.program import Combine
from pellucid_testing.checkpoints import tiny_config, tiny_model
from pellucid_testing.plans import VARIANTS, Odd, Paged, assert_same, batch_of, needs_kernels


@needs_kernels
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"position": "learned", "norm_placement": "post", "activation": "gelu"},
        {"position": "sinusoidal", "embedding_scale": 6.5, "tied_head": True},
        {"position": "alibi", "norm": "rmsnorm", "activation": "swiglu", "mlp_bias": False, "attention_bias": False},
        {"norm": "rmsnorm", "activation": "geglu_tanh", "d_ff": 75, "attention_output_bias": False},
        {"rotary_fraction": 0.5, "rotary_interleaved": True, "windows": (5, None), "attention_softcap": 3.0},
    ],
    ids=str,
)
def test_decoders(changes: dict[str, Any], fused: bool) -> None:
    config: DecoderConfig = tiny_config(**changes)
    shapes = [(config.kv_heads, config.head_dim)] * config.layers
    for format in get_args(WeightFormat):
        program = assert_same(tiny_model(config), shapes, format, fused=fused)
        kinds = Counter(type(each).__name__ for each in program.instructions)
        assert kinds["Copy"] == 0
        if fused:
            # Query, key and value; output; gate and up; down: with what stands before and after them.
            assert kinds["Linear"] == 4 * config.layers + 1
            assert kinds["Activate"] == 0
            pre = config.norm_placement == "pre"
            assert kinds["Normalize"] == (0 if pre else 2 * config.layers - 1)  # the last one goes into the head
            assert kinds["Combine"] == config.position.startswith("sinus") + (config.embedding_scale != 1) + (
                config.position == "learned"
            )


@needs_kernels
@pytest.mark.parametrize("fused", [False, True])
def test_modules_of_ones_own(fused: bool) -> None:
    assert_same(Odd(), [(4, 8)], "float32", fused=fused)


class Shared(Odd):
    """A second layer that reads the first one's keys, with a bias by distance; two branches and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out2 = nn.Linear(24, 32), nn.Linear(32, 24)
        self.up, self.gelu, self.down = nn.Linear(24, 50), nn.GELU(), nn.Linear(50, 24)
        self.bias = nn.Parameter(torch.randn(4, 6))

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embedding(tokens)
        h = self.norm(x)
        q, k, v = self.qkv(h).view(-1, 3, 4, 8).unbind(1)
        x = x + self.out(attend(0, q, k, v).flatten(1)) + self.down(self.gelu(self.up(h)))
        mixed = attend(1, self.query(x).view(-1, 4, 8), kv_from=0, distance_bias=self.bias.detach())
        return torch.cat((x - self.out2(mixed.flatten(1)), x), dim=1)


@needs_kernels
@pytest.mark.parametrize("fused", [False, True])
def test_shared_caches_and_parallel_branches(fused: bool) -> None:
    program = assert_same(Shared(), [(4, 8), (0, 0)], "bfloat16", fused=fused)
    if fused:  # both sums go into layers; the difference and the factor of the logits do not
        assert [each.kind for each in program.instructions if isinstance(each, Combine)] == ["subtract", "multiply"]


class Rewritten(Odd):
    """Values that are read after what they were made of has been overwritten: nothing may move past that."""

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embedding(tokens)
        before = self.norm(x)
        made = self.out(torch.cat((x, x[:, :8]), dim=1))
        x *= 2
        x += 1
        q, k, v = self.qkv(before).view(-1, 3, 4, 8).unbind(1)
        x += made
        return torch.cat((x + self.out(attend(0, q, k, v).flatten(1)), before), dim=1)


@needs_kernels
@pytest.mark.parametrize("fused", [False, True])
def test_nothing_moves_past_what_it_depends_on(fused: bool) -> None:
    assert_same(Rewritten(), [(4, 8)], "float32", fused=fused)


class NormedResidual(Odd):
    """Norms that a layer adds to what it makes of something else, or of the norm itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm2, self.norm3, self.square = nn.RMSNorm(24), nn.LayerNorm(24), nn.Linear(24, 24)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).view(-1, 3, 4, 8).unbind(1)
        y = self.norm2(x) + self.out(attend(0, q, k, v).flatten(1))
        n = self.norm3(y)
        return torch.cat((n + self.square(n), y), dim=1)


@needs_kernels
@pytest.mark.parametrize("fused", [False, True])
def test_a_norm_that_is_a_residual_stays_one(fused: bool) -> None:
    assert_same(NormedResidual(), [(4, 8)], "float32", fused=fused)


class AllTwins(Odd):
    """Functions as modules, on the logits too, and embeddings that share a head's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.tanh, self.sigmoid, self.places = nn.Tanh(), nn.Sigmoid(), nn.Embedding(300, 24)
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = super().forward(tokens, positions, attend)[:, :24]
        y: Tensor = x * self.sigmoid(x) + self.places(positions[None])[0]
        return y

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = 2 * self.tanh(self.head(hidden) / 2)
        return logits


@needs_kernels
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("format", get_args(WeightFormat))
def test_modules_of_single_functions_and_tied_tables(format: WeightFormat, fused: bool) -> None:
    assert_same(AllTwins(), [(4, 8)], format, fused=fused)


@needs_kernels
def test_a_position_beyond_its_table_is_an_error() -> None:
    kernels, model = NativeKernels(VARIANTS[0]), AllTwins().eval()
    accelerate(model, kernels, "float32")
    plan = Plan(record(model, model), kernels, Paged(kernels, [(4, 8)], torch.float32).layers)  # type: ignore[arg-type]
    batch = batch_of(plan, (0, 0), (3, 3))
    with pytest.raises(IndexError, match="beyond the table"):
        plan.run(replace(batch, positions=torch.as_tensor(batch.positions) + 298))


@needs_kernels
def tiny_plan() -> Plan:
    kernels, model = NativeKernels(VARIANTS[0]), tiny_model()
    accelerate(model, kernels, "float32")
    program = record(model, model)
    fuse(program)
    return Plan(program, kernels, Paged(kernels, [(2, 12)] * 2, torch.float32).layers)


def test_more_rows_of_the_same_step() -> None:
    """Prompts are scored by the logits of all their rows, after those that are sampled."""
    plan = tiny_plan()
    batch = batch_of(plan, (0, 0), (9, 3))
    sampled = plan.run(batch)
    everything = plan.more_logits(batch, torch.arange(12))
    assert torch.equal(everything[batch.sampled_rows], sampled)
    assert plan.run(replace(batch, sampled_rows=torch.empty(0, dtype=torch.int64))).shape == (0, sampled.shape[1])


def test_logits_take_the_same_memory_in_every_step() -> None:
    plan = tiny_plan()
    large, small = batch_of(plan, (0, 0), (9, 3)), batch_of(plan, (0, 0), (2, 1))
    first = plan.run(large)
    expected, place = first.clone(), first.data_ptr()
    assert plan.run(small).data_ptr() == place
    again = plan.run(large)
    assert again.data_ptr() == place
    assert torch.equal(again, expected)
    rows = torch.cat([torch.as_tensor(large.sampled_rows)] * 20)
    assert torch.equal(plan.run(replace(large, sampled_rows=rows)), expected.repeat(20, 1))
