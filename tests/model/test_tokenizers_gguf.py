"""Tokenizers from GGUF metadata: the ids that the maker's own tokenizer gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from pellucid_model.tokenizers import Tokenizer, TokenizerError, load_chat_template, load_tokenizer
from pellucid_model.tokenizers.from_gguf import gguf_end_ids, gguf_tokenizer_notice
from pellucid_testing.gguf_files import write_tensors
from pellucid_testing.tokenizers import HARD_TEXTS, SAMPLE

CORPUS = [*SAMPLE, *HARD_TEXTS, "I'll don't we've 2024 33337 hello world 世界 tokens tokenizer"] * 10
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


MAKERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: BYTE_LEVEL,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL]),
    "llama-bpe": lambda: _split(LLAMA3),
    "qwen2": lambda: _split(LLAMA3.replace("{1,3}", "")),
    "falcon": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            BYTE_LEVEL,
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    ),
}
"""By name in GGUF: how the makers' tokenizer.json cuts a text."""


def byte_level(name: str) -> tokenizers.Tokenizer:
    """A small vocabulary of this kind, trained as its maker would."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    tokenizer.pre_tokenizer = MAKERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        special_tokens=["<|bos|>", "<|end|>", "<|eot|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool use>", normalized=False)])
    return tokenizer


def metadata(tokenizer: tokenizers.Tokenizer, pre: str | None, **more: Any) -> dict[str, Any]:
    """As the converters write it."""
    data = json.loads(tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    added = {entry["id"]: CONTROL if entry["special"] else USER_DEFINED for entry in data["added_tokens"]}
    given = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [added.get(index, NORMAL) for index in range(len(tokens))],
        "merges": [" ".join(merge) for merge in data["model"]["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "eot_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (given | more).items() if value is not None}


def load(folder: Path, values: dict[str, Any]) -> Tokenizer:
    loaded = load_tokenizer(write_tensors(folder / "model.gguf", {"t": np.zeros(1, np.float32)}, values))
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("name", MAKERS)
def test_byte_level_ids_equal_the_maker_s(tmp_path: Path, name: str) -> None:
    """B69: a pre-tokenizer that is not the maker's gives other ids for digits, Chinese and spaces."""
    theirs = byte_level(name)
    ours = load(tmp_path, metadata(theirs, name))
    assert ours.vocab_size == theirs.get_vocab_size()
    for text in (*SAMPLE, *HARD_TEXTS, "a<tool use> b"):
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        composed = theirs.normalizer.normalize_str(text) if theirs.normalizer else text
        assert ours.decode(ids) == composed
    assert ours.encode("x<|eot|>", add_special_tokens=False, parse_special_tokens=True)[-1] == 2
    assert not ours.special_ids & set(ours.encode("x<|eot|>", add_special_tokens=False))


def test_kinds_differ_where_they_should(tmp_path: Path) -> None:
    theirs = byte_level("gpt-2")
    ids = {name: tuple(load(tmp_path, metadata(theirs, name)).encode("I'LL 3333+777")) for name in MAKERS}
    assert len(set(ids.values())) >= 4


def test_ends_and_what_is_added(tmp_path: Path) -> None:
    values = metadata(byte_level("llama-bpe"), "llama-bpe")
    llama = load(tmp_path, values)
    assert (llama.bos_id, llama.eos_ids, llama.encode("a")[0]) == (0, (1,), 0)
    assert gguf_end_ids(values) == (1, 2)
    without = load(tmp_path, values | {"tokenizer.ggml.add_bos_token": False})
    assert without.encode("a")[0] != 0
    once = llama.encode("<|bos|>a", parse_special_tokens=True)
    assert (once[0], once.count(0)) == (0, 1)
    gpt2 = metadata(byte_level("gpt-2"), "gpt-2")
    assert load(tmp_path, gpt2).encode("a")[0] != 0
    assert load(tmp_path, gpt2 | {"tokenizer.ggml.add_bos_token": True}).encode("a")[0] == 0
    assert load(tmp_path, gpt2 | {"tokenizer.ggml.add_eos_token": True}).encode("a")[-1] == 1


@pytest.mark.parametrize("kind", [UNUSED, USER_DEFINED])
def test_ids_that_pad_the_vocabulary_are_no_tokens(tmp_path: Path, kind: int) -> None:
    """B70: an id of the padding is sampled, and then decoding fails."""
    values = metadata(byte_level("gpt-2"), "gpt-2")
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    padding = [f"[PAD{index}]" for index in range(len(tokens), len(tokens) + 7)]
    padded = {"tokenizer.ggml.tokens": tokens + padding, "tokenizer.ggml.token_type": kinds + [kind] * 7}
    ours = load(tmp_path, values | padded)
    assert ours.vocab_size == len(tokens)
    assert ours.decode([len(tokens)]) == ""


