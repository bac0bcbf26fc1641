"""Tokenizers: characters, bytes, and every form of BPE and Unigram that can be streamed. Free of torch and numpy."""

from pellucid_model.tokenizers.base import InvalidTextError, Tokenizer, TokenizerError, UnknownCharacterError
from pellucid_model.tokenizers.byte import ByteTokenizer
from pellucid_model.tokenizers.character import CharacterTokenizer
from pellucid_model.tokenizers.chat_template import ChatTemplate, load_chat_template
from pellucid_model.tokenizers.loading import load_tokenizer

__all__ = [
    "ByteTokenizer",
    "CharacterTokenizer",
    "ChatTemplate",
    "InvalidTextError",
    "Tokenizer",
    "TokenizerError",
    "UnknownCharacterError",
    "load_chat_template",
    "load_tokenizer",
]
