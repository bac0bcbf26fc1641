"""tokenizer.json of the tokenizers library: byte-level BPE, SentencePiece's Unigram and BPE."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from pellucid_model.tokenizers import InvalidTextError, Tokenizer, TokenizerError, load_tokenizer
from pellucid_testing.tokenizers import SAMPLE, byte_level_bpe, sentence_piece_bpe, sentence_piece_unigram, write

Build = Callable[[], tokenizers.Tokenizer]
Load = Callable[..., Tokenizer]

GPT2_CONFIG = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "add_bos_token": False}
LLAMA_CONFIG = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": "<unk>"}
KINDS: dict[str, tuple[Build, Mapping[str, Any]]] = {
    "byte_level_bpe": (byte_level_bpe, GPT2_CONFIG),
    "sentence_piece_unigram": (sentence_piece_unigram, LLAMA_CONFIG),
    "sentence_piece_bpe": (sentence_piece_bpe, LLAMA_CONFIG),
}
SENTENCE_PIECE = ["sentence_piece_unigram", "sentence_piece_bpe"]


def build_and_load(folder: Path, build: Build, config: Mapping[str, Any]) -> Tokenizer:
    loaded = load_tokenizer(write(build(), folder, config))
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {kind: build_and_load(folder / kind, build, config) for kind, (build, config) in KINDS.items()}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Build one kind with changes to tokenizer_config.json."""

    def load(kind: str, **config: object) -> Tokenizer:
        build, usual = KINDS[kind]
        return build_and_load(tmp_path, build, {**usual, **config})

    return load


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [*SAMPLE, "", " ", "  two spaces first", "\u0000\U0010ffff", "<unk>"])
def test_text_comes_back_as_it_was(loaded: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = loaded[kind]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(alphabet=st.sampled_from("ab \n<s/>你🙂ést|Theu"), max_size=25))
@settings(max_examples=100, deadline=None)
def test_decoding_agrees_with_the_library(loaded: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = loaded[kind]
    library = KINDS[kind][0]()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == library.decode(ids) == text
    ended = [*ids, *tokenizer.eos_ids]
    assert tokenizer.decode(ended, keep_special_tokens=True) == library.decode(ended, skip_special_tokens=False)


def test_the_facts_of_each_tokenizer(loaded: dict[str, Tokenizer]) -> None:
    bpe, unigram, llama = (loaded[kind] for kind in KINDS)
    assert (bpe.bos_id, bpe.eos_ids, bpe.special_ids) == (0, (0,), frozenset({0, 1}))
    assert (unigram.bos_id, unigram.eos_ids, unigram.special_ids) == (1, (2,), frozenset({0, 1, 2}))
    assert (llama.bos_id, llama.eos_ids, llama.special_ids) == (1, (2,), frozenset({0, 1, 2}))
    for kind, tokenizer in loaded.items():
        assert tokenizer.vocab_size == KINDS[kind][0]().get_vocab_size()


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    tokenizer = build_and_load(tmp_path, byte_level_bpe, {})
    assert tokenizer.sha256 == hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()


# ---- Special tokens spelled in a text ----


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("byte_level_bpe", "A<|endoftext|>B<|im_start|>"),
        *((kind, text) for kind in SENTENCE_PIECE for text in ("a</s>b", "</s>", " </s> ", "<s>ab", "b<unk>")),
    ],
)
def test_spelled_special_tokens_are_plain_text_unless_parsed(
    loaded: dict[str, Tokenizer], kind: str, text: str
) -> None:
    tokenizer = loaded[kind]
    plain = tokenizer.encode(text, add_special_tokens=False)
    assert not tokenizer.special_ids.intersection(plain)
    assert tokenizer.decode(plain) == text
    parsed = tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=True)
    assert tokenizer.special_ids.intersection(parsed)


def test_parsing_is_the_library_s_own_reading(loaded: dict[str, Tokenizer]) -> None:
    for kind, (build, _) in KINDS.items():
        text = "a<|im_start|>b" if kind == "byte_level_bpe" else "a</s>b"
        ids = loaded[kind].encode(text, add_special_tokens=False, parse_special_tokens=True)
        assert ids == build().encode(text, add_special_tokens=False).ids


def test_added_tokens_that_are_not_special_are_read_in_every_text_and_decode_as_their_content(
    loaded: dict[str, Tokenizer],
) -> None:
    tokenizer = loaded["byte_level_bpe"]
    first = tokenizer.vocab_size - 2
    assert tokenizer.encode("a<tool use>é!") == [*tokenizer.encode("a"), first, first + 1]
    assert tokenizer.token_bytes(first) == b"<tool use>"
    assert tokenizer.token_bytes(first + 1) == "é!".encode()


# ---- What is added to a text ----


