"""A recorded program computes what the module computes, to the last bit, however it is fused and laid out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pellucid_model.config import DecoderConfig
from pellucid_model.contract import Attend, AttentionOptions, Rotary
from pellucid_model.gathered import Gathered
from pellucid_model.kernels import NativeKernels, RotaryTables, accelerate, library
from pellucid_model.kernels.interface import WeightFormat
from pellucid_model.kernels.plan import NotRecordable, Plan, PlanBatch, Program, fuse, record
from pellucid_model.kernels.plan.program import Combine, Copy, Operand, writes
from pellucid_testing.checkpoints import tiny_config, tiny_model

VARIANTS = library.supported_variants()
needs_kernels = pytest.mark.skipif(not VARIANTS, reason="no compiled kernels")
BLOCK, BLOCKS = 8, 32


class Paged(Attend):
    """`attend` over a paged cache for one batch, and the cache itself."""

    def __init__(self, kernels: NativeKernels, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
        self.kernels = kernels
        self.layers: list[tuple[Tensor, Tensor]] = []
        """A layer without a shape of its own has its predecessor's cache."""
        for heads, dim in shapes:
            if not heads:
                self.layers.append(self.layers[-1])
                continue
            keys, values = (torch.zeros(BLOCKS, heads, BLOCK, dim, dtype=dtype) for _ in "kv")
            self.layers.append((keys, values))
        self.batch: PlanBatch | None = None

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        options: AttentionOptions,
        kv_from: int | None,
    ) -> Tensor:
        if self.batch is None:
            raise RuntimeError("there is no batch")
        rotary, window = options.rotary, options.window
        cos, sin = RotaryTables(rotary).table(BLOCK * BLOCKS) if rotary else (None, None)
        keys, values = self.layers[layer]
        return self.kernels.paged_attention(
            q,
            k,
            v,
            keys,
            values,
            row_sequence=torch.as_tensor(self.batch.row_sequence),
            positions=torch.as_tensor(self.batch.positions32),
            block_tables=torch.as_tensor(self.batch.block_tables).view(2, -1),
            scale=options.scale,
            cos=cos,
            sin=sin,
            interleaved=rotary is not None and rotary.interleaved,
            alibi_slopes=options.alibi_slopes,
            distance_bias=options.distance_bias,
            window=None if window is None else torch.full((2,), window, dtype=torch.int32),
            softcap=options.softcap,
        )

    def gathered(self, *args: Any, **options: Any) -> Gathered:
        raise NotImplementedError


def batch_of(plan: Plan, starts: Sequence[int], counts: Sequence[int]) -> PlanBatch:
    """The next tokens of two sequences, each with a half of the cache; the last row of each is sampled."""
    positions = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    rows = torch.repeat_interleave(torch.arange(2, dtype=torch.int32), torch.tensor(counts))
    return PlanBatch(
        tokens=(7 * positions + 3 * rows) % 50,
        positions=positions,
        positions32=positions.int(),
        row_sequence=rows,
        block_tables=torch.arange(BLOCKS, dtype=torch.int32),
        table_width=BLOCKS // 2,
        sampled_rows=torch.tensor(counts).cumsum(0) - 1,
        windows=[None if each is None else torch.full((2,), each, dtype=torch.int32) for each in plan.windows],
        angles=[RotaryTables(each).table(BLOCK * BLOCKS) for each in plan.rotaries],
    )


STEPS = (((0, 0), (9, 3)), ((9, 3), (5, 1)), ((14, 4), (1, 1)), ((15, 5), (1, 30)))
"""(starts, counts): prefill, a chunk beside a decode, two decodes, a decode beside a prompt's rest."""


def assert_same(module: nn.Module, shapes: Sequence[tuple[int, int]], format: WeightFormat, *, fused: bool) -> Program:
    """Run the steps through the module and through its plan, each with a cache of its own; return the program."""
    kernels = NativeKernels(VARIANTS[0])
    module = module.float().eval()
    accelerate(module, kernels, format)
    dtype = torch.float32 if format == "float32" else torch.bfloat16
    program = record(module, module)  # type: ignore[arg-type]
    by_module, by_plan = Paged(kernels, shapes, dtype), Paged(kernels, shapes, dtype)
    if fused:
        fuse(program)
    plan = Plan(program, kernels, by_plan.layers)
    with torch.inference_mode():
        for starts, counts in STEPS:
            batch = by_module.batch = batch_of(plan, starts, counts)
            hidden = module.forward(batch.tokens, batch.positions, by_module)
            expected = module.logits(hidden.index_select(0, batch.sampled_rows))  # type: ignore[operator]
            assert torch.equal(plan.run(batch), expected)
    assert all(torch.equal(a, b) for a, b in zip(flat(by_module), flat(by_plan), strict=True))
    return program


def assert_close(module: Odd, program: Program, kernels: NativeKernels, tolerance: float) -> None:
    """The same for an accelerated module whose own functions may give other last bits than the plan's."""
    by_module, by_plan = (Paged(kernels, [(4, 8)], torch.float32) for _ in range(2))
    plan = Plan(program, kernels, by_plan.layers)
    with torch.inference_mode():
        for starts, counts in STEPS:
            batch = by_module.batch = batch_of(plan, starts, counts)
            expected = module.logits(module(batch.tokens, batch.positions, by_module)[batch.sampled_rows])
            torch.testing.assert_close(plan.run(batch), expected, rtol=tolerance, atol=tolerance)


