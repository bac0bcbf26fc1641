"""Text that other servers cut, lost, doubled or let through, out of a real server that says any tokens a test wants.

Every request is asked for twice, as a stream and in one message, and the two must agree. What a docstring tells is what
went wrong elsewhere; the whole space of token sequences is searched in tests/server/test_text.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pellucid.v1 import inference_pb2, inference_pb2_grpc
from pellucid_model.tokenizers import CharacterTokenizer, load_tokenizer
from pellucid_testing.calls import Answer, failure, generate, request
from pellucid_testing.known_models import script_checkpoint
from pellucid_testing.server import ServerProcess, serve
from pellucid_testing.tokenizers import byte_level_of, sentence_piece_bpe, write

FINAL = inference_pb2.DELIVERY_MODE_FINAL
SPECIAL = ("<|endoftext|>", "<|end|>")
EOS = SPECIAL[0].encode()
Pieces = tuple[bytes, ...]


def cuts(character: str) -> list[Pieces]:
    """A character's bytes, cut into tokens in every way."""
    data = character.encode()
    found = []
    for count in range(len(data)):
        for places in itertools.combinations(range(1, len(data)), count):
            found.append(tuple(data[a:b] for a, b in itertools.pairwise((0, *places, len(data)))))
    return found


def pieces(*texts: str) -> Pieces:
    return tuple(text.encode() for text in texts)


FIRE, SMILE = cuts("🔥")[-1], cuts("🙂")[-1]
CUT = [(character, cut) for character in ("é", "聪", "🔥") for cut in cuts(character)]
STOPS: list[tuple[Pieces, list[str], str, str]] = [
    (pieces("The ", "Paris", " end"), ["Pari"], "The ", "Pari"),
    (pieces("The ", "Paris", " end"), ["s en"], "The Pari", "s en"),
    (pieces("The ", "Paris", " end"), ["end", "ari"], "The P", "ari"),
    (pieces("ABC", "DEF", "G", "HI", "J"), ["DEFGHIJ"], "ABC", "DEFGHIJ"),
    (pieces("Mars", "?\n"), ["\n"], "Mars?", "\n"),
    (pieces("ok", "??"), ["???"], "ok??", ""),
    (pieces("é", "y"), ["éx"], "éy", ""),
    (pieces("好", "。", "完"), ["。完"], "好", "。完"),
    ((*SMILE, b"!"), ["🙂!"], "", "🙂!"),
    ((*SMILE, *SMILE), ["🙂!", "🙂🙂🙂"], "🙂🙂", ""),
    ((b"a\xe5", b"\xa5\xbd\xe5", b"\xa5\xbdb"), ["好b", "x"], "a好", "好b"),
]
SPACES = [pieces("a", "    ", "b\n\n", "  c "), pieces(" a", " b"), pieces("  "), pieces("\t", "a\n", "\n")]
SCRIPTS: dict[str, Pieces] = {
    **{f"cut {i}": (b"a", *cut, b"b", EOS) for i, (_, cut) in enumerate(CUT)},
    "space before": (b"a", b" \xe8", b"\x81\xaa", b"b\xe8", b"\x81\xaa", EOS),
    **{f"unfinished {count}": (b"a", *FIRE[:count], EOS) for count in range(5)},
    **{f"stop {i}": (*tokens, EOS) for i, (tokens, _, _, _) in enumerate(STOPS)},
    **{f"spaces {i}": (*tokens, EOS) for i, tokens in enumerate(SPACES)},
    "lines": pieces("test", "\n", "ab", "\n", "cd", EOS.decode()),
    "end": (b"a", b"<|end|>", b"b", EOS),
    "pilcrow": (b"a", "¶".encode(), b"b", EOS),
}


