"""What the tokens of a run are: characters, pieces learnt from the corpus, or those of a checkpoint.

Owns a tokenizer together with the files that make it one again beside the weights. In: clean lines, or a checkpoint's
folder. Out: a `Vocabulary`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid_model.checkpoint_kind import companions
from pellucid_model.tokenizers import CharacterTokenizer, Tokenizer, TokenizerError, load_tokenizer
from pellucid_model.training.errors import TrainingError

_SPECIAL_TOKENS = {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>"}
_COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "generation_config.json"),
)
"""Files of a checkpoint that have nothing to do with its weights."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, what a line ends with, and the files that a checkpoint keeps of both."""

    tokenizer: Tokenizer
    files: Mapping[str, bytes]
    """By name, as they are written into a checkpoint's folder."""
    eos_id: int | None
    pad_id: int = 0
    """Fills rows; it is neither trained nor seen, so that any token will do."""

    @property
    def size(self) -> int:
        """One more than the highest token id."""
        return self.tokenizer.vocab_size

    def encode_line(self, line: str) -> list[int]:
        """A line with its beginning, by the tokenizer's own rule, and its end."""
        ids = self.encode_beginning(line)
        return ids if self.eos_id is None else [*ids, self.eos_id]

    def encode_beginning(self, text: str) -> list[int]:
        """A text that goes on: without the end that some tokenizers add."""
        ids = self.tokenizer.encode(text)
        return ids[:-1] if ids[-1:] == [self.eos_id] else ids

    @property
    def unk_id(self) -> int | None:
        """What unknown characters become, in a table of characters."""
        return getattr(self.tokenizer, "unk_id", None)


def characters(lines: Sequence[str], generation: Mapping[str, Any]) -> Vocabulary:
    """Every character of the lines; generation: what generation_config.json says besides the special tokens."""
    tokenizer = CharacterTokenizer.train(lines)
    special = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_ids[0], "pad": tokenizer.pad_id}
    files = {"tokenizer.json": tokenizer.to_json(), "generation_config.json": _generation_config(special, generation)}
    return Vocabulary(tokenizer, files, tokenizer.eos_ids[0], tokenizer.pad_id or 0)


def byte_pairs(lines: Sequence[str], size: int, generation: Mapping[str, Any]) -> Vocabulary:
    """Byte-level BPE of at most `size` entries, learnt from the lines (Sennrich et al. 2016; Radford et al. 2019).

    Its alphabet is all 256 bytes, so that no text is unknown.
    """
    # Imported here because a run on characters does not need the library.
    from pellucid_model.tokenizers.huggingface import HuggingFaceTokenizer

    raw = _train_byte_pairs(lines, size)
    config = {f"{name}_token": token for name, token in _SPECIAL_TOKENS.items()} | {"add_bos_token": True}
    special = {name: token_id for token_id, name in enumerate(_SPECIAL_TOKENS)}
    files = {
        "tokenizer.json": raw,
        "tokenizer_config.json": _json(config),
        "generation_config.json": _generation_config(special, generation),
    }
    return Vocabulary(HuggingFaceTokenizer(raw, config), files, special["eos"], special["pad"])


def _train_byte_pairs(lines: Sequence[str], size: int) -> bytes:
    """The content of tokenizer.json. Ids: special tokens, bytes, merges in the order in which they were learnt."""
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    tokenizer = LibraryTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(_SPECIAL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    bos = _SPECIAL_TOKENS["bos"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    text: str = tokenizer.to_str(pretty=True)
    return text.encode() + b"\n"


def of_checkpoint(checkpoint: Path) -> Vocabulary:
    """The tokenizer of a checkpoint, whose files are kept as they are. Raises TrainingError where it has none."""
    folder = companions(checkpoint)
    try:
        tokenizer = load_tokenizer(folder)
    except TokenizerError as error:
        raise TrainingError(str(error)) from None
    files = {name: (folder / name).read_bytes() for name in _COPIED if (folder / name).is_file()}
    if tokenizer is None or not files:
        raise TrainingError(
            f"{checkpoint}: no tokenizer's files to train with; accepted: a folder that has them "
            "(`pellucid convert` makes one of other checkpoints)"
        )
    return Vocabulary(tokenizer, files, _end_of_text(tokenizer, files), getattr(tokenizer, "pad_id", None) or 0)


def _end_of_text(tokenizer: Tokenizer, files: Mapping[str, bytes]) -> int | None:
    """The tokenizer's first end token, else that of generation_config.json; None: lines follow without a mark."""
    if tokenizer.eos_ids:
        return tokenizer.eos_ids[0]
    try:
        named = json.loads(files.get("generation_config.json", b"{}")).get("eos_token_id")
    except (ValueError, AttributeError):
        raise TrainingError("generation_config.json is not a JSON object") from None
    first = named[0] if isinstance(named, list) and named else named
    return first if type(first) is int and 0 <= first < tokenizer.vocab_size else None


def _generation_config(special: Mapping[str, int | None], generation: Mapping[str, Any]) -> bytes:
    return _json(
        {
            "bos_token_id": special["bos"],
            "eos_token_id": [special["eos"]],
            "pad_token_id": special["pad"],
            **generation,
        }
    )


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, ensure_ascii=False, indent=2) + "\n").encode()
