"""Any `tokenizer.json` of the Hugging Face `tokenizers` library whose tokens can be decoded one by one.

In: the folder's tokenizer.json and, where there is one, tokenizer_config.json (bos_token, eos_token, add_bos_token,
add_eos_token, added_tokens_decoder). Out: a Tokenizer.

Two instances of the library's tokenizer stand behind it. One is the file as it is, for texts whose special tokens are
to be parsed. In the other every special token has a spelling that nobody can type, so that the spelling in a user's
text is plain text even where the model's own vocabulary lists it (as Unigram's does).
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from pellucid_model.tokenizers.base import TokenizerError, check_text, join_bytes
from pellucid_model.tokenizers.decoders import read_rule
from pellucid_model.tokenizers.files import added_token, named_token, read_tokenizer_config


class HuggingFaceTokenizer:
    """See the module. `raw` is the content of tokenizer.json, `config` the parsed tokenizer_config.json.

    Raises TokenizerError for a file that cannot be read, or whose decoder cannot be streamed.
    """

    def __init__(self, raw: bytes, config: Mapping[str, Any]) -> None:
        data = json.loads(raw)
        self._rule = read_rule(data.get("decoder"))
        bos, eos = named_token(config, "bos_token"), named_token(config, "eos_token")
        specials = _flag_special_tokens(data, config, [token for token in (bos, eos) if token is not None])
        self._parsing = _instance(data)
        self._secret = {content: f"\uffff{secrets.token_hex(16)}" for content in (*specials, *_unknown_token(data))}
        self._plain = _instance(_with_secret_spellings(data, self._secret))
        # Longest first, as the library reads them.
        self._spelled = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or "(?!)")

        vocabulary = self._parsing.get_vocab(with_added_tokens=True)
        self.sha256: str = hashlib.sha256(raw).hexdigest()
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self.special_tokens: Mapping[str, int] = {token: vocabulary[token] for token in specials}
        self.special_ids: frozenset[int] = frozenset(self.special_tokens.values())
        self._bytes = self._token_table(vocabulary)

        prefix, suffix = self._added_by_template()
        self.bos_id: int | None = vocabulary[bos] if bos is not None else _only(prefix)
        self.eos_ids: tuple[int, ...] = (vocabulary[eos],) if eos is not None else ()
        self._prefix = _with_end(config, "add_bos_token", "bos_token", prefix, self.bos_id)
        self._suffix = _with_end(config, "add_eos_token", "eos_token", suffix, _only(self.eos_ids))

    @classmethod
    def from_folder(cls, folder: Path) -> HuggingFaceTokenizer:
        """Read the folder's two files. Raises TokenizerError, naming the file."""
        path = folder / "tokenizer.json"
        config = read_tokenizer_config(folder)
        try:
            return cls(path.read_bytes(), config)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from None

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = False) -> list[int]:
        """Token ids; what is added is what the file's post-processor and add_bos_token say. See Tokenizer.encode."""
        check_text(text)
        instance = self._parsing if parse_special_tokens else self._plain
        # Not encode(): the library holds the interpreter's lock in it for as long as it takes, and all threads wait.
        ids: list[int] = instance.encode_batch([text], add_special_tokens=False)[0].ids
        if not add_special_tokens:
            return ids
        prefix = self._prefix
        if prefix and prefix[-1] == self.bos_id and ids[:1] == [self.bos_id]:
            prefix = prefix[:-1]
        return [*prefix, *ids, *self._suffix]

    def encode_pieces(self, pieces: Iterable[tuple[str, bool]]) -> list[int]:
        """See Tokenizer.encode_pieces. One pass over the whole text, in which only the parsed ones are secret."""
        text = "".join(self._spelled.sub(self._in_secret, text) if parse else text for text, parse in pieces)
        return self.encode(text, add_special_tokens=False)

    def _in_secret(self, spelled: re.Match[str]) -> str:
        return self._secret[spelled[0]]

    def token_bytes(self, token_id: int) -> bytes:
        """See Tokenizer.token_bytes."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def decode(self, ids: Iterable[int], *, keep_special_tokens: bool = False) -> str:
        """See Tokenizer.decode."""
        return self._rule.strip_beginning(join_bytes(self, ids, keep_special_tokens).decode("utf-8", "replace"))

    def _token_table(self, vocabulary: Mapping[str, int]) -> list[bytes]:
        added = {token_id: token.content for token_id, token in self._parsing.get_added_tokens_decoder().items()}
        table = [b""] * self.vocab_size
        for token, token_id in vocabulary.items():
            if token_id in added:
                table[token_id] = self._rule.added_bytes(added[token_id])
            else:
                table[token_id] = self._rule.vocabulary_bytes(token)
        return table

    def _added_by_template(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the file's post-processor puts before and after a text."""
        samples = ["a", *(entry.decode("utf-8", "replace") for entry in self._bytes)]
        for sample in samples:
            body = self._plain.encode(sample, add_special_tokens=False).ids
            if body:
                break
        else:
            raise TokenizerError("no text gives any token")
        whole = self._plain.encode(sample, add_special_tokens=True).ids
        for start in range(len(whole) - len(body) + 1):
            if whole[start : start + len(body)] == body:
                return tuple(whole[:start]), tuple(whole[start + len(body) :])
        raise TokenizerError("post_processor changes the tokens of the text itself")


