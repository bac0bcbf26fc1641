"""A prompt that is found in the cache gives the same logits as one that is computed, bit for bit.

Real models behind the real kernels; what the scheduler itself promises is in test_scheduler_sharing.py.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from pellucid_server.engine.messages import LogprobWish, Submit
from pellucid_server.kv.window import FULL, ContextWindow
from pellucid_testing.checkpoints import tiny_checkpoint, tiny_config
from pellucid_testing.stepping import Stepper, poison, submission

CONTEXT, BLOCK, VOCAB = 48, 4, tiny_config().vocab_size
MODELS: dict[str, dict[str, Any]] = {
    "rotary": {"norm": "rmsnorm", "activation": "swiglu"},
    "mixed windows": {"windows": (7, None)},
    "windowed": {"position": "alibi", "windows": (5, 9)},
    "learned": {"position": "learned"},
}
POLICIES = [
    FULL,
    ContextWindow("roll", 4, 20),
    ContextWindow("roll", 3, 8),
    ContextWindow("roll", 0, 7),
    ContextWindow("reencode", 1, 15, 5),
    ContextWindow("reencode", 5, 8, 8),
]
CASES = [
    pytest.param(kind, policy, id=f"{kind}: {policy.kind} S={policy.sinks} W={policy.window}")
    for kind, policy in itertools.product(MODELS, POLICIES)
    if not (kind == "learned" and policy.kind == "roll")
]


@pytest.fixture(scope="module", params=[("float32", "int8"), ("bfloat16", "auto")])
def steppers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stepper]:
    made = {}
    dtype, kv_dtype = request.param
    for kind, shape in MODELS.items():
        folder = tiny_checkpoint(tmp_path_factory.mktemp("prefix"), tiny_config(context_length=CONTEXT, **shape))
        made[kind] = Stepper.of(folder, dtype=dtype, kv_dtype=kv_dtype, kv_block_size=BLOCK, max_step_tokens=32)
    return made


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def ask(prompt: list[int], new: int, key: int = 1, policy: ContextWindow = FULL, **changes: Any) -> Submit:
    length = CONTEXT if policy.kind == "full" else len(prompt) + new
    return submission(key, prompt, new, max_length=length, context=policy, **changes)


Answer = tuple[list[int], torch.Tensor]


def answer(stepper: Stepper, key: int = 1) -> Answer:
    return stepper.tokens[key], torch.stack(stepper.logits[key])


def same(one: Answer, other: Answer) -> bool:
    return one[0] == other[0] and torch.equal(one[1], other[1])


@pytest.mark.parametrize(("kind", "policy"), CASES)
def test_cold_warm_and_twice_at_once(steppers: dict[str, Stepper], kind: str, policy: ContextWindow) -> None:
    """A prompt that is cached as a whole, its length a multiple of the block's, leaves nothing to compute: a kernel
    error; or its rest gets positions from 0 on and does not see what is cached: wrong output without an error (B46)."""
    stepper = steppers[kind]
    for length in sorted({k * BLOCK + off for k in (1, 2, 4, 7) for off in (-1, 0, 1)} | {policy.span + 9}):
        if policy is FULL and length > CONTEXT - 7:
            continue
        prompt = prompt_of(length)
        cold = answer(stepper.run(ask(prompt, 6, policy=policy)))
        for _ in range(2):
            warm = answer(stepper.run(ask(prompt, 6, policy=policy), warm=True))
            assert same(warm, cold)
            view = length - policy.offset(length - 1)
            assert stepper.cached[1] == min(view // BLOCK * BLOCK, view - 1)
        stepper.run(*(ask(prompt, 6, key, policy) for key in (1, 2)), warm=True)
        assert same(answer(stepper, 1), cold)
        assert same(answer(stepper, 2), cold)


@pytest.mark.parametrize("kind", MODELS)
def test_policies_share_only_what_is_the_same(steppers: dict[str, Stepper], kind: str) -> None:
    """Plain, rolling and re-encoded requests of one text, in every order, on one cache."""
    stepper = steppers[kind]
    text = prompt_of(41)
    policies = [policy for policy in POLICIES if kind != "learned" or policy.kind != "roll"]
    cold = {policy: answer(stepper.run(ask(text, 6, policy=policy))) for policy in policies}
    for first, second in itertools.permutations(policies, 2):
        stepper.run(ask(text, 6, policy=first))
        assert same(answer(stepper.run(ask(text, 6, policy=second), warm=True)), cold[second])


def test_prompts_that_differ_a_little_are_told_apart(steppers: dict[str, Stepper]) -> None:
    """Block keys from a weak hash collide for moved sums or another order, and an answer mixes two prompts (B48)."""
    stepper = steppers["rotary"]
    base = [20, 21, 22, 23, *prompt_of(20)]
    others = [[21, 20, *base[2:]], [19, *base[1:]], [base[0] + 9, base[1] - 1, *base[2:]], [*base[4:8], *base[:4]]]
    cold = {tuple(one): answer(stepper.run(ask(one, 5))) for one in (base, *others)}
    stepper.run(ask(base, 5))
    for one in (*others, base):
        assert same(answer(stepper.run(ask(one, 5), warm=True)), cold[tuple(one)])
        assert (stepper.cached[1] > 0) == (one == base)


def test_conversation_turns_find_the_turns_before(steppers: dict[str, Stepper]) -> None:
    for kind, policy in (("rotary", FULL), ("mixed windows", ContextWindow("roll", 4, 20)), ("windowed", FULL)):
        stepper, text = steppers[kind], prompt_of(9)
        for turn in range(4):
            cold = answer(steppers[kind].run(ask(text, 5, policy=policy)))
            if turn:
                for end in range(9, len(text), 8):  # what the turns so far left in the cache
                    stepper.run(ask(text[:end], 5, policy=policy), warm=end > 9)
                assert same(answer(stepper.run(ask(text, 5, policy=policy), warm=True)), cold)
                assert stepper.cached[1] > 0
            text = text + cold[0][:5] + prompt_of(3, seed=turn)


def test_cancelled_prefills_leave_a_good_prefix(steppers: dict[str, Stepper]) -> None:
    """A request cancelled in mid prefill leaves half-written blocks marked as a good prefix (B50)."""
    stepper, prompt = steppers["mixed windows"], prompt_of(40)
    cold = answer(stepper.run(ask(prompt, 4)))
    for steps in range(1, 13):
        stepper.run(ask(prompt, 4, key=7), max_step_tokens=8 if steps < 6 else 9, abort_after=steps % 6)
        assert same(answer(stepper.run(ask(prompt, 4), warm=True)), cold)
        assert stepper.scheduler is not None
        assert stepper.scheduler.pool.used == 0


@pytest.mark.parametrize("kind", ["rotary", "mixed windows", "windowed"])
def test_a_pool_in_which_everything_is_preempted_and_found_again(steppers: dict[str, Stepper], kind: str) -> None:
    """Preempted sequences lose tokens, or find their old blocks and compute too much (B44, B45); with all policies."""
    stepper = steppers[kind]
    stem = prompt_of(12)
    requests = [
        ask([*stem, *prompt_of(key % 5, seed=key)], 14, key, policy, priority=key % 3)
        for key, policy in enumerate(POLICIES * 3)
    ]
    alone = {request.key: answer(stepper.run(request, prefix_cache=False), request.key) for request in requests}
    ways: list[dict[str, Any]] = [{"blocks": 12}, {"blocks": 12, "gap": 2, "max_step_tokens": 11}, {}]
    for how in ways:
        stepper.run(*requests, **how)
        assert ("blocks" in how) == (stepper.preemptions > 0)
        for request in requests:
            assert same(answer(stepper, request.key), alone[request.key])


@pytest.mark.parametrize("rolling", [(4, 5), (3, 6), (4, 7), (4, 8), (5, 9), (1, 2), (3, 20)], ids=str)
@pytest.mark.parametrize("kind", ["rotary", "mixed windows", "windowed"])
def test_policies_share_only_what_is_the_same_under_both(
    steppers: dict[str, Stepper], kind: str, rolling: tuple[int, int]
) -> None:
    """A rolling window shorter than a layer's own cuts that one short from its own length on, not from S + W on."""
    stepper, prompt = steppers[kind], prompt_of(22)
    asked = [ask(prompt, 6, policy=policy) for policy in (FULL, ContextWindow("roll", *rolling))]
    cold = [answer(stepper.run(request, prefix_cache=False)) for request in asked]
    for first, second in ((0, 1), (1, 0)):
        assert same(answer(stepper.run(asked[first])), cold[first])
        assert same(answer(stepper.run(asked[second], warm=True)), cold[second])
        assert stepper.cached[1] <= sum(rolling) or kind == "windowed"


