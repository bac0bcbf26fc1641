"""The forward pass of a GPU on the CPU, with the kernel's slow twin and steps that are called instead of recorded."""

from __future__ import annotations

import dataclasses
from array import array
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from pellucid_model.config import DecoderConfig
from pellucid_model.kernels import TorchKernels
from pellucid_server.engine.cache import KVCache, learn_shapes
from pellucid_server.engine.flash_forward import DecodeShape, FlashForward
from pellucid_server.engine.forward import fused_forward
from pellucid_server.engine.graphs import Computation, Recorder
from pellucid_server.engine.messages import LogprobWish, Submit
from pellucid_server.engine.ragged import StepRows
from pellucid_server.engine.runner import ModelRunner
from pellucid_server.engine.sampler_device import choose
from pellucid_server.engine.varlen import TWIN, Varlen, fitted
from pellucid_server.kv.blocks import BlockPool
from pellucid_server.kv.window import ContextWindow
from pellucid_testing.checkpoints import tiny_checkpoint, tiny_config, tiny_model
from pellucid_testing.sampling import GREEDY, make_row, sampling
from pellucid_testing.stepping import Stepper, reference_logits, submission

CPU = torch.device("cpu")
BLOCKS, BLOCK_SIZE = 120, 8
PACKING = dataclasses.replace(TWIN, reads_pages=False)
ROTARY = tiny_config(head_dim=16, norm="rmsnorm", activation="swiglu")
WINDOWS = tiny_config(head_dim=16, windows=(9, 9))


class CountingRecorder:
    """Calls plainly, and counts by bucket how often."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, compute: Computation) -> Computation:
        def counted() -> tuple[torch.Tensor, torch.Tensor]:
            outputs = compute()
            self.calls.append(len(outputs[1]))
            return outputs

        return counted


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[DecoderConfig, Path]:
    return {each: tiny_checkpoint(tmp_path_factory.mktemp("tiny"), each) for each in (ROTARY, WINDOWS)}


def on_flash(
    stepper: Stepper, config: DecoderConfig, recorder: Recorder | None, width: int = 16, varlen: Varlen | str = TWIN
) -> list[str]:
    """Put the twin's forward pass into a stepper -> notices. The last block of its cache is spare."""
    model, kernels, notices = tiny_model(config), TorchKernels(), list[str]()
    cache = KVCache(learn_shapes(model, CPU), BLOCKS + 1, BLOCK_SIZE, torch.float32, CPU)
    decoding = DecodeShape(stepper.max_running, width, spare_block=BLOCKS)
    forward = fused_forward(model, kernels, cache, CPU, varlen, decoding, recorder, notices)
    runner = ModelRunner(model, kernels, cache, CPU, forward)
    stepper.loaded = dataclasses.replace(stepper.loaded, runner=runner, pool=BlockPool(BLOCKS, BLOCK_SIZE))
    return notices


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, ROTARY.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def crowd(count: int = 5, **changes: Any) -> list[Submit]:
    return [submission(key, prompt_of(3 + 9 * key, key), 6 + 2 * key, **changes) for key in range(count)]


def assert_same_runs(have: Stepper, want: Stepper) -> None:
    assert have.tokens == want.tokens
    assert have.tokens
    for key, rows in want.logits.items():
        expected = torch.stack(rows)
        assert (torch.stack(have.logits[key]) - expected).abs().max() <= 5e-5 * expected.abs().max()


@pytest.mark.parametrize("config", [ROTARY, WINDOWS], ids=["rotary", "windows"])
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("varlen", [TWIN, PACKING], ids=["pages", "packed"])
def test_a_crowd_is_what_the_cpu_computes(
    checkpoints: dict[DecoderConfig, Path], config: DecoderConfig, recorded: bool, varlen: Varlen
) -> None:
    """In chunks, in company that comes and goes, with preemptions, with blocks that a window has given back."""
    plain, flash = Stepper.of(checkpoints[config]), Stepper.of(checkpoints[config])
    recorder = CountingRecorder()
    assert on_flash(flash, config, recorder if recorded else None, varlen=varlen) == []
    for how in ({}, {"gap": 2, "max_step_tokens": 17}, {"blocks": 17}):
        plain.run(*crowd(), **how)  # type: ignore[arg-type]
        flash.run(*crowd(), **how)  # type: ignore[arg-type]
        assert_same_runs(flash, plain)
        assert max(flash.batch_sizes) >= 3
    assert {1, 2, 4, 8} == set(recorder.calls) if recorded else not recorder.calls