@pytest.mark.parametrize("kind", SENTENCE_PIECE)
def test_bos_is_added_once(loaded: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = loaded[kind]
    assert tokenizer.encode("ab") == [1, *tokenizer.encode("ab", add_special_tokens=False)]
    assert tokenizer.encode("") == [1]
    parsed = tokenizer.encode("<s>ab", parse_special_tokens=True)
    assert parsed.count(1) == 1
    assert parsed[0] == 1
    assert tokenizer.encode("<s>ab").count(1) == 1


def test_a_tokenizer_without_bos_rule_adds_none(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["byte_level_bpe"]
    assert tokenizer.encode("ab") == tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.encode("") == []


def test_add_bos_token_overrides_the_template(load: Load) -> None:
    assert load("byte_level_bpe", add_bos_token=True).encode("ab")[0] == 0
    assert 1 not in load("sentence_piece_bpe", add_bos_token=False).encode("ab")
    once = load("sentence_piece_bpe", add_bos_token=True).encode("ab")
    assert once.count(1) == 1


def test_add_eos_token_overrides_the_template(load: Load) -> None:
    assert load("sentence_piece_bpe", add_eos_token=True).encode("ab")[-1] == 2
    assert load("sentence_piece_bpe", add_eos_token=False).encode("ab")[-1] != 2


def test_a_template_s_bos_is_known_without_a_config(tmp_path: Path) -> None:
    tokenizer = build_and_load(tmp_path, sentence_piece_bpe, {})
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, ())


def test_a_template_may_end_a_text(tmp_path: Path) -> None:
    def build() -> tokenizers.Tokenizer:
        tokenizer = sentence_piece_bpe()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
        return tokenizer

    tokenizer = build_and_load(tmp_path, build, LLAMA_CONFIG)
    assert tokenizer.encode("ab") == [1, *tokenizer.encode("ab", add_special_tokens=False), 2]


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    def build() -> tokenizers.Tokenizer:
        tokenizer = byte_level_bpe()
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=16)
        return tokenizer

    assert build_and_load(tmp_path, build, {}).encode("abababab 12") == byte_level_bpe().encode("abababab 12").ids


# ---- Bytes of tokens ----


def test_every_byte_has_its_token(loaded: dict[str, Tokenizer]) -> None:
    for tokenizer in loaded.values():
        single = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
        assert {bytes([byte]) for byte in range(256)} <= single


def test_a_continuation_keeps_the_space_that_a_whole_text_loses(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["sentence_piece_bpe"]
    ids = tokenizer.encode("ab", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == b" ab"
    assert tokenizer.decode(ids) == "ab"


@pytest.mark.parametrize("kind", KINDS)
def test_ids_outside_the_table_decode_to_nothing(loaded: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = loaded[kind]
    for token_id in (-1, tokenizer.vocab_size, 10**9):
        assert tokenizer.token_bytes(token_id) == b""
        assert tokenizer.decode([token_id]) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_are_no_text_become_replacement_characters(loaded: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = loaded[kind]
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    broken = [by_bytes[bytes([byte])] for byte in b"\xf0\x9fa\xff"]
    assert tokenizer.decode(broken) == "\ufffda\ufffd"


# ---- What is refused ----


@pytest.mark.parametrize("kind", KINDS)
def test_lone_surrogates_are_refused(loaded: dict[str, Tokenizer], kind: str) -> None:
    with pytest.raises(InvalidTextError, match="U\\+D800 at character 2"):
        loaded[kind].encode("ab\ud800")


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (None, "decoder is null"),
        (decoders.WordPiece(), "decoder WordPiece"),
        (decoders.BPEDecoder(), "decoder BPEDecoder"),
        (decoders.CTC(), "decoder CTC"),
        (
            decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
            r"decoder Strip\(content=' ', start=0, stop=1\)",
        ),
        (decoders.Sequence([decoders.Replace(tokenizers.Regex("_+"), " ")]), r"decoder Replace\(.*Regex"),
    ],
)
def test_decoders_that_cannot_be_streamed_are_refused_by_name(
    tmp_path: Path, decoder: decoders.Decoder | None, message: str
) -> None:
    tokenizer = byte_level_bpe()
    data = json.loads(tokenizer.to_str())
    data["decoder"] = None if decoder is None else json.loads(decoder.__getstate__())
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": "<end>"}, "'<end>', which is not in the vocabulary"),
        ({"bos_token": 7}, "bos_token is 7"),
        ({"add_bos_token": True}, "add_bos_token is true but bos_token is not set"),
        ({"add_eos_token": "yes"}, "add_eos_token is 'yes'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path: Path, config: Mapping[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        build_and_load(tmp_path, byte_level_bpe, config)


def test_a_config_that_is_not_json_is_refused(tmp_path: Path) -> None:
    write(byte_level_bpe(), tmp_path, {})
    for content in ("{", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
            load_tokenizer(tmp_path)


def test_a_model_that_the_library_cannot_read_is_refused_in_one_line(tmp_path: Path) -> None:
    data = json.loads(byte_level_bpe().to_str())
    data["model"]["type"] = "Mystery"
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(TokenizerError, match="cannot read it") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


# ---- Neighbours of the kinds above ----


def test_a_token_that_only_the_config_calls_special_is_special(load: Load) -> None:
    tool = byte_level_bpe().token_to_id("<tool use>")
    tokenizer = load("byte_level_bpe", added_tokens_decoder={str(tool): {"content": "<tool use>", "special": True}})
    assert tool in tokenizer.special_ids
    assert tool not in tokenizer.encode("<tool use>")
    assert tool in tokenizer.encode("<tool use>", parse_special_tokens=True)


def test_metaspace_decoder(tmp_path: Path) -> None:
    def build() -> tokenizers.Tokenizer:
        tokenizer = sentence_piece_unigram()
        tokenizer.normalizer = normalizers.Sequence([])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        return tokenizer

    tokenizer = build_and_load(tmp_path, build, LLAMA_CONFIG)
    ids = tokenizer.encode("ab  a")
    assert tokenizer.decode(ids) == build().decode(ids) == "ab  a"


def test_whole_words_that_are_special_are_not_looked_up(tmp_path: Path) -> None:
    def build() -> tokenizers.Tokenizer:
        tokenizer = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "stop": 1, "go": 2}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.decoder = decoders.Fuse()
        return tokenizer

    tokenizer = build_and_load(tmp_path, build, {"eos_token": "stop"})
    assert tokenizer.encode("go stop") == [2, 0]
    assert tokenizer.encode("go stop", parse_special_tokens=True) == [2, 1]
