"""What an output has to match as a whole: from a request's constraint to a grammar of the `llguidance` library.

In: a Constraint. Out: a grammar, or one line that says why there is none. Free of torch and numpy, because the frontend
checks constraints before it admits a request; constraint_states.py follows them while tokens are sampled.

The notations are those of the library: regular expressions of Rust's regex crate without look-around, which match the
whole output; JSON Schema, with properties in the order of the schema; EBNF as llama.cpp writes it (GBNF, `root ::= …`),
or the library's own Lark form (`start: …`). Between JSON's tokens there may be MAX_WHITESPACE characters of white space
in a row, so that no model writes white space for ever.

A grammar can be small and yet take hours and gigabytes to compile, or overflow a stack. So the frontend compiles it
first in a process of its own, with limits (constraint_check.py), and only what has passed reaches the engine.
"""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

from pellucid_server.engine.messages import Constraint

if TYPE_CHECKING:
    import llguidance

MAX_WHITESPACE = 20
STACK_BYTES = 256 << 20
"""The library compiles chains of rules by recursion. A thread that does needs this much address space."""

_MESSAGE_LENGTH = 200
_PREFIXES = (
    r"^Failed to convert the grammar from GBNF to Lark: ",
    r"^(at )?\d+\(\d+\): ",
    r"^failed to compile JSON schema: ",
    r'^invalid regex ".*" \(in regex\): ',
)
# Tokens are judged by their bytes alone: without it the library wants forced text in the tokenizer's own division.
_HEADER = '%llguidance {"no_forcing": true}\n'
_JSON_OPTIONS = {
    "whitespace_pattern": rf"[ \t\n\r]{{0,{MAX_WHITESPACE}}}",
    "json_allow_general_unicode_escapes": True,
}


def to_grammar(constraint: Constraint) -> str:
    """The constraint in the library's Lark notation. Raises ValueError with one line; some errors only show later."""
    match constraint.kind:
        case "json_object":
            lark = _json({"type": "object"})
        case "json_schema":
            lark = _json(_read_schema(constraint.text))
        case "choices":
            lark = _regex("|".join(map(_escape, constraint.choices)))
        case "regex":
            lark = _regex(constraint.text)
        case "ebnf":
            lark = _ebnf(constraint.text)
    return _HEADER + lark


def new_matcher(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """The library's state machine at the beginning of an output. Raises ValueError with one line.

    The limits bound what a step costs, to some milliseconds even in an ambiguous grammar, and what a matcher holds.
    """
    import llguidance

    limits = llguidance.LLParserLimits(max_items_in_row=500, max_lexer_states=30_000, verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(fault_of(matcher))
    return matcher


def fault_of(matcher: llguidance.LLMatcher) -> str:
    """Why a matcher that lets nothing follow does so."""
    message, reason = matcher.get_error(), matcher.stop_reason()
    if reason in ("ParserTooComplex", "LexerTooComplex"):
        return "is too complex: a step through it takes too much work"
    if message.startswith("panic"):
        return "cannot be compiled: the grammar library fails on it"
    return "matches no text" if not message or message.startswith("NoExtension") else _one_line(message)


def _json(schema: dict[str, Any]) -> str:
    return "start: %json " + json.dumps({**schema, "x-guidance": _JSON_OPTIONS})


def _read_schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {_one_line(str(error))}") from None
    if not isinstance(schema, dict):
        raise ValueError("must be a JSON object")
    return schema


def _regex(text: str) -> str:
    import llguidance

    return str(json.loads(llguidance.LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"])


def _ebnf(text: str) -> str:
    import llguidance

    try:
        return llguidance.grammar_from("ebnf", _spell_escapes(text))
    except ValueError as error:
        raise ValueError(_one_line(str(error))) from None


def _escape(text: str) -> str:
    """A regular expression that matches the text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


def _spell_escapes(grammar: str) -> str:
    r"""GBNF's \uXXXX and \UXXXXXXXX as characters, or as \xXX where they are ASCII: the converter garbles zeros."""

    def spell(match: re.Match[str]) -> str:
        digits = match[1] or match[2]
        if digits is None or int(digits, 16) > sys.maxunicode:
            return match[0]
        return chr(int(digits, 16)) if int(digits, 16) > 0x7F else f"\\x{int(digits, 16):02X}"

    return re.sub(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", spell, grammar, flags=re.DOTALL)


def _one_line(message: str) -> str:
    """The library's message without the grammar that it quotes, and without its inner life."""
    lines = message.split("\n<")[0].splitlines()
    text = " ".join(line.strip() for line in lines if not re.match(r"\s*(\d* +\||\^)", line))
    for prefix in _PREFIXES:
        text = re.sub(prefix, "", text)
    return text[:_MESSAGE_LENGTH] or "cannot be read"