POSITIONS: dict[str, dict[str, Any]] = {
    "learned": {"position": "learned"},
    "sinusoidal": {"position": "sinusoidal"},
    "none": {"position": "none"},
    "rotary": {"windows": (None, 9)},
    "half rotary": {"rotary_fraction": 0.5},
    "interleaved": {"rotary_interleaved": True},
    "half interleaved": {"rotary_interleaved": True, "rotary_fraction": 0.5, "tied_head": True},
}


@pytest.mark.parametrize("name", POSITIONS)
def test_every_position_encoding_equals_the_float64_reference(tmp_path: Path, name: str) -> None:
    config = tiny_config(**({"head_dim": 16} | POSITIONS[name]))
    stepper = Stepper.of(tiny_checkpoint(tmp_path, config), max_running=4)
    assert on_flash(stepper, config, CountingRecorder()) == []
    stepper.run(submission(1, prompt_of(37), 20), max_step_tokens=5)
    want = reference_logits(tiny_model(config).double(), prompt_of(37) + stepper.tokens[1])
    have = torch.stack(stepper.logits[1])
    assert (have - want[36:-1]).abs().max() <= 2e-5 * want.abs().max()


@pytest.mark.parametrize("sinks", [0, 2])
def test_rolling_windows_leave_the_recorded_steps_in_time(checkpoints: dict[DecoderConfig, Path], sinks: int) -> None:
    plain, flash = Stepper.of(checkpoints[ROTARY]), Stepper.of(checkpoints[ROTARY])
    recorder = CountingRecorder()
    on_flash(flash, ROTARY, recorder)
    rolls = {"context": ContextWindow("roll", sinks, 20), "max_length": 1000}
    requests = [submission(key, prompt_of(5 + 13 * key, key), 20, **rolls) for key in range(3)]
    for stepper in (plain, flash):
        stepper.run(*requests, submission(3, prompt_of(6), 30))
    assert_same_runs(flash, plain)
    assert 0 < len(recorder.calls) < len(flash.steps)


def test_longer_sequences_than_recorded_ones_run_as_they_are(checkpoints: dict[DecoderConfig, Path]) -> None:
    plain, flash = Stepper.of(checkpoints[ROTARY]), Stepper.of(checkpoints[ROTARY])
    recorder = CountingRecorder()
    on_flash(flash, ROTARY, recorder, width=2)
    for stepper in (plain, flash):
        stepper.run(submission(1, prompt_of(10), 14))
    assert_same_runs(flash, plain)
    assert recorder.calls == [1] * 6, "as far as the second block goes"


def test_prompt_logprobs_come_from_recorded_steps_too(checkpoints: dict[DecoderConfig, Path]) -> None:
    plain, flash = (Stepper.of(checkpoints[ROTARY], max_running=3) for _ in range(2))
    recorder = CountingRecorder()
    on_flash(flash, ROTARY, recorder)
    wishes = {"prompt_logprobs": LogprobWish(), "output_logprobs": LogprobWish(2)}
    for stepper in (plain, flash):
        stepper.run(*[submission(key, prompt_of(9 + key, key), 3, **wishes) for key in range(3)], max_step_tokens=3)
    assert recorder.calls
    for key, rows in plain.prompt_logits.items():
        assert len(rows) == 8 + key
        for place, row in rows.items():
            assert (flash.prompt_logits[key][place] - row).abs().max() <= 5e-5 * row.abs().max()
        have, want = ([(e.token_id, e.rank) for e in stepper.logprobs[key]] for stepper in (flash, plain))
        assert have == want


