"""A recorded program computes what the module computes, to the last bit, however it is fused and laid out."""

from __future__ import annotations

import itertools
import math
import socket
import time
from array import array
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from pellucid_model.config import DecoderConfig
from pellucid_model.contract import Attend
from pellucid_model.kernels import NativeKernels, accelerate, library
from pellucid_model.kernels.interface import WeightFormat
from pellucid_model.kernels.plan import Plan, PlanBatch, StepSampling, fuse, record
from pellucid_model.kernels.plan.program import Attention, Combine, Linear, writes
from pellucid_server.engine.messages import Sampling
from pellucid_server.engine.sampler import Sampler, SamplerRow, pack_rows
from pellucid_testing.checkpoints import tiny_config, tiny_model
from pellucid_testing.plans import BLOCK, BLOCKS, VARIANTS, Odd, Paged, assert_same, batch_of, needs_kernels


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
            # What follows the last attention runs for sampled rows alone.
            place = max(place for place, each in enumerate(program.instructions) if isinstance(each, Attention))
            behind = [operand for each in program.instructions[place + 1 :] for operand in writes(each)]
            assert {program.phases[operand.buffer] for operand in behind} == {"sampled"}
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


@needs_kernels
@pytest.mark.parametrize("variant", VARIANTS)
def test_heads_of_no_whole_vector_on_every_variant(variant: str) -> None:
    """Rows of attention are whole lines of the cache, and so may be written as bfloat16."""
    config: DecoderConfig = tiny_config(
        d_model=64, heads=8, head_dim=8, kv_heads=2, activation="swiglu", norm="rmsnorm"
    )
    assert (config.head_dim, config.heads * config.head_dim % 32) == (8, 0)
    shapes = [(config.kv_heads, config.head_dim)] * config.layers
    assert_same(tiny_model(config), shapes, "bfloat16", fused=True, variant=variant)


@needs_kernels
def test_what_only_layers_read_is_rounded_where_it_is_made() -> None:
    config = tiny_config(activation="swiglu", norm="rmsnorm")
    kernels = NativeKernels(VARIANTS[0])
    # Of every layer the attention and the gated product, but for the last attention: of its rows some are selected.
    expected: dict[WeightFormat, int] = {"bfloat16": 2 * config.layers - 1, "float32": 0, "int8": 0}
    for format, count in expected.items():
        model = tiny_model(config)
        accelerate(model, kernels, format)
        program = record(model, model)
        fuse(program)
        rounded = program.rounded()
        made = [each for each in program.instructions if {operand.buffer for operand in writes(each)} & rounded]
        assert len(made) == len(rounded) == count
        for each in made:
            assert isinstance(each, Attention) or (isinstance(each, Linear) and each.layers[0].gate is not None)


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
def test_a_batch_that_does_not_fit_is_an_error_however_many_rows_it_has() -> None:
    plan = tiny_plan(windows=(5, None))
    for rows in (2, 16, 17, 40):
        batch = batch_of(plan, (0, 0), (1, 1))
        single = torch.arange(rows)
        wide = replace(
            batch,
            tokens=single % 50,
            positions=single * 0,
            positions32=single.int() * 0,
            row_sequence=single.int(),
            block_tables=single.int() % BLOCKS,
            table_width=1,
            sampled_rows=single,
            windows=[None if each is None else torch.full((rows,), each, dtype=torch.int32) for each in plan.windows],
        )
        assert plan.run(wide).isfinite().all()
        wide.row_sequence[-1] = 2**30
        with pytest.raises(ValueError, match="row_sequence"):
            plan.run(wide)


def tiny_plan(**changes: Any) -> Plan:
    kernels, model = NativeKernels(VARIANTS[0]), tiny_model(tiny_config(**changes))
    accelerate(model, kernels, "float32")
    program = record(model, model)
    fuse(program)
    return Plan(program, kernels, Paged(kernels, [(2, 12)] * 2, torch.float32).layers)


@needs_kernels
def test_more_rows_of_the_same_step() -> None:
    """Prompts are scored by the logits of all their rows, after those that are sampled."""
    plan = tiny_plan()
    batch = batch_of(plan, (0, 0), (9, 3))
    sampled = plan.run(batch)
    everything = plan.more_logits(batch, torch.arange(12))
    assert torch.equal(everything[batch.sampled_rows], sampled)
    assert plan.run(replace(batch, sampled_rows=torch.empty(0, dtype=torch.int64))).shape == (0, sampled.shape[1])


@needs_kernels
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


# ---- Several steps in a row ----

VOCABULARY = tiny_config().vocab_size - 7
"""The model knows some ids more, which may not be sampled."""
SETTINGS = [Sampling(0.0, 0, 1.0, 0.0, 0), Sampling(3.0, 40, 1.0, 0.0, 7)]
PROMPTS = (9, 3)
"""Tokens of the two sequences before the first of the steps."""


def decode(plan: Plan, tokens: list[int], ahead: int) -> PlanBatch:
    """One row for each sequence, `ahead` steps behind the prompts."""
    batch = batch_of(plan, [length + ahead for length in PROMPTS], (1, 1))
    return replace(batch, tokens=torch.tensor(tokens))


def single_steps(plan: Plan, count: int) -> tuple[list[int], Tensor]:
    """Sampled ids [count * 2], and the logits of the last step."""
    plan.run(batch_of(plan, (0, 0), PROMPTS))
    sampler = Sampler(VOCABULARY, library.load_library())
    tokens, sampled = [5, 6], []
    for ahead in range(count):
        logits = plan.run(decode(plan, tokens, ahead))
        drawn = sampler.sample(logits, [SamplerRow(each, (), 3 + ahead) for each in SETTINGS])
        tokens = [token for token in drawn if token is not None]
        sampled += tokens
    return sampled, logits.clone()


