"""How byte-level vocabularies cut a text into words before merging, by the name that GGUF files give it.

A GGUF file keeps the vocabulary of a byte-level BPE tokenizer but not the rest of its `tokenizer.json`: of that it only
names the kind, in `tokenizer.ggml.pre`. This table holds the rest, as the makers' own files have it. The same
vocabulary under another kind gives other ids and worse answers, so an unknown name is refused.

In: a name. Out: a `PreTokenizer`, in the terms of the tokenizers library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pellucid_model.tokenizers.base import TokenizerError

UNNAMED = ("", "default")
"""What a file that does not know better says; it is read as GPT-2's kind, and announced."""


@dataclass(frozen=True)
class PreTokenizer:
    """What stands before the merges.

    steps          pre-tokenizers of the library, in order
    ignore_merges  a word that is in the vocabulary is one token, even if no merges lead to it
    nfc            the text is first brought to Unicode's composed form
    adds_bos       BOS begins a text, where the file does not say
    """

    steps: tuple[dict[str, Any], ...]
    ignore_merges: bool = False
    nfc: bool = False
    adds_bos: bool = False


def pre_tokenizer(name: str) -> PreTokenizer:
    """The kind of a name in `tokenizer.ggml.pre`. Raises TokenizerError for an unknown one."""
    for names, kind in _KINDS:
        if name in names:
            return kind
    known = ", ".join(known for names, _ in _KINDS for known in names if known)
    raise TokenizerError(f"tokenizer.ggml.pre = {name!r} is not known; accepted: {known}")


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _patterns(*patterns: str) -> tuple[dict[str, Any], ...]:
    return (*map(_split, patterns), _byte_level(use_regex=False))


_GPT2 = _byte_level(use_regex=True)
"""With GPT-2's own pattern, which the library knows."""
_DIGITS = {"type": "Digits", "individual_digits": True}

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_SEED_CODER = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES

# A word is capitals and then small letters; letters without case and marks count as both.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?{upper}*{lower}+{end}|[^\r\n\p{L}\p{N}]?{upper}+{lower}*{end}"


def _by_case(end: str, digits: str) -> str:
    words = _CASED.replace("{upper}", _UPPER).replace("{lower}", _LOWER).replace("{end}", end)
    return words + "|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES


# Letters of scripts that have capitals, as of the Unicode of its day.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_HAN = r"[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LLM = (
    *map(_split, (r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _DEEPSEEK_HAN)),
    _DIGITS,
    _byte_level(use_regex=False),
)
_DEEPSEEK_CODER = (
    *map(_split, (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN)),
    _DIGITS,
    _byte_level(use_regex=False),
)
_DEEPSEEK_V3 = _patterns(
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES,
)
_FALCON = (
    {"type": "Punctuation", "behavior": "Contiguous"},
    _GPT2,
    {"type": "Digits", "individual_digits": False},
    _split("[0-9][0-9][0-9]"),
)
_BLOOM = _patterns(r" ?[^(\s|[.,!?…。，、।۔،])]+")

_KINDS: tuple[tuple[tuple[str, ...], PreTokenizer], ...] = (
    ((*UNNAMED, "gpt-2", "phi-2", "olmo", "modern-bert", "mellum"), PreTokenizer((_GPT2,))),
    (("mpt",), PreTokenizer((_GPT2,), nfc=True)),
    (("starcoder", "refact", "smollm", "codeshell", "exaone", "mellum2"), PreTokenizer((_DIGITS, _GPT2))),
    (("command-r",), PreTokenizer((_DIGITS, _GPT2), nfc=True)),
    (("llama-bpe", "llama3", "llama-v3"), PreTokenizer(_patterns(_LLAMA3), ignore_merges=True, adds_bos=True)),
    (("falcon3", "pixtral"), PreTokenizer(_patterns(_LLAMA3), ignore_merges=True, adds_bos=True)),
    (("dbrx", "smaug-bpe"), PreTokenizer(_patterns(_LLAMA3))),
    (("glm4", "chatglm-bpe"), PreTokenizer(_patterns(_LLAMA3), ignore_merges=True)),
    (("qwen2", "deepseek-r1-qwen"), PreTokenizer(_patterns(_QWEN2), nfc=True)),
    (("stablelm2", "hunyuan"), PreTokenizer(_patterns(_QWEN2))),
    (("qwen35",), PreTokenizer(_patterns(_QWEN35))),
    (("seed-coder",), PreTokenizer(_patterns(_SEED_CODER))),
    (("tekken",), PreTokenizer(_patterns(_by_case("", r"\p{N}")), ignore_merges=True, adds_bos=True)),
    (("gpt-4o", "llama4"), PreTokenizer(_patterns(_by_case(_CONTRACTIONS + "?", r"\p{N}{1,3}")))),
    (("deepseek-llm",), PreTokenizer(_DEEPSEEK_LLM)),
    (("deepseek-coder",), PreTokenizer(_DEEPSEEK_CODER)),
    (("deepseek-v3",), PreTokenizer(_DEEPSEEK_V3)),
    (("falcon",), PreTokenizer(_FALCON)),
    (("bloom", "gpt3-finnish"), PreTokenizer(_BLOOM)),
)