def test_padding_writes_into_the_spare_block_alone(checkpoints: dict[DecoderConfig, Path]) -> None:
    stepper = Stepper.of(checkpoints[ROTARY])
    recorder = CountingRecorder()
    on_flash(stepper, ROTARY, recorder)
    stepper.run(*crowd(5))
    assert 8 in recorder.calls
    used = {block for step in stepper.steps for chunk in step.chunks for block in chunk.sequence.blocks}
    assert used == set(), "all have ended"
    keys = stepper.loaded.runner._cache.layers[0][0]
    written = set(keys.flatten(1).any(dim=1).nonzero().flatten().tolist())
    needed = sum(-(-(len(request.prompt) + request.max_new_tokens) // BLOCK_SIZE) for request in crowd(5))
    assert BLOCKS in written
    assert len(written) <= needed + 1


@pytest.mark.parametrize("changes", [{"position": "alibi"}, {"attention_softcap": 20.0}, {"head_dim": 12}])
def test_what_the_kernel_cannot_do_takes_a_detour(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = tiny_config(**({"head_dim": 16} | changes))
    plain, flash = (Stepper.of(tiny_checkpoint(tmp_path / name, config)) for name in ("plain", "flash"))
    recorder = CountingRecorder()
    (notice,) = on_flash(flash, config, recorder)
    assert notice.startswith("layer 0 ")
    assert "and 1 more: torch's fused attention cannot do that" in notice
    for stepper in (plain, flash):
        stepper.run(*crowd(3))
    assert_same_runs(flash, plain)
    assert not recorder.calls


def test_steps_that_cannot_be_recorded_run_as_they_are(checkpoints: dict[DecoderConfig, Path]) -> None:
    def refuse(compute: Computation) -> Computation:
        raise RuntimeError("operation not permitted when stream is capturing\nsecond line")

    plain, flash = Stepper.of(checkpoints[ROTARY]), Stepper.of(checkpoints[ROTARY])
    (notice,) = on_flash(flash, ROTARY, refuse)
    assert notice.endswith("small models: operation not permitted when stream is capturing")
    for stepper in (plain, flash):
        stepper.run(*crowd(2))
    assert_same_runs(flash, plain)


def broken(*arguments: object, **named: object) -> torch.Tensor:
    raise RuntimeError("FlashAttention was not enabled for build\nsecond line")


@pytest.mark.parametrize(
    "varlen", ["torch 2.9 does not have it", Varlen(broken, TWIN.dtypes, 1)], ids=["none", "broken"]
)
def test_without_the_kernel_single_operators_run(checkpoints: dict[DecoderConfig, Path], varlen: Varlen | str) -> None:
    plain, flash = Stepper.of(checkpoints[ROTARY]), Stepper.of(checkpoints[ROTARY])
    (notice,) = on_flash(flash, ROTARY, CountingRecorder(), varlen=varlen)
    assert notice.endswith(("instead of torch's varlen_attn: torch 2.9 does not have it", "not enabled for build"))
    for stepper in (plain, flash):
        stepper.run(*crowd(2))
    assert_same_runs(flash, plain)


def test_buckets() -> None:
    assert DecodeShape(6, 5, spare_block=30).buckets(by_width=False) == [(1, 5), (2, 5), (4, 5), (6, 5)]
    assert DecodeShape(2, 5, spare_block=30).buckets(by_width=True) == [(r, w) for r in (1, 2) for w in (1, 2, 4, 5)]
    assert DecodeShape(4, 8, spare_block=8).buckets(by_width=True)[-3:] == [(4, 1), (4, 2), (4, 4)]
    assert DecodeShape(1, 1, spare_block=1).buckets(by_width=True) == [(1, 1)]


@pytest.mark.parametrize("config", [ROTARY, WINDOWS], ids=["rotary", "windows"])
@pytest.mark.parametrize("pages", [True, False])
@torch.inference_mode()
def test_nothing_is_read_back_from_the_device(config: DecoderConfig, pages: bool) -> None:
    """On torch's meta device, which holds no values: to read one raises, as in a graph, and so does mixing devices."""
    meta, notices = torch.device("meta"), list[str]()
    model = tiny_model(config).to(meta, torch.bfloat16)
    cache = KVCache(learn_shapes(model, meta), 9, 256, torch.bfloat16, meta)
    kernel = dataclasses.replace(cast("Varlen", fitted(cast("Any", varlen_attn))), reads_pages=pages)
    forward = FlashForward(model, TorchKernels(), cache, meta, kernel)
    recorder = CountingRecorder()
    forward.record(DecodeShape(4, 1, spare_block=8), recorder, notices)
    assert notices == []
    for rows, recorded in ((int32(0, 0, 1), 0), (int32(0, 1, 2), 1)):
        sequences = int(rows[-1]) + 1
        positions, sampled = (3, 4, 9), torch.arange(sequences)
        logits = forward.run(
            StepRows(
                tokens=array("q", [0, 0, 0]),
                positions=array("q", positions),
                positions32=array("i", positions),
                row_sequence=array("i", rows.tolist()),
                block_tables=array("i", range(sequences)),
                table_width=1,
                sampled_rows=array("q", range(sequences)),
                length=10,
                rolling=None,
            )
        )
        assert logits.shape == (sequences, config.vocab_size)
        assert logits.device.type == "meta"
        assert forward.more_logits(sampled.to(meta)).shape == logits.shape
        assert len(recorder.calls) == recorded
    settings = (GREEDY, sampling(top_k=5), sampling(top_p=0.5, min_p=0.1), sampling())
    answers = choose(torch.empty(4, config.vocab_size, device=meta), [make_row(setting) for setting in settings])
    assert answers.shape == (4,)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
