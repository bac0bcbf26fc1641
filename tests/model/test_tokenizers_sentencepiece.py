"""SentencePiece model files: the ids that the sentencepiece library gives; and vocab.json with merges.txt."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from pellucid_model.tokenizers import Tokenizer, TokenizerError, load_tokenizer
from pellucid_testing.tokenizers import HARD_TEXTS, SAMPLE, byte_level_bpe

WORDS = ["the", "model", "serves", "what", "you", "trained", "server", "sees", "drops", "今天", "天气", "2024", "x=1"]
LINES = [" ".join(random.Random(seed).choices(WORDS, k=9)) for seed in range(200)] + SAMPLE * 10
TEXTS = [*HARD_TEXTS, *SAMPLE, "▁x", "hello <tool> the  model", "<tool>the", *LINES[:20], "the\nmodel  \n serves"]
PLAIN: dict[str, Any] = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "usual": {},
    "no prefix": PLAIN | {"add_dummy_prefix": False},
    "no bytes": {"byte_fallback": False, "normalization_rule_name": "nmt_nfkc"},
    "own pieces": PLAIN | {"user_defined_symbols": ["<tool>", "▁▁"]},
}


def train(model_type: str, **options: Any) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        vocab_size=400,
        model_type=model_type,
        hard_vocab_limit=False,
        minloglevel=2,
        **({"byte_fallback": True} | options),
    )
    return model.getvalue()


def load(folder: Path, content: bytes, name: str = "tokenizer.model", **config: Any) -> Tokenizer:
    (folder / name).write_bytes(content)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(folder)
    assert loaded is not None
    return loaded


# Unigram with pieces of one's own is left out: what is equally likely may be cut elsewhere.
@pytest.mark.parametrize(
    ("model_type", "options"),
    [*(("bpe", name) for name in OPTIONS), *(("unigram", name) for name in OPTIONS if name != "own pieces")],
)
def test_ids_equal_the_library_s(tmp_path: Path, model_type: str, options: str) -> None:
    """B69: the forms of one tokenizer must give the same ids."""
    content = train(model_type, **OPTIONS[options])
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
    ours = load(tmp_path, content)
    assert ours.vocab_size == theirs.vocab_size()
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_id(), (theirs.eos_id(),))
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text), text
        if options in ("plain", "no prefix", "own pieces") and "▁" not in text:
            assert ours.decode(ids) == text
    assert len({token for text in TEXTS for token in ours.encode(text)}) > 40


def test_ends_by_the_configuration_beside_it(tmp_path: Path) -> None:
    content = train("bpe", **PLAIN)
    assert load(tmp_path, content).encode("the")[0] == 1
    ours = load(tmp_path, content, add_bos_token=False, add_eos_token=True)
    assert (ours.encode("the")[0], ours.encode("the")[-1]) != (1, 1)
    assert ours.encode("the")[-1] == 2
    further = {"400": {"content": "<|im_end|>", "special": True}, "401": {"content": "<call>", "special": False}}
    size = ours.vocab_size
    assert size <= 400
    renumbered = {str(size + index): entry for index, entry in enumerate(further.values())}
    more = load(tmp_path, content, added_tokens_decoder=renumbered, eos_token="<|im_end|>")
    assert (more.vocab_size, more.eos_ids) == (size + 2, (size,))
    assert size not in more.encode("a<|im_end|>")
    assert more.encode("a<|im_end|>", parse_special_tokens=True)[-1] == size
    assert size + 1 in more.encode("a<call>")


def test_other_names_and_that_tokenizer_json_comes_first(tmp_path: Path) -> None:
    content = train("unigram", **PLAIN)
    ours = load(tmp_path, content, "spiece.model")
    assert ours.decode(ours.encode("the model")) == "the model"
    byte_level_bpe().save(str(tmp_path / "tokenizer.json"))
    first = load_tokenizer(tmp_path)
    assert first is not None
    assert first.vocab_size == byte_level_bpe().get_vocab_size()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a SentencePiece model"),
        (b"IQ== 0\nIg== 1\n", "not a SentencePiece model"),
        (b"\x0a\xff\xff\xff\xff\x7f", "not a SentencePiece model"),
        (b"\x0a\x02\x08", "not a SentencePiece model"),
        (train("word", byte_fallback=False), "its model_type is word; accepted: unigram, bpe"),
        (train("bpe", treat_whitespace_as_suffix=True), "spaces are kept in a way that is not supported"),
    ],
    ids=["empty", "tiktoken", "cut short", "no bytes", "word", "suffix"],
)
def test_files_that_cannot_be_used(tmp_path: Path, content: bytes, says: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        load(tmp_path, content)
    assert says in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "tokenizer.model"))


def test_any_cut_of_a_model_is_told(tmp_path: Path) -> None:
    content = train("bpe", **PLAIN)
    for length in range(0, 400, 7):
        (tmp_path / "tokenizer.model").write_bytes(content[:length])
        try:
            load_tokenizer(tmp_path)  # the first pieces alone may be a model
        except TokenizerError as error:
            assert "tokenizer.model" in str(error)  # noqa: PT017 - not every cut is an error


# ---- vocab.json and merges.txt ----


def test_vocabulary_and_merges(tmp_path: Path) -> None:
    theirs = byte_level_bpe()
    data = json.loads(theirs.to_str())
    (tmp_path / "vocab.json").write_text(json.dumps(data["model"]["vocab"]))
    merges = "\n".join(" ".join(merge) for merge in data["model"]["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    added = {entry["content"]: entry["id"] for entry in data["added_tokens"] if not entry["special"]}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    special = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|endoftext|>"}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids) == (theirs.get_vocab_size(), 0, (0,))
    for text in (*HARD_TEXTS, *SAMPLE, "a<tool use>é!"):
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)) == text
    (tmp_path / "merges.txt").write_text("ab\n")
    with pytest.raises(TokenizerError, match="merge 'ab' is not two tokens"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text('{"a": "b"}')
    with pytest.raises(TokenizerError, match=r"vocab\.json: must map tokens to ids"):
        load_tokenizer(tmp_path)
