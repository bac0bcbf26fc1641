"""Sliding windows in the serving path against the slow references, at every edge and on every way there."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from pellucid_model.attention import ReferenceAttend
from pellucid_model.windows import reencoded_logits, rolling_logits
from pellucid_server.engine.messages import Sampling, Submit
from pellucid_server.kv.window import ContextWindow
from pellucid_testing.checkpoints import tiny_checkpoint, tiny_config, tiny_model
from pellucid_testing.stepping import Stepper, submission

CONTEXT, BLOCK = 24, 4
MODELS: dict[str, dict[str, Any]] = {
    "rotary": {"position": "rotary", "norm": "rmsnorm", "activation": "swiglu"},
    "partial": {"position": "rotary", "rotary_fraction": 0.5, "attention_softcap": 20.0, "norm_placement": "post"},
    "alibi": {"position": "alibi"},
    "none": {"position": "none", "kv_heads": 1},
    "mixed windows": {"position": "rotary", "windows": (7, None)},
    "windowed": {"position": "alibi", "windows": (5, 9)},
    "sinusoidal": {"position": "sinusoidal", "norm_placement": "post"},
    "learned": {"position": "learned"},
}
ROLLING = ["rotary", "partial", "alibi", "none", "mixed windows", "windowed"]
POLICIES = [
    ContextWindow("roll", 0, 24),
    ContextWindow("roll", 4, 20),
    ContextWindow("roll", 3, 8),
    ContextWindow("roll", 5, 7),
    ContextWindow("roll", 1, 1),
    ContextWindow("reencode", 0, 24, 1),
    ContextWindow("reencode", 1, 23, 5),
    ContextWindow("reencode", 4, 8, 8),
    ContextWindow("reencode", 3, 9, 4),
    ContextWindow("reencode", 0, 1, 1),
]


def name(policy: ContextWindow) -> str:
    return f"{policy.kind} S={policy.sinks} W={policy.window}" + (f" hop={policy.hop}" if policy.hop > 1 else "")


def pairs(kinds: Iterable[str]) -> list[Any]:
    """Every model with every policy that it can serve: absolute positions cannot roll."""
    return [
        pytest.param(kind, policy, id=f"{kind}: {name(policy)}")
        for kind, policy in itertools.product(kinds, POLICIES)
        if policy.kind == "reencode" or kind in ROLLING
    ]


def config_of(kind: str) -> Any:
    return tiny_config(context_length=CONTEXT, **MODELS[kind])


@pytest.fixture(scope="module")
def steppers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stepper]:
    return {
        kind: Stepper.of(
            tiny_checkpoint(tmp_path_factory.mktemp(kind.replace(" ", "_")), config_of(kind)),
            kv_block_size=BLOCK,
            max_running=6,
        )
        for kind in MODELS
    }


def prompt_of(length: int) -> list[int]:
    return torch.randint(0, tiny_config().vocab_size, (length,), generator=torch.Generator().manual_seed(7)).tolist()


def request(policy: ContextWindow, prompt: list[int], new: int, key: int = 1, **extra: Any) -> Submit:
    return submission(key, prompt, new, context=policy, **extra)


def reference(kind: str, policy: ContextWindow, tokens: list[int], first: int) -> torch.Tensor:
    model = tiny_model(config_of(kind)).double()
    if policy.kind == "roll":
        return rolling_logits(model, tokens, policy.sinks, policy.window)[first:]
    return reencoded_logits(model, tokens, policy.sinks, policy.window, policy.hop, first)


@pytest.mark.parametrize(("kind", "policy"), pairs(MODELS))
def test_generation_over_several_moves_equals_the_reference(
    steppers: dict[str, Stepper], kind: str, policy: ContextWindow
) -> None:
    """From a short prompt through the edges of block, S, W, S + W and N, and well beyond the third move."""
    new = policy.span + 3 * policy.hop + 30
    stepper = steppers[kind].run(request(policy, prompt_of(3), new))
    tokens = prompt_of(3) + stepper.tokens[1]
    want = reference(kind, policy, tokens[:-1], 2)
    have = torch.stack(stepper.logits[1])
    assert (have - want).abs().max() <= 2e-5 * want.abs().max()


def edges(policy: ContextWindow) -> list[int]:
    """Prompt lengths around everything that could be off by one."""
    around = {BLOCK, policy.sinks, policy.window, policy.span, policy.span + BLOCK, CONTEXT}
    around |= {policy.span + n * policy.hop for n in (1, 2, 3)}
    lengths = {length + off for length, off in itertools.product(around, (-1, 0, 1))} | {3 * CONTEXT}
    return sorted(length for length in lengths if length >= 1)


@pytest.mark.parametrize(
    ("kind", "policy"),
    pairs(["rotary", "alibi", "mixed windows", "windowed", "learned"]),
)
def test_prompts_of_every_length_equal_generation_bit_for_bit(
    steppers: dict[str, Stepper], kind: str, policy: ContextWindow
) -> None:
    """A token's logits are the same whether what precedes it was a prompt, in chunks of any size, or generated."""
    stepper = steppers[kind]
    lengths = edges(policy)
    stepper.run(request(policy, prompt_of(1), max(lengths) + 6))
    tokens, logits = prompt_of(1) + stepper.tokens[1], stepper.logits[1]
    for length, chunk in itertools.product(lengths, (6, 64)):
        stepper.run(request(policy, tokens[:length], 5), max_step_tokens=chunk)
        assert stepper.tokens[1] == tokens[length : length + 5]
        assert torch.equal(torch.stack(stepper.logits[1]), torch.stack(logits[length - 1 : length + 4]))


