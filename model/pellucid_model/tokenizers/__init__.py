"""Tokenizers: one token per character, or any tokenizer.json that can be streamed. Free of torch and numpy."""

from pellucid_model.tokenizers.base import InvalidTextError, Tokenizer, TokenizerError, UnknownCharacterError
from pellucid_model.tokenizers.character import CharacterTokenizer
from pellucid_model.tokenizers.loading import load_tokenizer

__all__ = [
    "CharacterTokenizer",
    "InvalidTextError",
    "Tokenizer",
    "TokenizerError",
    "UnknownCharacterError",
    "load_tokenizer",
]
