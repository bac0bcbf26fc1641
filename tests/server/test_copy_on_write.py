"""Several sequences of one prompt: they share its blocks, copy the last one, and draw what they would draw alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pellucid_server.engine.messages import Sampling, Submit
from pellucid_server.kv.window import FULL, ContextWindow
from pellucid_testing.checkpoints import tiny_checkpoint, tiny_config
from pellucid_testing.stepping import Stepper, submission

BLOCK, VOCAB = 4, tiny_config().vocab_size


@pytest.fixture(
    scope="module",
    params=[("float32", "auto", (None, None)), ("bfloat16", "auto", (7, None)), ("float32", "int8", (5, 9))],
)
def stepper(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stepper:
    dtype, kv_dtype, windows = request.param
    folder = tiny_checkpoint(tmp_path_factory.mktemp("group"), tiny_config(windows=windows))
    return Stepper.of(folder, dtype=dtype, kv_dtype=kv_dtype, kv_block_size=BLOCK, max_step_tokens=32)


def group(length: int, count: int, new: int, context: ContextWindow = FULL, **changes: Any) -> list[Submit]:
    prompt = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    sampling = Sampling(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=3)
    return [
        submission(
            key, prompt, new, sampling=sampling, sequence_index=key, group=0, context=context, max_length=120, **changes
        )
        for key in range(count)
    ]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 14, 16])
@pytest.mark.parametrize(
    "how", [{}, {"prefix_cache": False}, {"blocks": 12}, {"max_step_tokens": 9}, {"gap": 3}], ids=str
)
def test_each_sequence_equals_its_lone_run(stepper: Stepper, how: dict[str, Any], length: int) -> None:
    requests = group(length, 5, 11)
    stepper.run(*requests, **how)
    tokens, logits, preempted = stepper.tokens, stepper.logits, stepper.preemptions
    copies = sum(len(step.copies) for step in stepper.steps)
    if not how and length % BLOCK != 1:
        assert copies == 4
        assert sum(step.tokens for step in stepper.steps) == length + 4 + 5 * 10
    assert (preempted > 0) == ("blocks" in how)
    assert len({tuple(made) for made in tokens.values()}) > 1, "sequences draw differently"
    for request in requests:
        stepper.run(request)
        assert tokens[request.key] == stepper.tokens[request.key]
        assert torch.equal(torch.stack(logits[request.key]), torch.stack(stepper.logits[request.key]))


@pytest.mark.parametrize(
    "context", [ContextWindow("roll", 3, 8), ContextWindow("roll", 0, 5), ContextWindow("reencode", 5, 8, 3)], ids=str
)
def test_windows_move_on_shared_blocks(stepper: Stepper, context: ContextWindow) -> None:
    for length in (6, 12, 13, 16, 31):
        requests = group(length, 4, 17, context)
        stepper.run(*requests, blocks=18)
        tokens, logits = stepper.tokens, stepper.logits
        for request in requests:
            stepper.run(request)
            assert tokens[request.key] == stepper.tokens[request.key]
            assert torch.equal(torch.stack(logits[request.key]), torch.stack(stepper.logits[request.key]))


def test_copies_are_made_in_their_order(tmp_path: Path) -> None:
    """A block that one copy reads may be what another one writes in the same step."""
    stepper = Stepper.of(tiny_checkpoint(tmp_path), kv_block_size=BLOCK)
    cache = stepper.loaded.runner._cache
    for keys, values in cache.layers:
        for block in range(4):
            keys[block], values[block] = block, -block
    cache.copy_blocks([(0, 1), (1, 2), (3, 0)])
    for keys, values in cache.layers:
        assert [int(keys[block].unique()) for block in range(4)] == [3, 0, 0, 3]
        assert [int(values[block].unique()) for block in range(4)] == [-3, 0, 0, -3]