@pytest.mark.parametrize("kind", ["rotary", "windowed"])
def test_crowds_preemption_and_resumption_change_no_bit(steppers: dict[str, Stepper], kind: str) -> None:
    stepper = steppers[kind]
    requests = [
        request(policy, prompt_of(2 + 9 * key), 40, key, sampling=Sampling(0.5 * (key % 3), 0, 1.0, 0.0, key))
        for key, policy in enumerate([*POLICIES, ContextWindow()])
        if policy.kind != "full"
    ]
    alone = {}
    for one in requests:
        stepper.run(one)
        alone[one.key] = (stepper.tokens[one.key], torch.stack(stepper.logits[one.key]))
    ways: list[dict[str, Any]] = [{}, {"max_step_tokens": 7}, {"gap": 3}, {"blocks": 14, "max_step_tokens": 30}]
    for how in ways:
        stepper.run(*requests, **how)
        assert ("blocks" in how) == (stepper.preemptions > 0)
        for one in requests:
            assert stepper.tokens[one.key] == alone[one.key][0], name(one.context)
            assert torch.equal(torch.stack(stepper.logits[one.key]), alone[one.key][1]), name(one.context)
    for one in requests:
        tokens, logits = alone[one.key]
        stepper.run(request(one.context, one.prompt, 40, one.key, sampling=one.sampling, generated=tokens[:23]))
        assert stepper.tokens[one.key] == tokens[23:]
        assert torch.equal(torch.stack(stepper.logits[one.key]), logits[23:])


@pytest.mark.parametrize("kind", ["rotary", "mixed windows", "windowed", "learned"])
def test_everything_at_once_equals_the_references(steppers: dict[str, Stepper], kind: str) -> None:
    """A small pool, small chunks, shared beginnings, several sequences of a prompt, cold and warm, every policy."""
    stepper = steppers[kind]
    policies = [policy for policy in POLICIES if policy.kind == "reencode" or kind in ROLLING]
    requests = [
        request(policy, prompt_of(30 + 5 * (key % 2)), 12, 10 * key + index, group=10 * key, sequence_index=index)
        for key, policy in enumerate(policies)
        for index in range(2)
    ]
    for warm in (False, True):
        stepper.run(*requests, blocks=16, max_step_tokens=13, warm=warm)
        assert warm or stepper.preemptions > 0
        for one in requests:
            have = torch.stack(stepper.logits[one.key])
            want = reference(kind, one.context, (one.prompt + stepper.tokens[one.key])[:-1], len(one.prompt) - 1)
            assert (have - want).abs().max() <= 2e-5 * want.abs().max(), name(one.context)
    assert max(stepper.cached.values()) > 0


