"""Sampling, log-probabilities and constraints in the engine: alone and in company, preempted, carried over, ended."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pellucid_model.checkpoint import save_checkpoint
from pellucid_model.tokenizers import CharacterTokenizer
from pellucid_server.engine.logprobs_reference import token_logprob
from pellucid_server.engine.messages import Constraint, LogprobWish, Sampling, Submit
from pellucid_server.engine.sampler_reference import sample_row
from pellucid_testing.checkpoints import CHARACTERS, tiny_checkpoint, tiny_config, tiny_model
from pellucid_testing.stepping import Stepper, poison, submission

TOKENIZER = CharacterTokenizer.train([CHARACTERS])
EOS = TOKENIZER.eos_ids[0]
PROMPT = TOKENIZER.encode("hello, world")
WORD = Constraint("regex", "[a-z]{2,12}(,[a-z]{3})*\\.")


@pytest.fixture(scope="module")
def stepper(tmp_path_factory: pytest.TempPathFactory) -> Stepper:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return Stepper.of(folder, tokenizer_size=TOKENIZER.vocab_size)


def request(key: int, new: int = 24, prompt: list[int] = PROMPT, **changes: Any) -> Submit:
    """Seeded sampling, ended by EOS."""
    values: dict[str, Any] = {"sampling": seeded(key), "eos_ids": [EOS]}
    return submission(key, prompt, new, **(values | changes))


def seeded(seed: int, temperature: float = 1.0, **others: Any) -> Sampling:
    return Sampling(temperature, 0, 1.0, 0.0, seed, **others)


def text(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens)


# ---- Settings ----

MIXED = [
    request(0, sampling=seeded(0, 0.0)),
    request(1, sampling=seeded(1, repetition_penalty=1.4)),
    request(2, sampling=seeded(2, 0.8, presence_penalty=1.0, frequency_penalty=0.5)),
    request(3, sampling=seeded(3, logit_bias=((7, 3.0), (9, -50.0)), typical_p=0.7)),
    request(4, sampling=seeded(4, allowed_ids=tuple(range(4, 20)), frequency_penalty=-0.5)),
    request(5, constraint=WORD, min_new_tokens=5),
    request(6, constraint=Constraint("choices", choices=("abc,", "abd!", "天地玄黄")), sampling=seeded(6, 1.5)),
    request(7, constraint=WORD, sampling=seeded(7, 2.0, frequency_penalty=1.0), output_logprobs=LogprobWish(3)),
]


@pytest.fixture(scope="module")
def alone(stepper: Stepper) -> dict[int, tuple[list[int], str]]:
    results = {}
    for each in MIXED:
        stepper.run(each)
        results[each.key] = stepper.tokens[each.key], stepper.ends[each.key]
    assert len({tuple(tokens) for tokens, _ in results.values()}) == len(MIXED)
    return results


@pytest.mark.parametrize(("blocks", "gap"), [(0, 0), (0, 2), (9, 1)], ids=["together", "joining", "preempted"])
def test_settings_move_with_their_rows(
    stepper: Stepper, alone: dict[int, tuple[list[int], str]], blocks: int, gap: int
) -> None:
    """B21, B24: another request's settings govern a row once it has joined, or the draw depends on who else runs."""
    for order in (MIXED, MIXED[::-1]):
        stepper.run(*order, blocks=blocks, gap=gap)
        assert {key: (stepper.tokens[key], stepper.ends[key]) for key in alone} == alone
        assert (stepper.preemptions > 0) == (blocks > 0)


