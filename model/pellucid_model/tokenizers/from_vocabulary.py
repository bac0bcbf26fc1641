"""GPT-2's two files, as folders of before tokenizer.json have them: vocab.json and merges.txt.

In: the folder, with tokenizer_config.json and added_tokens.json where it has them. Out: the tokenizer as it would be in
a tokenizer.json. Only byte-level BPE of GPT-2's kind was ever kept so, with its way of cutting words.
"""

from __future__ import annotations

from pathlib import Path

from pellucid_model.tokenizers.base import TokenizerError
from pellucid_model.tokenizers.byte_level import byte_level_tokenizer
from pellucid_model.tokenizers.files import TokenizerFiles, added_token, read_object, read_tokenizer_config
from pellucid_model.tokenizers.pretokenizers import pre_tokenizer

VOCABULARY, MERGES = "vocab.json", "merges.txt"


def read_vocabulary(folder: Path) -> TokenizerFiles:
    """The folder's tokenizer. Raises TokenizerError, naming the file."""
    vocabulary, added = (read_object(folder / name) for name in (VOCABULARY, "added_tokens.json"))
    for name, entries in ((VOCABULARY, vocabulary), ("added_tokens.json", added)):
        if not all(type(token_id) is int for token_id in entries.values()):
            raise TokenizerError(f"{folder / name}: must map tokens to ids")
    try:
        text = (folder / MERGES).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise TokenizerError(f"{folder / MERGES}: not UTF-8") from None
    lines = text.split("\n")
    merges = [line for line in lines[lines[0].startswith("#version") :] if line]
    extra = [added_token(token_id, token, special=False) for token, token_id in added.items()]
    extra.sort(key=lambda entry: int(entry["id"]))
    data = byte_level_tokenizer(vocabulary, merges, pre_tokenizer("gpt-2"), extra)
    return TokenizerFiles(data, read_tokenizer_config(folder))
