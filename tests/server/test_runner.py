"""The serving path against the float64 textbook, and against itself under every way of getting to a token."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pellucid_server.engine.messages import Sampling
from pellucid_testing.checkpoints import tiny_checkpoint, tiny_config, tiny_model
from pellucid_testing.stepping import Stepper, poison, reference_logits, submission

SHAPES = list(
    itertools.product(("sinusoidal", "learned", "rotary", "alibi", "none"), ("pre", "post"), (6, 2, 1))
)  # position scheme, norm placement, kv heads of 6 heads: MHA, GQA, MQA
VARIED = itertools.cycle(
    [
        {"norm": "layernorm", "activation": "relu"},
        {"norm": "rmsnorm", "activation": "swiglu"},
        {"norm": "layernorm", "activation": "gelu", "windows": (None, 9)},
        {"norm": "rmsnorm", "activation": "geglu", "attention_softcap": 20.0},
        {"norm": "layernorm", "activation": "gelu_tanh", "rotary_fraction": 0.5, "tied_head": True},
    ]
)


def prompt_of(length: int, vocab: int, seed: int = 0) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("position", "placement", "kv_heads", "varied"),
    [(*shape, extra) for shape, extra in zip(SHAPES, VARIED, strict=False)],
)
def test_chunked_prefill_and_paged_decode_equal_the_float64_reference(
    tmp_path: Path, position: str, placement: str, kv_heads: int, varied: dict[str, Any]
) -> None:
    config = tiny_config(position=position, norm_placement=placement, kv_heads=kv_heads, **varied)
    stepper = Stepper.of(tiny_checkpoint(tmp_path, config))
    model = tiny_model(config).double()
    runs = []
    for chunk in (64, 5):
        stepper.max_running = 4
        stepper.run(submission(1, prompt_of(37, config.vocab_size), 20), max_step_tokens=chunk)
        tokens = prompt_of(37, config.vocab_size) + stepper.tokens[1]
        want = reference_logits(model, tokens)
        have = torch.stack(stepper.logits[1])
        assert want.std() >= 1
        assert (have - want[36:-1]).abs().max() <= 2e-5 * want.abs().max()
        runs.append(have)
    assert torch.equal(*runs), "the size of prefill chunks changes bits"


@pytest.fixture(scope="module", params=[("float32", "auto"), ("bfloat16", "int8")])
def stepper(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stepper:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("rotary"), tiny_config(norm="rmsnorm", activation="swiglu"))
    dtype, kv_dtype = request.param
    return Stepper.of(folder, dtype=dtype, kv_dtype=kv_dtype, max_step_tokens=48, kv_cache_memory=2**20)


def lone(stepper: Stepper, request: Any) -> tuple[list[int], torch.Tensor]:
    stepper.run(request)
    return stepper.tokens[request.key], torch.stack(stepper.logits[request.key])


def crowd() -> list[Any]:
    """Requests of many lengths, greedy and seeded."""
    vocab = tiny_config().vocab_size
    requests = []
    for key in range(12):
        sampling = Sampling(temperature=key * 0.3, top_k=key * 3, top_p=1.0 - key * 0.05, min_p=0.0, seed=key)
        prompt = prompt_of(1 + 7 * key, vocab, seed=key)
        requests.append(submission(key, prompt, 5 + 3 * (key % 4), sampling=sampling))
    return requests


@pytest.mark.parametrize(
    "how",
    [{}, {"max_step_tokens": 9}, {"gap": 3}, {"gap": 2, "max_step_tokens": 17}, {"blocks": 17}],
    ids=lambda how: "+".join(how) or "all at once",
)
def test_crowd_is_bit_equal_to_lone_runs(stepper: Stepper, how: dict[str, Any]) -> None:
    requests = crowd()
    stepper.run(*requests, **how)
    tokens, logits, sizes = stepper.tokens, stepper.logits, stepper.batch_sizes
    assert max(sizes) > 1
    if "blocks" in how:
        assert stepper.preemptions > 0
    for request in requests:
        alone_tokens, alone_logits = lone(stepper, request)
        assert tokens[request.key] == alone_tokens
        assert torch.equal(torch.stack(logits[request.key]), alone_logits)


def test_64_at_once_are_bit_equal_to_lone_runs(stepper: Stepper) -> None:
    """Beside 63 others, some with the same beginning: in one batch, in a small pool, with a small budget."""
    vocab, requests = tiny_config().vocab_size, []
    for key in range(64):
        prompt = prompt_of(10 * (key % 3), vocab) + prompt_of(1 + key % 23, vocab, seed=key)
        sampling = Sampling(temperature=0.4 * (key % 4), top_k=0, top_p=1.0, min_p=0.0, seed=key)
        requests.append(submission(key, prompt, 8 + key % 5, sampling=sampling, priority=key % 2))
    alone = {request.key: lone(stepper, request) for request in requests}
    crowd = replace(stepper, max_running=64, max_step_tokens=64)
    ways: list[dict[str, Any]] = [{"max_step_tokens": 2048}, {}, {"blocks": 150}]
    for how in ways:
        crowd.run(*requests, **how)
        assert max(crowd.batch_sizes) >= 32
        assert ("blocks" in how) == (crowd.preemptions > 0)
        for key, (tokens, logits) in alone.items():
            assert crowd.tokens[key] == tokens
            assert torch.equal(torch.stack(crowd.logits[key]), logits)


def test_recomputing_output_as_a_prompt_gives_the_same_bits(stepper: Stepper) -> None:
    prompt = prompt_of(21, tiny_config().vocab_size)
    tokens, logits = lone(stepper, submission(1, prompt, 30))
    for made in (1, 10, 29):
        again, rest = lone(stepper, submission(1, prompt, 30, generated=tokens[:made]))
        assert again == tokens[made:]
        assert torch.equal(rest, logits[made:])


@pytest.mark.parametrize("block_size", [1, 4, 16, 64, 128])
def test_block_size_and_threads_change_no_bit(tmp_path: Path, block_size: int) -> None:
    folder = tiny_checkpoint(tmp_path, tiny_config(position="alibi"))
    request = submission(1, prompt_of(66, tiny_config().vocab_size), 62)
    want = lone(Stepper.of(folder), request)
    have = lone(Stepper.of(folder, kv_block_size=block_size, threads=2), request)
    assert want[0] == have[0]
    assert torch.equal(want[1], have[1])


def test_lengths_around_the_block_and_the_context(tmp_path: Path) -> None:
    config = tiny_config(context_length=32, position="learned")
    stepper = Stepper.of(tiny_checkpoint(tmp_path, config))
    model = tiny_model(config).double()
    for length in (1, 7, 8, 9, 15, 16, 17, 30, 31):
        prompt = prompt_of(length, config.vocab_size, seed=length)
        tokens, logits = lone(stepper, submission(1, prompt, 100, max_length=32))
        assert len(prompt) + len(tokens) == 32
        assert stepper.ends[1] == "context_full"
        want = reference_logits(model, prompt + tokens)
        assert (logits - want[length - 1 : -1]).abs().max() <= 2e-5 * want.abs().max()


def test_non_finite_logits_end_one_sequence_alone(tmp_path: Path) -> None:
    config = tiny_config()
    folder = tiny_checkpoint(tmp_path, config)
    good = submission(1, [5, 6, 7], 10)
    want = lone(Stepper.of(folder), good)
    stepper = Stepper.of(folder)
    poison(stepper, 9)
    stepper.run(submission(2, [5, 9, 7], 10), good)
    assert stepper.ends == {1: "max_new_tokens", 2: "non_finite"}
    assert stepper.tokens == {1: want[0]}
    assert torch.equal(torch.stack(stepper.logits[1]), want[1])
