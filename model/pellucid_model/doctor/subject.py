"""Who is examined: a model in float32 with token sequences to read.

In: a checkpoint of any kind, perhaps a module of the user's own, perhaps a text. Out: a `Subject`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from pellucid_model.checkpoint_kind import companions
from pellucid_model.errors import ModelError
from pellucid_model.reading import Reading, read
from pellucid_model.servable import load_module, load_servable
from pellucid_model.tokenizers import Tokenizer, TokenizerError, load_tokenizer
from pellucid_model.training.errors import TrainingError
from pellucid_model.user_module import one_line

SEQUENCES = 12
LENGTH = 96
"""Tokens of a sequence at most; enough to see every fault, and quick with the reference attention."""
_RANDOM_SEQUENCES = 4
_RANDOM_LENGTH = 48
_SEED = 20


@dataclass(frozen=True, eq=False)
class Subject:
    """A model and what it is asked to read."""

    module: nn.Module
    vocab_size: int
    context_length: int | None
    tokenizer: Tokenizer | None
    sequences: list[list[int]]
    """Of at most LENGTH tokens, and at least 2."""
    from_text: bool
    """False: the sequences are drawn at random."""
    random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(_SEED))

    @cached_property
    def readings(self) -> list[Reading]:
        return [read(self.module, tokens) for tokens in self.sequences]

    def another(self, token: int) -> int:
        """A random token that is not this one."""
        step = int(torch.randint(1, self.vocab_size, (), generator=self.random))
        return (token + step) % self.vocab_size


def load_subject(checkpoint: Path, source: str | None, lines: Sequence[str] | None) -> Subject:
    """source: FILE.py:CLASS; lines: the text to read, None: random tokens. Raises ModelError and TokenizerError.

    A module of the user's own need not keep the contract as serving wants it: that is what is examined.
    """
    module, context_length = _load(checkpoint, source)
    try:
        tokenizer = load_tokenizer(companions(checkpoint))
    except TokenizerError:
        if lines is not None:
            raise
        tokenizer = None
    vocab_size = _vocab_size(module, source or str(checkpoint))
    longest = min(LENGTH, context_length or LENGTH)
    if longest < 2 or vocab_size < 2:
        raise TrainingError(f"{checkpoint}: a context of one token, or a vocabulary of one, cannot be examined")
    if lines is None:
        sequences = _random_sequences(vocab_size, min(longest, _RANDOM_LENGTH))
    else:
        sequences = _text_sequences(checkpoint, tokenizer, vocab_size, lines, longest)
    return Subject(module, vocab_size, context_length, tokenizer, sequences, lines is not None)


def _load(checkpoint: Path, source: str | None) -> tuple[nn.Module, int | None]:
    """-> module in float32 and evaluation mode, trained context."""
    if source is None:
        servable = load_servable(checkpoint)
        return servable.module.float().eval(), servable.context_length
    module, saved = load_module(checkpoint, source)
    context = getattr(module, "context_length", None) or saved.settings.get("context_length")
    return module, context if isinstance(context, int) else None


def _vocab_size(module: nn.Module, name: str) -> int:
    """Reads one token -> entries of the output layer."""
    try:
        return read(module, [0]).logits.shape[1]
    except Exception as error:
        raise ModelError(f"{name} cannot read a token: {one_line(error)}") from error


def _text_sequences(
    checkpoint: Path, tokenizer: Tokenizer | None, vocab_size: int, lines: Sequence[str], longest: int
) -> list[list[int]]:
    if tokenizer is None:
        raise TrainingError(f"{checkpoint} has no tokenizer to read a text with; leave --corpus out for random tokens")
    encoded = (tokenizer.encode(line)[:longest] for line in lines if line.strip())
    found: list[list[int]] = []
    for ids in encoded:
        if len(ids) >= min(8, longest):
            found.append(ids)
        if len(found) == SEQUENCES:
            break
    if not found:
        raise TrainingError("the text has no line of 8 tokens or more")
    if (largest := max(map(max, found))) >= vocab_size:
        raise TrainingError(
            f"the tokenizer gives token {largest}, but the model has {vocab_size}: they do not belong together"
        )
    return found


def _random_sequences(vocab_size: int, length: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(_SEED)
    drawn: Tensor = torch.randint(vocab_size, (_RANDOM_SEQUENCES, length), generator=random)
    return [[int(token) for token in row] for row in drawn]