def sampling_of(most: int, output_index: int = 3) -> StepSampling:
    """Of two sequences, without an end."""
    return StepSampling(
        most=most,
        vocab_size=VOCABULARY,
        settings=pack_rows([SamplerRow(each, (), output_index) for each in SETTINGS], array("i")),
        end_ids=array("q"),
        end_begins=array("i", [0, 0, 0]),
        until=math.inf,
        descriptor=-1,
    )


def steps_in_a_row(plan: Plan, **changes: Any) -> tuple[list[int], list[float], Tensor]:
    """The same in one call."""
    plan.run(batch_of(plan, (0, 0), PROMPTS))
    ran = plan.run_steps(decode(plan, [5, 6], 0), replace(sampling_of(12), **changes))
    assert ran.written == len(changes.get("outgoing", b""))
    return ran.sampled.tolist(), ran.ended.tolist(), ran.logits.clone()


@needs_kernels
@pytest.mark.parametrize("changes", [{}, {"position": "learned"}, {"position": "alibi", "windows": (5, 9)}], ids=str)
def test_steps_in_a_row_are_single_steps(changes: dict[str, Any]) -> None:
    one_by_one, at_once = tiny_plan(**changes), tiny_plan(**changes)
    expected, last = single_steps(one_by_one, 12)
    began = time.monotonic()
    sampled, ended, logits = steps_in_a_row(at_once)
    assert sampled == expected
    assert len(set(expected[::2])) > 3
    assert torch.equal(logits, last)
    moments = [began, *ended, time.monotonic()]
    assert moments == sorted(moments)
    assert len(ended) == 12
    assert all(map(torch.equal, itertools.chain(*one_by_one._caches), itertools.chain(*at_once._caches)))


@needs_kernels
def test_what_ends_steps_in_a_row_ends_them_after_the_step_that_runs() -> None:
    expected, _ = single_steps(tiny_plan(), 12)
    first, second = expected[::2], expected[1::2]
    place = next(i for i in range(2, 10) if second[i] not in second[:i])
    ends = array("q", [1000, second[place]])
    assert steps_in_a_row(tiny_plan(), until=time.monotonic())[0] == expected[:2]
    assert steps_in_a_row(tiny_plan(), most=5)[0] == expected[:10]
    # The token ends the sequence whose own it is, and not the other.
    own = steps_in_a_row(tiny_plan(), end_ids=ends, end_begins=array("i", [0, 0, 2]))
    assert own[0] == expected[: 2 * (place + 1)]
    other = steps_in_a_row(tiny_plan(), end_ids=ends, end_begins=array("i", [0, 2, 2]))
    assert other[0] == (expected[: 2 * (first.index(ends[1]) + 1)] if ends[1] in first else expected)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert steps_in_a_row(tiny_plan(), descriptor=ours.fileno())[0] == expected
        theirs.send(b"x")
        assert steps_in_a_row(tiny_plan(), descriptor=ours.fileno())[0] == expected[:2]


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 3_000_000], ids=["short", "more than a socket holds"])
def test_what_goes_out_is_written_beside_the_steps(monkeypatch: pytest.MonkeyPatch, threads: int, size: int) -> None:
    """Once and whole, while nobody reads it yet, too."""
    monkeypatch.setattr(library, "_threads", threads)
    outgoing = bytes(range(256)) * (size // 256 + 1)
    expected = steps_in_a_row(tiny_plan())[0]
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as thread:
        running = thread.submit(steps_in_a_row, tiny_plan(), descriptor=ours.fileno(), outgoing=outgoing)
        theirs.settimeout(20)
        read = b""
        while len(read) < len(outgoing):
            read += theirs.recv(1 << 20)
        assert running.result()[0] == expected
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
    assert read == outgoing


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_ends_after_a_step_where_nobody_reads_what_goes_out(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(library, "_threads", threads)
    plan, (ours, theirs) = tiny_plan(), socket.socketpair()
    expected = steps_in_a_row(tiny_plan(), most=1)[0]
    with ours:
        theirs.close()
        plan.run(batch_of(plan, (0, 0), PROMPTS))
        ran = plan.run_steps(decode(plan, [5, 6], 0), replace(sampling_of(12), descriptor=ours.fileno(), outgoing=b"x"))
    assert (ran.sampled.tolist(), ran.written) == (expected, 0)


@needs_kernels
def test_a_message_in_the_middle_ends_steps_in_a_row() -> None:
    """There are more of them than anybody would wait for: they go round and round in the few blocks of a window."""
    plan, most = tiny_plan(position="none", windows=(5, 9)), 1_000_000
    table = torch.arange(BLOCKS // 2, dtype=torch.int32).repeat(most // BLOCK // (BLOCKS // 2) + 2)
    batch = replace(
        batch_of(plan, (0, 0), (1, 1)),
        block_tables=torch.cat((table, table + BLOCKS // 2)),
        table_width=len(table),
    )
    sampling = sampling_of(most, output_index=0)
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as thread:
        running = thread.submit(plan.run_steps, batch, replace(sampling, descriptor=ours.fileno()))
        while int(batch.positions[0]) < 3:  # it moves on in place
            time.sleep(0)
        theirs.send(b"x")
        sampled, ended, _, _ = running.result()
    assert 3 <= len(ended) < most
    assert len(sampled) == 2 * len(ended)
    assert int(batch.positions[1]) == len(ended) - 1