@dataclass(frozen=True)
class Speaker:
    """A server that says the scripts."""

    server: ServerProcess
    ids: dict[bytes, int]
    """Of the tokens; of the special ones alone where the tokenizer is another."""
    prompts: dict[str, list[int]]
    vocab_size: int
    """The tokenizer's."""

    def say(self, script: str, **fields: Any) -> Answer:
        """What a request for the script gives as a stream; checked to be the same in one message."""
        channel = self.server.channel()
        stream = generate(channel, self.prompts[script], **fields)
        final = generate(channel, self.prompts[script], **fields, output={"delivery_mode": FINAL})
        assert len(final.messages) == 1
        assert (final.text, final.token_ids) == (stream.text, stream.token_ids)
        assert (final.finish, final.usage.output_token_count) == (stream.finish, stream.usage.output_token_count)
        return stream

    def stopping(self, script: str, **stopping: Any) -> Answer:
        return self.say(script, stopping=stopping)

    def of(self, tokens: Sequence[bytes]) -> list[int]:
        return [self.ids[token] for token in tokens]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaker]:
    folder = tmp_path_factory.mktemp("speaker")
    special = [name.encode() for name in SPECIAL]
    single = [bytes([byte]) for byte in range(256)]
    chosen = [token for script in SCRIPTS.values() for token in script if token not in special]
    write(byte_level_of(chosen, SPECIAL), folder, {"eos_token": SPECIAL[0]})
    ids = {token: i for i, token in enumerate(dict.fromkeys([*special, *single, *chosen]))}
    scripts = [[ids[token] for token in script] for script in SCRIPTS.values()]
    ends = [ids[b"<|end|>"], ids["¶".encode()]]
    prompts = script_checkpoint(folder, scripts, len(ids), ends)
    with serve(folder, "--threads", "1", "--kv-block-size", "8") as server:
        yield Speaker(server, ids, dict(zip(SCRIPTS, prompts, strict=True)), len(ids))


def test_characters_come_whole_however_they_are_cut(speaker: Speaker) -> None:
    """Chinese and emoji arrive as replacement marks, or vanish, in streams, where each token is decoded by itself."""
    said = [(f"cut {i}", f"a{character}b") for i, (character, _) in enumerate(CUT)]
    for script, text in (*said, ("space before", "a 聪b聪")):
        answer = speaker.say(script)
        assert (answer.text, answer.reason) == (text, "eos")
        assert answer.token_ids == speaker.of(SCRIPTS[script])


@pytest.mark.parametrize("stop", [[], ["a🔥!", "zz"]], ids=["", "stop"])
def test_an_end_within_a_character_is_told_by_one_mark(speaker: Speaker, stop: list[str]) -> None:
    """Generation ends in the middle of a character: its bytes are dropped in streams, or the answer is an error."""
    for count in range(5):
        script, text = f"unfinished {count}", "a" + ("", "\ufffd", "\ufffd", "\ufffd", "🔥")[count]
        limited = speaker.stopping("unfinished 4", max_new_tokens=1 + count, stop_strings=stop)
        assert (limited.text, limited.reason, len(limited.token_ids)) == (text, "max_new_tokens", 1 + count)
        ended = speaker.stopping(script, stop_strings=stop)
        assert (ended.text, ended.reason, len(ended.token_ids)) == (text, "eos", 2 + count)
        token = speaker.ids[SCRIPTS[script][count]]
        stopped = speaker.stopping(script, stop_strings=stop, stop_token_ids=[token])
        text = ("", "a", "a\ufffd", "a\ufffd", "a\ufffd")[count]
        assert (stopped.text, stopped.reason, len(stopped.token_ids)) == (text, "stop_token", 1 + count)


def test_stop_strings_are_found_wherever_they_begin_and_end(speaker: Speaker) -> None:
    """Stop strings work only at the end of a token, tear characters apart, or what was held for them is never sent."""
    for index, (_, stop, text, matched) in enumerate(STOPS):
        answer = speaker.stopping(f"stop {index}", stop_strings=stop)
        assert (answer.text, answer.finish.matched_stop_string) == (text, matched)
        assert answer.reason == ("stop_string" if matched else "eos")
        assert speaker.stopping(f"stop {index}", stop_strings=stop, include_stop_in_text=True).text == text + matched