@pytest.mark.parametrize(
    ("kind", "policy"), [("rotary", FULL), ("rotary", POLICIES[2]), ("windowed", FULL), ("learned", POLICIES[4])]
)
def test_scored_prompts_are_the_same_cold_and_warm(
    steppers: dict[str, Stepper], kind: str, policy: ContextWindow
) -> None:
    """Prompt log-probabilities with a warm cache: missing entries, or somebody else's numbers (B30)."""
    stepper, prompt = steppers[kind], prompt_of(3 * BLOCK + 22)
    wish = LogprobWish(top_count=1)
    cold = stepper.run(ask(prompt, 3, policy=policy, prompt_logprobs=wish)).prompt_logits[1]
    assert sorted(cold) == list(range(1, len(prompt)))
    # Row by row as generation would have seen them: the same prompt cut anywhere gives that row.
    for end in (1, 2, 9, policy.span, policy.span + 1, policy.span + 6, len(prompt) - 1):
        if 0 < end < len(prompt):
            stepper.run(ask(prompt[:end], 1, policy=policy))
            assert torch.equal(stepper.logits[1][0], cold[end])
    stepper.run(ask(prompt[:6], 3, policy=policy))
    stepper.run(ask(prompt, 3, policy=policy), warm=True)
    for start in (0, 1, 7, policy.span + 3, len(prompt) - 1, len(prompt)):
        wish = LogprobWish(start=start)
        for request in (ask(prompt, 3, policy=policy, prompt_logprobs=wish), ask(prompt, 0, 2, policy)):
            stepper.run(request, warm=True)
            if request.prompt_logprobs is None:
                continue
            scored = stepper.prompt_logits.get(1, {})
            assert sorted(scored) == list(range(max(1, start), len(prompt)))
            assert all(torch.equal(row, cold[target]) for target, row in scored.items())
            if start > policy.span + 2:
                assert stepper.cached[1] > 0
    stepper.run(
        *(ask(prompt, 8, key, policy, prompt_logprobs=LogprobWish()) for key in range(4)), blocks=16, max_step_tokens=9
    )
    for key in range(4):
        assert sorted(stepper.prompt_logits[key]) == list(range(1, len(prompt)))
        assert all(torch.equal(row, cold[target]) for target, row in stepper.prompt_logits[key].items())


def test_non_finite_logits_leave_nothing_in_the_cache(tmp_path: Path) -> None:
    """Non-finite logits end one request; neither its keys nor the memory they lay in may harm another (B22)."""
    stepper = Stepper.of(tiny_checkpoint(tmp_path, tiny_config()), kv_block_size=BLOCK)
    good = [ask(prompt_of(13, seed=key), 9, key) for key in range(3)]
    alone = {request.key: answer(stepper.run(request), request.key) for request in good}
    bad = next(token for token in range(VOCAB) if all(token not in [*one.prompt, *alone[one.key][0]] for one in good))
    poison(stepper, bad)
    poisoned = ask([*good[0].prompt[:9], bad, 1, 2, 3, 4, 5], 9, 7)
    stepper.run(poisoned, blocks=16)
    for _ in range(2):
        stepper.run(poisoned, *good, warm=True)
        assert stepper.ends == {7: "non_finite"} | dict.fromkeys(range(3), "max_new_tokens")
        assert stepper.cached[7] == 0 or stepper.cached[7] <= 8, (
            "blocks before the bad token may be good ones of others"
        )
        for request in good:
            assert same(answer(stepper, request.key), alone[request.key])