def _flag_special_tokens(data: dict[str, Any], config: Mapping[str, Any], named: list[str]) -> list[str]:
    """Mark in `data` every token that either file calls special; returns their spellings."""
    added: list[dict[str, Any]] = data.setdefault("added_tokens", [])
    known = {entry["content"]: entry for entry in added}
    vocabulary = _vocabulary_of(data)
    by_config = [
        entry["content"]
        for entry in config.get("added_tokens_decoder", {}).values()
        if entry.get("special") and (entry["content"] in known or entry["content"] in vocabulary)
    ]
    for content in (*named, *by_config):
        if content in known:
            known[content]["special"] = True
            continue
        token_id = vocabulary.get(content)
        if token_id is None:
            raise TokenizerError(f"tokenizer_config.json names the token {content!r}, which is not in the vocabulary")
        known[content] = added_token(token_id, content, special=True)
        added.append(known[content])
    return [entry["content"] for entry in added if entry["special"]]


def _vocabulary_of(data: Mapping[str, Any]) -> dict[str, int]:
    """The model's own vocabulary. Unigram writes a list of (piece, score), the others an object."""
    vocabulary: dict[str, int] | list[tuple[str, float]] = data["model"]["vocab"]
    if isinstance(vocabulary, dict):
        return vocabulary
    return {piece: index for index, (piece, _) in enumerate(vocabulary)}


def _with_secret_spellings(data: Mapping[str, Any], secret: Mapping[str, str]) -> dict[str, Any]:
    """A copy in which the special tokens keep their ids but cannot be spelled by any text."""
    added = [{**entry, "content": secret.get(entry["content"], entry["content"])} for entry in data["added_tokens"]]
    model = dict(data["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {secret.get(token, token): token_id for token, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[secret.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in secret:
        model["unk_token"] = secret[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _touches(merge, secret)]
    return {**data, "added_tokens": added, "model": model}


def _unknown_token(data: Mapping[str, Any]) -> list[str]:
    """The spelling of the entry that stands for unknown text, if the model has one."""
    model = data["model"]
    if model.get("unk_id") is not None:
        return [model["vocab"][model["unk_id"]][0]]
    return [model["unk_token"]] if model.get("unk_token") is not None else []


def _touches(merge: str | list[str], tokens: Mapping[str, str]) -> bool:
    """Whether a BPE merge reads or makes one of the tokens."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in tokens or right in tokens or left + right in tokens


def _instance(data: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The library's tokenizer. Truncation and padding, which a file may ask for, would change a prompt silently."""
    text = json.dumps({**data, "truncation": None, "padding": None}, ensure_ascii=False)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # The library raises nothing narrower.
        raise TokenizerError(f"the tokenizers library cannot read it: {error}") from None


def _only(ids: tuple[int, ...]) -> int | None:
    return ids[0] if len(ids) == 1 else None


def _with_end(
    config: Mapping[str, Any], switch: str, name: str, ids: tuple[int, ...], token_id: int | None
) -> tuple[int, ...]:
    """What goes before (or after) a text once add_bos_token (or add_eos_token) has had its say; unset: no change."""
    wanted = config.get(switch)
    if wanted is None:
        return ids
    if not isinstance(wanted, bool):
        raise TokenizerError(f"tokenizer_config.json: {switch} is {wanted!r}; it must be true or false")
    if not wanted:
        return tuple(i for i in ids if i != token_id)
    if token_id is None:
        raise TokenizerError(f"tokenizer_config.json: {switch} is true but {name} is not set")
    return ids if token_id in ids else (token_id, *ids)