def test_an_empty_stop_string_is_refused(speaker: Speaker) -> None:
    """An empty stop string stops everything, or breaks the server."""
    stub = inference_pb2_grpc.InferenceServiceStub(speaker.server.channel())
    for stop in ([""], ["a", ""]):
        found = failure(stub.Generate(request([5], stopping={"stop_strings": stop}), timeout=20))
        assert (found.code, list(found.violations)) == ("INVALID_ARGUMENT", [f"stopping.stop_strings[{len(stop) - 1}]"])


def test_only_what_may_become_a_stop_string_waits(speaker: Speaker) -> None:
    """The beginning of a stop string leaks out; or, once that is mended, a fixed number of characters always waits."""
    script = next(f"stop {i}" for i, (tokens, *_) in enumerate(STOPS) if tokens[0] == b"ABC")
    spelled = {token_id: token.decode("latin1") for token, token_id in speaker.ids.items()}
    answer = speaker.stopping(script, stop_strings=["zzzzzzzzzz"], max_new_tokens=5)
    for message in answer.messages:
        assert message.outputs[0].text == "".join(spelled[i] for i in message.outputs[0].token_ids)
    assert answer.text == "ABCDEFGHIJ"
    held = speaker.stopping(script, stop_strings=["DEFGHIJ"])
    assert {message.outputs[0].text for message in held.messages} <= {"ABC", ""}


def test_a_stop_string_before_min_new_tokens_is_text(speaker: Speaker) -> None:
    """A stop string ends the answer before min_tokens."""
    for minimum, text, count in ((0, "test", 2), (2, "test", 2), (3, "test\nab", 4), (4, "test\nab", 4)):
        answer = speaker.stopping("lines", stop_strings=["\n"], min_new_tokens=minimum)
        assert (answer.text, answer.reason, len(answer.token_ids)) == (text, "stop_string", count)
    answer = speaker.stopping("lines", stop_strings=["\n"], min_new_tokens=5)
    assert (answer.text, answer.reason) == ("test\nab\ncd", "eos")


def test_every_end_token_ends(speaker: Speaker) -> None:
    """Of several end tokens, in a list or in different files, one alone is obeyed, and the others run to the limit."""
    for script, end in (("unfinished 0", EOS), ("end", b"<|end|>"), ("pilcrow", "¶".encode())):
        answer = speaker.say(script)
        assert (answer.text, answer.reason) == ("a", "eos")
        assert answer.token_ids == speaker.of([b"a", end])
        assert answer.finish.matched_token_id == speaker.ids[end]
    going_on = speaker.stopping("end", ignore_eos=True, max_new_tokens=3)
    assert (going_on.text, going_on.reason) == ("ab", "max_new_tokens")


def test_spaces_survive(speaker: Speaker) -> None:
    """Streamed words run together and runs of spaces shrink, because each piece is trimmed by itself."""
    for index, tokens in enumerate(SPACES):
        assert speaker.say(f"spaces {index}").text == b"".join(tokens).decode()


def test_a_spelled_control_token_is_plain_text(speaker: Speaker) -> None:
    """Text of a prompt that spells a control token becomes one."""
    channel, specials = speaker.server.channel(), {speaker.ids[name.encode()] for name in SPECIAL}
    one: dict[str, Any] = {"stopping": {"max_new_tokens": 1}, "output": {"return_prompt_token_ids": True}}
    text = "A<|endoftext|>B"
    plain = generate(channel, text, **one).prompt
    parsed = generate(channel, text, parse_special_tokens=True, **one).prompt
    assert list(plain.token_ids) == speaker.of([bytes([byte]) for byte in text.encode()])
    assert list(parsed.token_ids) == speaker.of([b"A", EOS, b"B"])
    assert plain.prompt_token_count == len(text) > parsed.prompt_token_count
    assert specials.isdisjoint(plain.token_ids)


def test_random_tokens_are_always_a_text(speaker: Speaker) -> None:
    """On some sequences the incremental decoder raises, and the request or the engine fails."""
    channel, spelled = speaker.server.channel(), {i: token for token, i in speaker.ids.items()}
    for seed in range(8):
        fields: dict[str, Any] = {
            "sampling": {"temperature": 100, "seed": seed, "sequence_count": 64},
            "stopping": {"max_new_tokens": 40, "ignore_eos": True},
        }
        stream = generate(channel, [0], **fields)
        final = generate(channel, [0], **fields, output={"delivery_mode": FINAL})
        for index in range(64):
            text, ids, _ = stream.sequence(index)
            said = b"".join(spelled[i] for i in ids if i >= len(SPECIAL))
            assert text == said.decode("utf-8", "replace")
            assert final.sequence(index)[:2] == (text, ids)
    assert "\ufffd" in text
    assert len({i for index in range(64) for i in stream.sequence(index)[1]}) > 200


