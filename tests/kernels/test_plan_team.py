"""A team of threads runs a plan: no bit and no error depends on how many they are."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from pellucid_model.kernels import NativeKernels, library
from pellucid_model.kernels.cache_layout import INT8
from pellucid_model.kernels.interface import WeightFormat
from pellucid_model.kernels.plan import Plan, PlanBatch, Program, StepSampling
from pellucid_model.kernels.plan.program import Linear
from pellucid_server.engine.messages import Sampling
from pellucid_server.engine.sampler import SamplerRow, pack_rows
from pellucid_testing.plans import needs_kernels
from pellucid_testing.wide_plans import (
    BLOCK,
    VOCABULARY,
    Between,
    Wide,
    batches,
    cache,
    recorded,
    results,
    results_of_module,
)

pytestmark = [needs_kernels, pytest.mark.usefixtures("one_torch_thread")]

THREADS = (1, 2, 3, 8)


def assert_threads_change_nothing(
    monkeypatch: pytest.MonkeyPatch, kernels: NativeKernels, program: Program, dtype: torch.dtype, **options: Any
) -> list[Tensor]:
    """Compare the results of every number of threads; return them."""
    found = []
    for threads in THREADS:
        monkeypatch.setattr(library, "_threads", threads)
        paged = cache(kernels, dtype)
        found.append(results(Plan(program, kernels, paged.layers), paged, **options))
    monkeypatch.setattr(library, "_threads", 1)
    for threads, other in zip(THREADS, found, strict=True):
        assert same(other, found[0]), f"{threads} threads"
    assert found[0][0].std() > 0.1
    return found[0]


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def kinds(program: Program) -> set[str]:
    return {type(each).__name__ for each in program.instructions}


@pytest.mark.parametrize("windows", [(None, 100), (100, None)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, INT8], ids=str)
@pytest.mark.parametrize("format", get_args(WeightFormat))
def test_any_number_of_threads_computes_what_the_module_computes(
    format: WeightFormat,
    dtype: torch.dtype,
    windows: tuple[int | None, int | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = Wide(windows)
    kernels, program = recorded(module, format, fused=True)
    found = assert_threads_change_nothing(monkeypatch, kernels, program, dtype)
    paged = cache(kernels, dtype)
    expected = results_of_module(module, Plan(program, kernels, paged.layers), paged)
    assert same(found, expected)


def test_unfused_instructions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Wide()
    kernels, program = recorded(module, "float32", fused=False)
    assert {"Activate", "Attention", "Combine", "Gather", "Linear", "Normalize", "Select"} <= kinds(program)
    found = assert_threads_change_nothing(monkeypatch, kernels, program, torch.float32)
    paged = cache(kernels)
    expected = results_of_module(module, Plan(program, kernels, paged.layers), paged)
    assert same(found, expected)


@pytest.mark.parametrize("fused", [False, True])
def test_what_stands_between_layers(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Between()
    kernels, program = recorded(module, "float32", fused=fused)
    assert {"Combine", "Rearrange", "Reduce"} <= kinds(program)
    found = assert_threads_change_nothing(monkeypatch, kernels, program, torch.float32)
    paged = cache(kernels)
    expected = results_of_module(module, Plan(program, kernels, paged.layers), paged)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, INT8], ids=str)
def test_windows_that_roll(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, program = recorded(Wide(), "bfloat16", fused=True)
    rolling = assert_threads_change_nothing(monkeypatch, kernels, program, dtype, rolling=True)
    paged = cache(kernels, dtype)
    assert not torch.equal(results(Plan(program, kernels, paged.layers), paged)[-3], rolling[-3])


def test_memory_that_a_fresh_thread_gets_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the second layer's attention is split: its partial results need room that the first one's do not."""
    kernels, program = recorded(Wide((50, None)), "bfloat16", fused=True)
    paged = cache(kernels)
    plan = Plan(program, kernels, paged.layers)
    prompt, batch = batches(plan, [{0: 190, 1: 190}, {0: 1, 1: 1}])
    plan.run(prompt)
    monkeypatch.setattr(library, "_threads", 1)
    expected = plan.run(batch).clone()
    for threads in (2, 3, 8) * 4:
        monkeypatch.setattr(library, "_threads", threads)
        with ThreadPoolExecutor(1) as fresh:
            assert torch.equal(fresh.submit(plan.run, batch).result(), expected), f"{threads} threads"


# ---- Several steps in a row ----


