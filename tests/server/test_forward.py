"""Which modules run as a recorded plan, and that a plan of one's own file is the built-in decoder's."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

from pellucid_model.contract import DecoderModel
from pellucid_model.decoder import Decoder
from pellucid_model.kernels import NativeKernels, accelerate, library
from pellucid_model.kernels.plan import Program, fuse, record
from pellucid_model.kernels.plan.program import Normalize, reads, writes
from pellucid_model.servable import build_module
from pellucid_server.engine import forward
from pellucid_server.engine.forward import ModuleForward, PlannedForward
from pellucid_server.engine.loading import Loaded, load
from pellucid_server.engine.trial import BLOCK_SIZE, SEQUENCES, distance, trial_rows
from pellucid_testing.checkpoints import tiny_checkpoint, tiny_config
from pellucid_testing.own_modules import CONTRACT, EXAMPLES, NANOGPT, TEXTBOOK, Example, saved_checkpoint
from pellucid_testing.stepping import configure

pytestmark = pytest.mark.skipif(not library.supported_variants(), reason="no compiled kernels")
GATHERED = "talking heads"


def loaded(checkpoint: Path, module: str = "") -> Loaded:
    return load(configure(checkpoint, module=module))


def forward_of(held: Loaded) -> object:
    return held.runner._forward


@pytest.mark.parametrize("name", sorted(CONTRACT.keys() - {GATHERED}))
def test_modules_of_ones_own_run_as_plans(name: str, tmp_path: Path) -> None:
    held = loaded(CONTRACT[name].checkpoint(tmp_path / name), CONTRACT[name].source)
    assert isinstance(forward_of(held), PlannedForward)
    assert held.ready.batch_invariant
    assert not any("Python" in notice for notice in held.ready.notices)


def test_a_module_that_gathers_runs_as_it_is_and_says_so(tmp_path: Path) -> None:
    example = CONTRACT[GATHERED]
    held = loaded(example.checkpoint(tmp_path / "heads"), example.source)
    assert isinstance(forward_of(held), ModuleForward)
    assert any("run in Python" in notice and "gathers" in notice for notice in held.ready.notices)


@pytest.mark.parametrize("example", [TEXTBOOK, NANOGPT], ids=lambda example: example.name)
def test_adopted_modules_run_as_plans(example: Example, tmp_path: Path) -> None:
    held = loaded(saved_checkpoint(tmp_path / "saved.pt", example), example.source)
    assert isinstance(forward_of(held), PlannedForward)


def test_torch_operators_have_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PELLUCID_KERNELS", "torch")
    assert isinstance(forward_of(loaded(tiny_checkpoint(tmp_path / "tiny"))), ModuleForward)


def test_a_file_of_ones_own_costs_nothing() -> None:
    """A module in a file, written as one would write it, comes to the very instructions of the built-in decoder."""
    config = tiny_config(
        norm="rmsnorm", activation="swiglu", attention_bias=False, mlp_bias=False, d_model=48, tied_head=False
    )
    own = build_module(f"{EXAMPLES / 'custom_model' / 'llama.py'}:Llama", config.to_json())

    def outline(model: nn.Module) -> list[object]:
        """Instructions and where their numbers lie; not the weights themselves, nor whose objects they are."""
        accelerate(model, NativeKernels(library.variant()), "bfloat16")
        program: Program = record(model, cast("DecoderModel", model))
        fuse(program)
        return [(type(each), reads(each), writes(each)) for each in program.instructions]

    assert outline(own.eval()) == outline(Decoder(config).eval())


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_a_wrong_plan_is_not_used(quantize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded_wrongly(module: nn.Module, model: DecoderModel) -> Program:
        program = record(module, model)
        index = next(i for i, each in enumerate(program.instructions) if isinstance(each, Normalize))
        normalize = cast("Normalize", program.instructions[index])
        program.instructions[index] = replace(normalize, norm=replace(normalize.norm, eps=1.0))
        return program

    checkpoint = tiny_checkpoint(tmp_path / "tiny")
    assert isinstance(load(configure(checkpoint, quantize=quantize)).runner._forward, PlannedForward)
    monkeypatch.setattr(forward, "record", recorded_wrongly)
    held = load(configure(checkpoint, quantize=quantize))
    assert isinstance(held.runner._forward, ModuleForward)
    assert any("run in Python" in each and "computes other numbers" in each for each in held.ready.notices)
    assert not held.ready.batch_invariant, "torch's operators stand between the layers"


@pytest.mark.parametrize(("vocab_size", "context_length"), [(1, 1), (2, 3), (50, 17), (50_000, 40), (256, 100_000)])
def test_trials_stay_within_the_model(vocab_size: int, context_length: int) -> None:
    rows, blocks = trial_rows(vocab_size, context_length)
    tables = torch.tensor(rows.block_tables).view(len(SEQUENCES), rows.table_width)
    assert len(rows.tokens) == len(rows.positions) == len(rows.row_sequence)
    assert max(rows.tokens) < vocab_size
    assert max(rows.positions) < context_length
    written = [
        int(tables[sequence, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
        for sequence, position in zip(rows.row_sequence, rows.positions, strict=True)
    ]
    assert min(written) >= BLOCK_SIZE
    assert max(written) < blocks * BLOCK_SIZE
    assert len(set(written)) == len(written)


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [
        ([1.0, -2.0], [1.0, -2.0], 0.0),
        ([1.0, -2.5], [1.0, -2.0], 0.25),
        ([nan, inf, 1.0], [nan, inf, 1.0], 0.0),
        ([0.0, 1.0], [nan, 1.0], inf),
        ([nan, 1.0], [0.0, 1.0], inf),
        ([1.0], [1.0, 2.0], inf),
    ],
)
def test_distances_are_relative(a: list[float], b: list[float], apart: float) -> None:
    assert distance(torch.tensor(a), torch.tensor(b)) == apart