def flat(paged: Paged) -> list[Tensor]:
    return [tensor for layer in paged.layers for tensor in layer]


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


class Odd(nn.Module):
    """What a user might write: one fused projection, heads normalised, views, a residual in place, a cat, a scale."""

    position_scheme = "rotary"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.qkv, self.out = nn.Embedding(50, 24), nn.Linear(24, 3 * 32), nn.Linear(32, 24)
        self.key_norm, self.norm, self.head = nn.RMSNorm(8), nn.LayerNorm(24, bias=False), nn.Linear(48, 50)
        self.gain = nn.Parameter(torch.randn(24))
        self.rotary = Rotary.from_base(8, 100.0)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embedding(tokens) / 3
        q, k, v = self.qkv(self.norm(x) * self.gain).view(-1, 3, 4, 8).unbind(1)
        x += self.out(attend(0, q, self.key_norm(k), v, rotary=self.rotary, scale=0.5).flatten(1))
        return torch.cat((x, self.embedding(tokens) - x), dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden) * 0.25
        return logits


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
def test_more_rows_of_the_same_step() -> None:
    """Prompts are scored by the logits of all their rows, after those that are sampled."""
    kernels, model = NativeKernels(VARIANTS[0]), tiny_model()
    accelerate(model, kernels, "float32")
    program = record(model, model)
    fuse(program)
    plan = Plan(program, kernels, Paged(kernels, [(2, 12)] * 2, torch.float32).layers)
    batch = batch_of(plan, (0, 0), (9, 3))
    sampled = plan.run(batch)
    everything = plan.more_logits(batch, torch.arange(12))
    assert torch.equal(everything[batch.sampled_rows], sampled)
    assert plan.run(replace(batch, sampled_rows=torch.empty(0, dtype=torch.int64))).shape == (0, sampled.shape[1])


def shifted_in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:] = y[:, :-1]
    return y


REFUSED: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "operator": lambda m, x, tokens, positions: torch.sin(x),
    "value": lambda m, x, tokens, positions: x * 2 if x[0, 0] > 0 else x,
    "rows": lambda m, x, tokens, positions: x * len(tokens),
    "mix": lambda m, x, tokens, positions: x + x.sum(0),
    "transposed": lambda m, x, tokens, positions: x.T.relu().sum(-1, keepdim=True) + x,
    "positions": lambda m, x, tokens, positions: x + positions[:, None],
    "first position": lambda m, x, tokens, positions: x * positions[0],
    "joined positions": lambda m, x, tokens, positions: torch.cat((x[:, :47], positions[:, None]), dim=1),
    "last position": lambda m, x, tokens, positions: m.embedding(positions[-1:].expand(len(positions))),
    "position in a table": lambda m, x, tokens, positions: x + m.gain[positions[-1:].expand(len(positions))][:, None],
    "list of positions": lambda m, x, tokens, positions: x * (1 + max(positions.tolist())),
    "branch by a list": lambda m, x, tokens, positions: x * 2 if 3 in tokens.tolist() else x,
    "array": lambda m, x, tokens, positions: x * float(x.detach().numpy().sum()),
    "bytes": lambda m, x, tokens, positions: x * tokens.untyped_storage().tolist()[0],
    "constant by row": lambda m, x, tokens, positions: torch.cat((x[:, :47], torch.arange(len(x))[:, None]), dim=1),
    "overlap": lambda m, x, tokens, positions: shifted_in_place(x),
    "power": lambda m, x, tokens, positions: x.pow(2.5),
    "largest": lambda m, x, tokens, positions: torch.maximum(x, -x),
    "rolled": lambda m, x, tokens, positions: x + x.roll(1, dims=0),
    "summed": lambda m, x, tokens, positions: x + x.sum(),
    "fails": lambda m, x, tokens, positions: x.view(1, 2, 3),
}


class Refused(Odd):
    """Odd, with one thing that cannot be recorded."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = REFUSED[what]

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return self.what(self, super().forward(tokens, positions, attend), tokens, positions)


@needs_kernels
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_recorded_says_so(what: str) -> None:
    model = Refused(what)
    accelerate(model, NativeKernels(VARIANTS[0]), "float32")
    with pytest.raises(NotRecordable, match=r"it |what the module"):
        record(model, model)  # type: ignore[arg-type]
    assert torch.is_tensor(model.norm(torch.zeros(1, 24)))  # its layers are as they were


@given(st.lists(st.tuples(st.integers(1, 70), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_buffers_that_live_together_lie_apart(buffers: list[tuple[int, int, int]]) -> None:
    program = Program()
    lives = []
    for width, a, b in buffers:
        lives.append((min(a, b), max(a, b), program.new_buffer(width, "tokens")))
    for moment in range(10):
        for first, last, buffer in lives:
            if moment in (first, last):
                operand = Operand(buffer, 0, program.widths[buffer])
                program.instructions.append(Copy(operand, operand))
    places, arenas = program.places()
    spans = []
    for _, _, buffer in lives:
        when = [index for index, each in enumerate(program.instructions) if writes(each)[0].buffer == buffer]
        spans.append((when[0], when[-1], buffer))
    for first, last, buffer in spans:
        assert places[buffer] % 16 == 0
        assert places[buffer] + program.widths[buffer] <= arenas["tokens"]
        for first2, last2, other in spans:
            if other != buffer and first <= last2 and first2 <= last:
                begin, end = places[buffer], places[buffer] + program.widths[buffer]
                assert end <= places[other] or places[other] + program.widths[other] <= begin
