"""Constraints: what they mean, which ids they permit at each step, and that a hostile one harms nobody."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid_model.tokenizers import CharacterTokenizer, Tokenizer, load_tokenizer
from pellucid_server.engine import constraint_check
from pellucid_server.engine.constraint_states import CACHED_GRAMMARS, Constraints, ConstraintState
from pellucid_server.engine.messages import Constraint
from pellucid_testing.tokenizers import byte_level_bpe, sentence_piece_bpe, sentence_piece_unigram, write

KINDS = ["character", "byte_level_bpe", "sentence_piece_unigram", "sentence_piece_bpe"]


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    loaded: dict[str, Tokenizer] = {
        "character": CharacterTokenizer.train(["".join(map(chr, range(32, 127))), "好🙂é\n\t"])
    }
    for kind, build in zip(KINDS[1:], (byte_level_bpe, sentence_piece_unigram, sentence_piece_bpe), strict=True):
        config = {"eos_token": "<|endoftext|>" if kind == "byte_level_bpe" else "</s>"}
        tokenizer = load_tokenizer(write(build(), Path(folder / kind), config))
        assert tokenizer is not None
        loaded[kind] = tokenizer
    return loaded


def start(tokenizer: Tokenizer, constraint: Constraint, end_ids: Sequence[int] | None = None) -> ConstraintState:
    constraints = Constraints(lambda: tokenizer, tokenizer.vocab_size)
    return constraints.new_state(constraint, 0, tokenizer.eos_ids if end_ids is None else end_ids)


def permitted(state: ConstraintState) -> list[int]:
    state.compute()
    return np.flatnonzero(np.unpackbits(state.permitted.view(np.uint8), bitorder="little")).tolist()


def spell(tokenizer: Tokenizer, text: str) -> list[int]:
    """Some ids whose bytes are the text: the longest token first, at each place."""
    data, ids = text.encode(), []
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids}
    while data:
        size = next(n for n in range(len(data), 0, -1) if data[:n] in by_bytes)
        ids.append(by_bytes[data[:size]])
        data = data[size:]
    return ids


# ---- What may follow ----


def _beginnings(texts: Sequence[str]) -> set[bytes]:
    return {text.encode()[:n] for text in texts for n in range(len(text.encode()) + 1)}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_exactly_the_tokens_that_can_still_become_a_choice_are_permitted(
    vocabularies: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = vocabularies[kind]
    choices = tuple(
        data.draw(st.lists(st.text("ab 好🙂\n", min_size=1, max_size=5), min_size=1, max_size=4, unique=True))
    )
    beginnings, whole = _beginnings(choices), {choice.encode() for choice in choices}
    state, written = start(tokenizer, Constraint("choices", choices=choices)), b""
    while True:
        expected = {
            i
            for i in range(tokenizer.vocab_size)
            if i not in tokenizer.special_ids and (piece := tokenizer.token_bytes(i)) and written + piece in beginnings
        }
        assert state.accepting == (written in whole)
        if state.accepting:
            expected.update(tokenizer.eos_ids)
        assert set(permitted(state)) & set(range(tokenizer.vocab_size)) == expected
        if state.exhausted:
            assert written in whole
            return
        token = data.draw(st.sampled_from(sorted(expected - set(tokenizer.eos_ids))))
        state.accept(token)
        written += tokenizer.token_bytes(token)


_OBJECT = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
_SUM = 'root ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" root ")"'


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("constraint", "accepted", "refused"),
    [
        (Constraint("regex", "[a-c]{2,4}(好|é)?"), ["ab", "abca", "ab好", "aaé"], ["a", "abcab", "ab好é", " ab", "b "]),
        (Constraint("regex", "^a|b$"), ["a", "b"], ["ab", "^a"]),
        (
            Constraint("json_schema", _OBJECT),
            ['{"a":1}', '{ "a": -10 }', '{\n"a": 0}'],
            ['{"a":1', '{"a":01}', "{}", '{"a":1,"c":1}'],
        ),
        (
            Constraint("json_object"),
            ["{}", '{"b":[1.5e9,"\\n好",null,{}]}'],
            ["[]", '{"a":}', "{} ", " {}", '{"a":"\n"}'],
        ),
        (Constraint("ebnf", _SUM), ["1", "10+(9-(1))-0"], ["1+", "()", "(1"]),
        (Constraint("ebnf", 'start: /[ab]+/ "c"'), ["abc"], ["c", "ab"]),
        (Constraint("ebnf", 'root ::= "\\u0061" [\\u0062-\\u0063] "\\U0001F642"'), ["ab🙂", "ac🙂"], ["aa🙂"]),
        (Constraint("choices", choices=("a.b", 'a"\\\n', "🙂")), ["a.b", 'a"\\\n', "🙂"], ["acb", "a"]),
    ],
    ids=["regex", "anchors", "json_schema", "json_object", "gbnf", "lark", "escapes", "choices"],
)
def test_whole_outputs_are_accepted_or_refused(
    vocabularies: dict[str, Tokenizer], kind: str, constraint: Constraint, accepted: list[str], refused: list[str]
) -> None:
    tokenizer = vocabularies[kind]
    constraints = Constraints(lambda: tokenizer, tokenizer.vocab_size)

    def matches(text: str) -> bool:
        state = constraints.new_state(constraint, 0, tokenizer.eos_ids)
        for token in spell(tokenizer, text):
            if token not in permitted(state):
                return False
            state.accept(token)
        assert (tokenizer.eos_ids[0] in permitted(state)) == state.accepting
        return state.accepting

    assert [text for text in accepted if not matches(text)] == []
    assert [text for text in refused if matches(text)] == []
    assert len(constraints._grammars) == 1


def test_white_space_in_json_has_an_end(vocabularies: dict[str, Tokenizer]) -> None:
    """A model that writes white space for ever keeps its place for ever."""
    tokenizer = vocabularies["byte_level_bpe"]
    state = start(tokenizer, Constraint("json_object"))
    state.follow(spell(tokenizer, "{"))
    space = spell(tokenizer, "\n")[0]
    count = 0
    while space in permitted(state):
        state.accept(space)
        count += 1
    assert count == 20
    assert set(permitted(state)) >= {spell(tokenizer, "}")[0]}


def test_end_tokens_and_special_tokens(vocabularies: dict[str, Tokenizer]) -> None:
    """Ids that end the output come where it may end, and nowhere else, even those that are text; no other special."""
    tokenizer = vocabularies["byte_level_bpe"]
    a, b = spell(tokenizer, "a") + spell(tokenizer, "b")
    constraint = Constraint("regex", "(ab)*|.*<\\|im_start\\|>")
    for end_ids in ((), tokenizer.eos_ids, (*tokenizer.eos_ids, b)):
        state = start(tokenizer, constraint, end_ids)
        assert {i for i in permitted(state) if i in (*tokenizer.special_ids, b)} == {*end_ids} | (
            {b} if b not in end_ids else set()
        )
    state = start(tokenizer, Constraint("regex", "ab+"), (b,))
    assert permitted(state) != []
    assert b not in permitted(state)
    state.accept(a)
    assert b not in permitted(state)


def test_a_state_follows_from_its_tokens_alone(vocabularies: dict[str, Tokenizer]) -> None:
    tokenizer = vocabularies["sentence_piece_bpe"]
    constraints = Constraints(lambda: tokenizer, tokenizer.vocab_size)
    constraint, prompt = Constraint("json_object"), [5, 6, 7]
    output = spell(tokenizer, '{"a": [1, true')
    step_by_step, at_once = (constraints.new_state(constraint, len(prompt), tokenizer.eos_ids) for _ in range(2))
    other = constraints.new_state(constraint, 0, tokenizer.eos_ids)
    for length in range(len(output) + 1):
        step_by_step.follow(prompt + output[:length])
        step_by_step.follow(prompt + output[:length])
    at_once.follow(prompt + output)
    assert permitted(step_by_step) == permitted(at_once) != permitted(other)
    assert not other.accepting


def test_grammars_are_kept_for_a_while() -> None:
    loads: list[None] = []
    tokenizer = CharacterTokenizer.train(["ab0123456789"])

    def load() -> Tokenizer:
        loads.append(None)
        return tokenizer

    constraints = Constraints(load, tokenizer.vocab_size)
    for n in range(CACHED_GRAMMARS + 3):
        constraints.prepare(Constraint("regex", f"a{{{n + 1}}}")).result()
    assert len(constraints._grammars) == CACHED_GRAMMARS
    state = constraints.new_state(Constraint("regex", "a{1}"), 0, ())  # pushed out long ago
    assert permitted(state) == spell(tokenizer, "a")
    assert len(loads) == 1


def test_a_grammar_whose_memory_is_full_is_compiled_again() -> None:
    """Outputs of one constraint share what the library has learnt of it, up to a limit that each of them may reach."""
    tokenizer = CharacterTokenizer.train(["abc"])
    constraints = Constraints(lambda: tokenizer, tokenizer.vocab_size)
    constraint = Constraint("regex", "(a|b)*a(a|b){20}c")
    first = constraints.prepare(constraint).result()
    generator = random.Random(0)
    a, b = spell(tokenizer, "ab")
    for _ in range(8):
        state, written = constraints.new_state(constraint, 0, ()), ""
        for _ in range(3000):
            expected = {a, b} | ({spell(tokenizer, "c")[0]} if written[-21:-20] == "a" else set())
            assert set(permitted(state)) == expected
            state.accept(token := generator.choice((a, b)))
            written = (written + tokenizer.decode([token]))[-21:]
        assert not state.fault
    assert constraints.prepare(constraint).result() is not first
    assert len(constraints._grammars) == 1


def test_a_checkpoint_without_tokenizer_has_no_constraints() -> None:
    with pytest.raises(ValueError, match="needs a tokenizer"):
        Constraints(lambda: None, 10).prepare(Constraint("json_object")).result()


# ---- What is refused ----


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint("regex", "a(b"), "unclosed group"),
        (Constraint("regex", r"(?=a)b"), "look-ahead"),
        (Constraint("regex", r"\bword"), "lookarounds not supported"),
        (Constraint("regex", "[^\\x{0}-\\x{10FFFF}]"), "matches no text"),
        (Constraint("json_schema", "{"), "is not valid JSON: Expecting property name"),
        (Constraint("json_schema", "[1]"), "must be a JSON object"),
        (Constraint("json_schema", '{"type": "text"}'), "Invalid type: text"),
        (Constraint("json_schema", '{"if": {}}'), 'Unimplemented keys: ["if"]'),
        (
            Constraint("json_schema", '{"type":"integer","minimum":5,"maximum":3}'),
            "minimum (5) is greater than maximum (3)",
        ),
        (Constraint("json_schema", '{"$ref": "file:///etc/passwd"}'), "is not present in a registry"),
        (Constraint("json_schema", '{"$ref": "#"}'), "matches no text"),
        (Constraint("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000), "recursion"),
        (Constraint("ebnf", "root ::= number"), "Rule 'number' not found"),
        (Constraint("ebnf", 'root ::= "a'), "Unexpected end of input"),
        (Constraint("ebnf", "letters"), "Expected ::="),
        (Constraint("ebnf", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000), "recursion"),
        (Constraint("ebnf", "start: <|im_end|>"), "the grammar library fails on it"),
    ],
)
def test_faults_are_told_in_one_line(constraint: Constraint, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        constraint_check.check(constraint)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 260


def test_hostile_constraints_harm_only_the_process_that_tries_them() -> None:
    """A schema of a thousand bytes takes minutes and gigabytes to compile, or a grammar overflows the stack."""
    patterns = json.dumps({"type": "string", "allOf": [{"pattern": f"a.{{{n}}}b"} for n in range(40)]})
    with pytest.raises(ValueError, match="takes more than 2 s or 1024 MiB"):
        constraint_check.check(Constraint("json_schema", patterns))
    chain = "\n".join(f"r{n}: r{n + 1}" for n in range(4000))
    constraint_check.check(Constraint("ebnf", f'start: r0\n{chain}\nr4000: "a"'))
    constraint_check.check(Constraint("regex", "(a|b)*a(a|b){20}c"))


def test_a_checker_that_has_died_is_replaced() -> None:
    constraint_check.check(Constraint("regex", "died{1}"))
    process = constraint_check._checker._process
    assert process is not None
    process.kill()
    process.wait()
    constraint_check.check(Constraint("regex", "died{2}"))
    with pytest.raises(ValueError, match="unclosed"):
        constraint_check.check(Constraint("regex", "died("))


def test_an_ambiguous_grammar_ends_before_a_step_takes_long() -> None:
    """A few rules make each step slower than the one before, until a step takes seconds, for everybody."""
    tokenizer = CharacterTokenizer.train(["ab"])
    constraint = Constraint("ebnf", 'root ::= s\ns ::= s s | "a" | "b" |')
    constraint_check.check(constraint)
    state = start(tokenizer, constraint, ())
    for _ in range(2000):
        if not permitted(state):
            break
        state.accept(spell(tokenizer, "a")[0])
    assert state.fault.startswith("Parser Error: Current row has")
    assert state.exhausted
