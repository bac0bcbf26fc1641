"""Small tokenizers of every kind that is served, built with the `tokenizers` library as their makers build them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SAMPLE = ["The capital of France is Paris.", "今天天气不错，适合出门。", "a    b\n\n  c ", "hello hello 你好 🙂🔥 é ü"]
HARD_TEXTS = [
    *(
        "3333+777",
        "“Hello,” 世界世世——I'm",
        "a  b\t\n",
        "龜🫠é",
        "cafe\u0301 n\u0303",
        "  two",
        "end  ",
        "\r\n\n x",
        "",
    ),
    *("I'LL we've DON'T", "x=1;  y[2]\t{3}", "１２３ ²½", "\u0000\U0010ffff", "Привет, мир! שלום مرحبا", "<0x41>▁"),
]
"""Where tokenizers that are nearly the same differ: digits, quotes, spaces, capitals, scripts, combining marks."""


def write(tokenizer: Tokenizer, folder: Path, config: Mapping[str, Any]) -> Path:
    """Save as a checkpoint has it: tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def byte_level_bpe() -> Tokenizer:
    """GPT-2's kind: any byte has a token. <|endoftext|> and <|im_start|> are special, <tool use> is only added."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE * 20, trainer)
    tokenizer.add_tokens([AddedToken("<tool use>", normalized=False), AddedToken("é!", normalized=False)])
    return tokenizer


def byte_level_of(tokens: Iterable[bytes], special: Sequence[str]) -> Tokenizer:
    """GPT-2's kind with chosen tokens: the special ones, every byte, and these, whatever part of a character they are.

    Nothing merges, so an encoded text is its bytes; the other tokens are for outputs.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    spellings = ["".join(letters[byte] for byte in token) for token in (*(bytes([b]) for b in range(256)), *tokens)]
    vocabulary = {spelling: i for i, spelling in enumerate(dict.fromkeys([*special, *spellings]))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


_SENTENCE_PIECES = ["▁", "a", "b", "s", "<", ">", "/", "u", "n", "k", "▁ab", "▁▁", "你", "▁The", "\n", "t", "e", "st"]


def _sentence_piece(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def sentence_piece_unigram() -> Tokenizer:
    """SentencePiece Unigram with byte fallback; the pieces list the special tokens, as T5's do."""
    specials = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    byte_pieces = [(f"<0x{byte:02X}>", -30.0) for byte in range(256)]
    pieces = [(piece, -2.0 - 0.1 * i) for i, piece in enumerate(_SENTENCE_PIECES)]
    tokenizer = Tokenizer(models.Unigram([*specials, *byte_pieces, *pieces], 0, byte_fallback=True))
    return _sentence_piece(tokenizer)


def sentence_piece_bpe() -> Tokenizer:
    """Llama 2's kind: BPE over "▁" with byte fallback; a merge even makes </s>."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_SENTENCE_PIECES, "s>", "</"]
    merges = [("s", ">"), ("<", "/"), ("</", "s>"), ("s", "t")]
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)},
        merges,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    return _sentence_piece(tokenizer)