# ---- Other tokenizers ----

TEXTS = ["a    b\n\n  c ", " a b", "  ", "\ta\n", "  天 é\n"]


@pytest.fixture(scope="module", params=["sentence pieces", "characters"])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaker]:
    """Says TEXTS through another tokenizer, and "padding": ids beyond the tokenizer, for which the model has rows."""
    folder = tmp_path_factory.mktemp("other")
    if request.param == "sentence pieces":
        write(sentence_piece_bpe(), folder, {"bos_token": "<s>", "eos_token": "</s>"})
    else:
        CharacterTokenizer.train(["".join(TEXTS)]).save(folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    ids = {token.encode(): token_id for token, token_id in tokenizer.special_tokens.items()}
    before = len(tokenizer.encode("b", add_special_tokens=False))
    scripts = {
        text: [*tokenizer.encode("b" + text, add_special_tokens=False)[before:], *tokenizer.eos_ids] for text in TEXTS
    }
    scripts["padding"] = [tokenizer.vocab_size + i for i in (0, 3, 7)]
    prompts = script_checkpoint(folder, list(scripts.values()), tokenizer.vocab_size + 8)
    with serve(folder, "--threads", "1", "--kv-block-size", "8") as server:
        yield Speaker(server, ids, dict(zip(scripts, prompts, strict=True)), tokenizer.vocab_size)


def test_other_tokenizers_keep_spaces_too(other: Speaker) -> None:
    """The first space is eaten, or runs of spaces shrink, because each piece is decoded and trimmed alone."""
    for text in TEXTS:
        answer = other.say(text)
        assert (answer.text, answer.reason) == (text, "eos")


def test_bos_comes_once(other: Speaker) -> None:
    """A prompt that begins with BOS gets a second one, and answers are worse."""
    channel, (bos,) = other.server.channel(), (token for token in other.ids if token in (b"<s>", b"<bos>"))
    fields: dict[str, Any] = {"stopping": {"max_new_tokens": 1}, "output": {"return_prompt_token_ids": True}}
    spelled = bos.decode() + "a"
    plain = generate(channel, "a", **fields).prompt.token_ids
    assert list(plain).count(other.ids[bos]) == 1
    assert generate(channel, "a", omit_special_tokens=True, **fields).prompt.token_ids == plain[1:]
    for omit in (False, True):
        parsed = generate(channel, spelled, parse_special_tokens=True, omit_special_tokens=omit, **fields)
        assert parsed.prompt.token_ids == plain


def test_padding_of_the_vocabulary_is_never_said(other: Speaker) -> None:
    """The embedding has more rows than the tokenizer has tokens; one of them is sampled, and decoding it fails."""
    for sampling in ({"temperature": 0}, {"temperature": 5, "seed": 1}, {"temperature": 1, "top_k": 1}):
        answer = other.say("padding", sampling=sampling, stopping={"max_new_tokens": 3, "ignore_eos": True})
        assert len(answer.token_ids) == 3
        assert max(answer.token_ids) < other.vocab_size


def test_characters_that_nobody_knows(other: Speaker) -> None:
    """A character that was not in the training set raises in the tokenizer. It is <unk>, or else its bytes."""
    fields: dict[str, Any] = {"stopping": {"max_new_tokens": 1}, "output": {"return_prompt_token_ids": True}}
    unknown, has_bytes = other.ids[b"<unk>"], b"<s>" in other.ids
    for text, count in (("Hi", 2), ("你好", 2), ("a?", 1)):
        answer = generate(other.server.channel(), text, **fields)
        assert answer.reason == "max_new_tokens"
        assert list(answer.prompt.token_ids).count(unknown) == (0 if has_bytes else count)