def steps_in_a_row(plan: Plan, sequences: int) -> tuple[list[int], Tensor]:
    """12 of `sequences` sequences behind their prompts -> ids, logits of the last one."""
    prompts = {0: 125, 1: 3, **dict.fromkeys(range(2, sequences), 2)}
    prompt, batch = batches(plan, [prompts, dict.fromkeys(range(sequences), 1)])
    plan.run(prompt)
    settings = [Sampling(3.0 * (s % 2), 40 * (s % 2), 1.0, 0.0, s) for s in range(sequences)]
    sampling = StepSampling(
        most=12,
        vocab_size=VOCABULARY,
        settings=pack_rows([SamplerRow(each, (), 2) for each in settings], array("i")),
        end_ids=array("q"),
        end_begins=array("i", [0] * (sequences + 1)),
        until=math.inf,
        descriptor=-1,
    )
    sampled, _, logits, _ = plan.run_steps(batch, sampling)
    return sampled.tolist(), logits.clone()


@pytest.mark.parametrize("sequences", [2, 19])
@pytest.mark.parametrize("format", ["bfloat16", "int4"])
def test_steps_in_a_row(format: WeightFormat, sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, program = recorded(Wide(), format, fused=True)
    found = []
    for threads in THREADS:
        monkeypatch.setattr(library, "_threads", threads)
        paged = cache(kernels, torch.bfloat16)
        sampled, logits = steps_in_a_row(Plan(program, kernels, paged.layers), sequences)
        found.append((sampled, [logits, *paged.layers[0]]))
    assert len(found[0][0]) == 12 * sequences
    for sampled, tensors in found:
        assert sampled == found[0][0]
        assert same(tensors, found[0][1])


@pytest.mark.parametrize("fused", [False, True])
def test_no_layer_writes_what_it_reads(fused: bool) -> None:
    """A thread that is late reads its input when others have written their output."""
    _, program = recorded(Wide(), "float32", fused=fused)
    layers = [(each.x, layer.out) for each in program.instructions if isinstance(each, Linear) for layer in each.layers]
    assert len(layers) >= 12
    assert all(x.buffer != out.buffer for x, out in layers)


# ---- Errors ----


def beyond_table(batch: PlanBatch) -> PlanBatch:
    tokens = torch.as_tensor(batch.tokens).clone()
    tokens[-1] = VOCABULARY
    return replace(batch, tokens=tokens)


def strange_sequence(batch: PlanBatch) -> PlanBatch:
    rows = torch.as_tensor(batch.row_sequence).clone()
    rows[-1] = 2**30
    return replace(batch, row_sequence=rows)


def without_own_block(batch: PlanBatch) -> PlanBatch:
    return without_block(batch, int(batch.positions[0]) // BLOCK)


def without_block(batch: PlanBatch, block: int = 0) -> PlanBatch:
    """Of the first sequence; the first block is one that only attention itself misses."""
    tables = torch.as_tensor(batch.block_tables).clone()
    tables[block] = -1
    return replace(batch, block_tables=tables)


def without_last_block(batch: PlanBatch) -> PlanBatch:
    """Of the last sequence the first block, which a helper misses and not the caller."""
    return without_block(batch, len(batch.block_tables) - batch.table_width)


@pytest.mark.parametrize("step", [{0: 1}, dict.fromkeys(range(17), 1), {0: 100, 1: 30}], ids=["1", "17", "130"])
@pytest.mark.parametrize(
    ("spoil", "error", "named"),
    [
        (beyond_table, IndexError, "beyond the table"),
        (strange_sequence, ValueError, "row_sequence"),
        (without_own_block, ValueError, "block_tables"),
        (without_block, ValueError, "block_tables"),
        (without_last_block, ValueError, "block_tables"),
    ],
)
def test_errors_are_the_same_and_harm_nothing(
    spoil: Callable[[PlanBatch], PlanBatch],
    error: type[Exception],
    named: str,
    step: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels, program = recorded(Wide(), "int8", fused=True)
    messages, found = set(), []
    for threads in (1, 2, 8):
        monkeypatch.setattr(library, "_threads", threads)
        paged = cache(kernels)
        plan = Plan(program, kernels, paged.layers)
        first, batch = batches(plan, [{0: 150, 1: 40}, step])
        plan.run(first)
        for _ in range(20):
            with pytest.raises(error, match=named) as raised:
                plan.run(spoil(batch))
            messages.add(str(raised.value))
            found.append([plan.run(batch).clone(), *(each.clone() for each in paged.layers[0])])
    assert len(messages) == 1
    for each in found:
        assert same(each, found[0])