def test_a_file_that_does_not_name_its_kind_is_read_as_gpt_2_s_with_a_notice(tmp_path: Path) -> None:
    theirs = byte_level("gpt-2")
    for pre in (None, "default"):
        values = metadata(theirs, pre)
        assert load(tmp_path, values).encode(HARD_TEXTS[0]) == theirs.encode(HARD_TEXTS[0]).ids
        notice = gguf_tokenizer_notice(values)
        assert notice is not None
        assert "tokenizer.ggml.pre" in notice
    assert gguf_tokenizer_notice(metadata(theirs, "gpt-2")) is None


# ---- SentencePiece's kind ----


def sentence_pieces(**more: Any) -> dict[str, Any]:
    words = ["▁", "a", "b", "t", "h", "e", "▁t", "he", "▁the", "▁a", "ab", "你", "好", "你好", "3", "33"]
    pieces = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    pieces += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    pieces += [(word, NORMAL) for word in words] + [("<tool>", USER_DEFINED), ("[PAD276]", UNUSED)]
    given = {
        "model": "llama",
        "tokens": [text for text, _ in pieces],
        "scores": [0.0] * 259 + [-float(index) for index in range(len(words))] + [0.0, -1000.0],
        "token_type": [kind for _, kind in pieces],
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (given | more).items()}


def test_sentence_pieces(tmp_path: Path) -> None:
    ours = load(tmp_path, sentence_pieces())
    assert (ours.bos_id, ours.eos_ids, ours.special_ids) == (1, (2,), frozenset({0, 1, 2}))
    assert ours.vocab_size == 276
    spelled = [ours.token_bytes(token_id) for token_id in ours.encode("the 你好33")]
    assert spelled == [b"<s>", b" the", b" ", "你好".encode(), b"33"]
    for text in (*HARD_TEXTS[:9], "the  ab </s><s>"):
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == text
        assert not ours.special_ids & set(ids)
    # A space goes before each stretch between tokens that are found as they are written.
    assert ours.encode("<tool>a<tool>", add_special_tokens=False) == [275, 268, 275]


def test_a_space_before_the_text_and_bos_as_the_file_says(tmp_path: Path) -> None:
    assert load(tmp_path, sentence_pieces()).encode("ab") == [1, 268, 261]
    plain = load(tmp_path, sentence_pieces(add_space_prefix=False, add_bos_token=False))
    assert plain.encode("ab") == [269]
    # What comes after a prompt keeps the space that a whole text loses.
    ours = load(tmp_path, sentence_pieces())
    assert ours.token_bytes(267) == b" the"
    assert ours.decode([267, 268]) == "the a"


# ---- What is refused, and the chat template ----


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pre": "mystery"}, "tokenizer.ggml.pre = 'mystery' is not known; accepted: default, gpt-2"),
        ({"model": "bert"}, "tokenizer.ggml.model = 'bert' is not supported; accepted: gpt2, llama"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["ab"]}, "merge 'ab'"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is missing, or not a list of texts"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type must be"),
        ({"eos_token_id": 9999}, "tokenizer.ggml.eos_token_id = 9999; accepted: an id below"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token = 1"),
    ],
)
def test_metadata_that_cannot_be_used_is_refused_by_name(tmp_path: Path, changes: Any, says: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        load(tmp_path, metadata(byte_level("gpt-2"), **({"pre": "gpt-2"} | changes)))
    message = str(caught.value)
    assert says in message
    assert message.startswith(str(tmp_path / "model.gguf"))
    assert "\n" not in message


def test_a_piece_of_any_length_costs_little(tmp_path: Path) -> None:
    values = sentence_pieces()
    values["tokenizer.ggml.tokens"][262] = "x" * 10**6
    with pytest.raises(TokenizerError, match="a piece has 1000000 characters; 256 are the limit"):
        load(tmp_path, values)


def test_a_file_without_tokenizer_serves_token_ids(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "m.gguf", {"t": np.zeros(1, np.float32)}, {})
    assert load_tokenizer(path) is None
    assert load_chat_template(path) is None


def test_the_chat_template_and_its_tokens(tmp_path: Path) -> None:
    values = metadata(byte_level("gpt-2"), "gpt-2") | {"tokenizer.chat_template": "{{ bos_token }}"}
    load(tmp_path, values)
    template = load_chat_template(tmp_path / "model.gguf")
    assert template is not None
    assert (template.source, template.bos_token, template.eos_token) == ("{{ bos_token }}", "<|bos|>", "<|end|>")