@pytest.mark.parametrize("way", [{"max_step_tokens": size} for size in (64, 1, 3, 8)], ids=str)
def test_a_window_of_w_is_the_token_and_w_minus_1_before_it(tmp_path: Path, way: dict[str, Any]) -> None:
    """A window of W means W keys in one path and W + 1 in another (B54)."""
    window, last = 8, 20
    stepper = Stepper.of(tiny_checkpoint(tmp_path, tiny_config(layers=1, windows=(window,))), kv_block_size=BLOCK)
    stepper.max_running = 1

    def logits(changed: int | None, generated: int) -> torch.Tensor:
        tokens = prompt_of(last + 1)
        if changed is not None:
            tokens[changed] = (tokens[changed] + 1) % tiny_config().vocab_size
        prompt, rest = tokens[: last + 1 - generated], tokens[last + 1 - generated :]
        stepper.run(submission(1, prompt, 1 + generated, generated=rest), **way)
        return stepper.logits[1][0]

    for generated in (0, 1, 15):
        whole = logits(None, generated)
        for distance in range(1, last):
            assert torch.equal(logits(last - distance, generated), whole) == (distance >= window), distance


@pytest.mark.parametrize("policy", POLICIES, ids=name)
def test_memory_is_bounded_by_the_window(steppers: dict[str, Stepper], policy: ContextWindow) -> None:
    """A pool that holds just the window is enough for any length, of prompt and of output."""
    stepper = steppers["rotary"]
    blocks = policy.blocks_needed(10**6, BLOCK)
    assert blocks * BLOCK < policy.span + 3 * BLOCK
    roomy = stepper.run(request(policy, prompt_of(90), 60)).tokens[1]
    stepper.run(request(policy, prompt_of(90), 60), blocks=blocks)
    assert stepper.tokens[1] == roomy
    assert stepper.preemptions == 0


def test_a_model_whose_layers_all_have_windows_frees_what_they_have_passed(steppers: dict[str, Stepper]) -> None:
    stepper = steppers["windowed"]
    assert stepper.loaded.ready.native_window == 9
    full = request(ContextWindow(), prompt_of(12), 12, max_length=CONTEXT)
    whole = stepper.run(full).tokens[1]
    stepper.run(full, blocks=4)  # 16 of the 24 tokens
    assert stepper.tokens[1] == whole
    assert steppers["mixed windows"].loaded.ready.native_window == 0


def test_a_pool_too_small_for_the_window_ends_where_it_is_full(tmp_path: Path) -> None:
    stepper = Stepper.of(tiny_checkpoint(tmp_path), kv_block_size=BLOCK)
    stepper.run(request(ContextWindow("roll", 4, 124), prompt_of(5), 200), blocks=8)
    assert len(stepper.tokens[1]) == 8 * BLOCK - 5
    assert stepper.ends[1] == "context_full"


def test_cropping_to_the_last_tokens_is_a_special_case() -> None:
    """S = 0, W = N, hop = 1 is what a simple generation loop does."""
    model = tiny_model(config_of("learned")).double()
    tokens = prompt_of(60)
    want = []
    for t in range(60):
        view = torch.tensor(tokens[max(0, t + 1 - CONTEXT) : t + 1])
        positions = torch.arange(len(view))
        with torch.no_grad():
            hidden = model.forward(view, positions, ReferenceAttend([len(view)], positions))
            want.append(model.logits(hidden)[-1])
    assert torch.allclose(reencoded_logits(model, tokens, 0, CONTEXT, 1), torch.stack(want), atol=1e-12)