@pytest.mark.parametrize("index", range(len(MIXED)))
def test_a_sequence_goes_on_in_a_new_engine(
    stepper: Stepper, alone: dict[int, tuple[list[int], str]], index: int
) -> None:
    """Penalties and constraints know the tokens of the engine before."""
    tokens, end = alone[index]
    for done in {1, len(tokens) // 2, len(tokens) - 1} - {0}:
        values = {name: getattr(MIXED[index], name) for name in Submit.__struct_fields__} | {"generated": tokens[:done]}
        stepper.run(Submit(**values))
        assert (tokens[:done] + stepper.tokens[index], stepper.ends[index]) == (tokens, end)


def test_the_engine_samples_as_the_reference_does(stepper: Stepper, alone: dict[int, tuple[list[int], str]]) -> None:
    """Biases, penalties, allowed ids, seed and place in the output all reach the sampler."""
    for each in MIXED[:5]:
        stepper.run(each)
        tokens = stepper.tokens[each.key]
        for place, row in enumerate(stepper.logits[each.key]):
            expected = sample_row(
                row.tolist(), TOKENIZER.vocab_size, each.sampling, (), 0, place, PROMPT, tokens[:place]
            )
            assert tokens[place] == expected


def test_several_sequences_of_a_prompt_have_states_of_their_own(stepper: Stepper) -> None:
    def sequences(indexes: range) -> list[Submit]:
        values: dict[str, Any] = {"sampling": seeded(8, 1.3, frequency_penalty=0.7), "constraint": WORD}
        return [request(10 + i, group=10, sequence_index=i, **values) for i in indexes]

    stepper.run(*sequences(range(4)))
    together = dict(stepper.tokens)
    assert len({tuple(tokens) for tokens in together.values()}) == 4
    for i in range(4):
        stepper.run(*sequences(range(i, i + 1)))
        assert stepper.tokens[10 + i] == together[10 + i]


# ---- Constraints ----


@pytest.mark.parametrize("temperature", [0.0, 0.7, 5.0])
def test_outputs_match_and_end_where_nothing_may_follow(stepper: Stepper, temperature: float) -> None:
    requests = [request(i, 80, constraint=WORD, sampling=seeded(i, temperature)) for i in range(8)]
    stepper.run(*requests)
    complete = [key for key, end in stepper.ends.items() if end == "constraint_done"]
    assert complete
    for key, tokens in stepper.tokens.items():
        assert (re.fullmatch(WORD.text, text(tokens)) is not None) == (key in complete)
        assert stepper.ends[key] in ("constraint_done", "max_new_tokens")
    assert sum(map(len, stepper.tokens.values())) == sum(len(rows) for rows in stepper.logits.values())


def test_eos_may_come_only_where_the_constraint_may_end(stepper: Stepper) -> None:
    """EOS is made the likeliest token of all."""
    bias = ((EOS, 100.0),)
    for constraint, expected in (
        (Constraint("regex", "abc(de)*"), "abc"),
        (Constraint("regex", "(ab)*"), ""),
        (Constraint("choices", choices=("ab", "abc")), "ab"),
    ):
        stepper.run(request(1, constraint=constraint, sampling=seeded(1, 0.0, logit_bias=bias)))
        assert (text(stepper.tokens[1]), stepper.tokens[1][-1], stepper.ends[1]) == (expected, EOS, "eos")
    # Before min_new_tokens it may not come at all; where the constraint then lets nothing follow, it wins.
    for minimum, expected, end in (
        (3, "abab", "eos"),
        (4, "abab", "eos"),
        (5, "ababab", "constraint_done"),
        (9, "ababab", "constraint_done"),
    ):
        changes: dict[str, Any] = {"sampling": seeded(1, 0.0, logit_bias=bias), "min_new_tokens": minimum}
        stepper.run(request(1, constraint=Constraint("regex", "(ab){0,3}"), **changes))
        assert (text(stepper.tokens[1]), stepper.ends[1]) == (expected, end)


def test_stop_ids_end_an_output_where_it_may_end_and_are_no_text_elsewhere(stepper: Stepper) -> None:
    a, b, dot = TOKENIZER.encode("ab.", add_special_tokens=False)
    liked = seeded(1, 0.0, logit_bias=((dot, 100.0),))
    stepper.run(request(1, constraint=Constraint("regex", "ab"), stop_ids=[dot], sampling=liked))
    assert (stepper.tokens[1], stepper.ends[1]) == ([a, b], "constraint_done")
    stepper.run(request(1, constraint=Constraint("regex", "ab(ab)?"), stop_ids=[dot], sampling=liked))
    assert (stepper.tokens[1], stepper.ends[1]) == ([a, b, dot], "stop_token")


def test_without_end_tokens_a_constraint_goes_on_as_long_as_it_can(stepper: Stepper) -> None:
    """ignore_eos."""
    stepper.run(request(1, 40, constraint=Constraint("regex", "(ab){0,4}"), eos_ids=[]))
    assert (text(stepper.tokens[1]), stepper.ends[1]) == ("abababab", "constraint_done")


@pytest.mark.parametrize(
    ("changes", "written"),
    [
        (
            {
                "constraint": Constraint("regex", "ab!"),
                "sampling": seeded(1, allowed_ids=tuple(TOKENIZER.encode("ab"))),
            },
            "ab",
        ),
        ({"constraint": Constraint("regex", "ab~")}, "ab"),
        ({"constraint": Constraint("regex", "ab!"), "stop_ids": TOKENIZER.encode("b")[1:]}, "a"),
        ({"sampling": seeded(1, allowed_ids=(EOS,)), "min_new_tokens": 1}, ""),
    ],
    ids=["not allowed", "not in the vocabulary", "a stop id", "only EOS before min_new_tokens"],
)
def test_where_no_token_is_left_the_request_ends_alone(stepper: Stepper, changes: dict[str, Any], written: str) -> None:
    stepper.run(MIXED[0])
    expected = stepper.tokens[0]
    stepper.run(request(1, **changes), MIXED[0])
    assert (text(stepper.tokens.get(1, [])), stepper.ends[1]) == (written, "no_token")
    assert stepper.tokens[0] == expected


def test_a_fulfilled_constraint_whose_rest_is_not_allowed_is_done(stepper: Stepper) -> None:
    only = seeded(1, allowed_ids=tuple(TOKENIZER.encode("ab", add_special_tokens=False)))
    stepper.run(request(1, constraint=Constraint("regex", "ab!?"), sampling=only))
    assert (text(stepper.tokens[1]), stepper.ends[1]) == ("ab", "constraint_done")


# ---- Log-probabilities and rows that are not finite ----


def test_logprobs_are_those_of_the_raw_logits(stepper: Stepper) -> None:
    """B29: log-probabilities of what the filters have left are infinite, or depend on the settings."""
    wish = LogprobWish(4, (EOS,))
    stepper.run(*(Submit(**{**_fields(each), "output_logprobs": wish}) for each in MIXED))
    for each in MIXED:
        tokens, rows, entries = stepper.tokens[each.key], stepper.logits[each.key], stepper.logprobs[each.key]
        for token, row, entry in zip(tokens, rows, entries, strict=True):
            reference = token_logprob(row.tolist(), TOKENIZER.vocab_size, token, wish)
            assert reference is not None
            assert (entry.token_id, entry.rank) == (token, reference.rank)
            assert [i for i, _, _ in entry.alternatives] == [i for i, _, _ in reference.alternatives]
            assert entry.logprob == pytest.approx(reference.logprob, abs=1e-12)
    assert any(entry.rank > 20 for entry in stepper.logprobs[6])


def _fields(each: Submit) -> dict[str, Any]:
    return {name: getattr(each, name) for name in Submit.__struct_fields__}


def test_rows_that_are_not_finite_end_their_own_request_whatever_it_asks_for(
    tmp_path: Path, alone: dict[int, tuple[list[int], str]]
) -> None:
    """B22: non-finite logits of one request raise in the sampler and stop the engine."""
    stepper = Stepper.of(tiny_checkpoint(tmp_path), tokenizer_size=TOKENIZER.vocab_size)
    poisoned = next(i for i in range(TOKENIZER.vocab_size) if i not in PROMPT + alone[0][0])
    poison(stepper, poisoned)
    spoilt = [PROMPT[0], poisoned, *PROMPT[1:]]
    changes: list[dict[str, Any]] = [
        {"output_logprobs": LogprobWish(5)},
        {"sampling": seeded(1, repetition_penalty=1.5, frequency_penalty=1.0)},
        {"sampling": seeded(1, allowed_ids=(7, 8), logit_bias=((7, 2.0),))},
        {"constraint": WORD},
    ]
    stepper.run(*(request(i, prompt=spoilt, **change) for i, change in enumerate(changes, start=1)), MIXED[0])
    assert [stepper.ends[i] for i in range(1, 5)] == ["non_finite"] * 4
    assert not stepper.logprobs
    assert (stepper.tokens[0], stepper.ends[0]) == alone[0]


def test_padding_is_never_sampled(tmp_path: Path) -> None:
    """B70: the embedding is padded beyond the tokenizer, a padded id is sampled, and decoding it fails."""
    padding = 20
    model = tiny_model(tiny_config(vocab_size=TOKENIZER.vocab_size + padding))
    save_checkpoint(tmp_path, model)
    TOKENIZER.save(tmp_path)
    stepper = Stepper.of(tmp_path, tokenizer_size=TOKENIZER.vocab_size)
    requests = [request(i, 40, eos_ids=[], sampling=seeded(i, (0.0, 5.0)[i % 2])) for i in range(6)]
    stepper.run(*requests)
    tokens = [token for key in stepper.tokens for token in stepper.tokens[key]]
    assert len(tokens) == 6 * 40
    assert max(tokens) < TOKENIZER.vocab_size
    best = [int(row.argmax()) for key in stepper.logits for row in stepper.logits[key]]
    assert max(best) >= TOKENIZER.vocab_size, "padding was never the likeliest"
