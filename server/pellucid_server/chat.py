"""Chat messages to token ids, by the checkpoint's own template (Jinja in a sandbox, as transformers renders it).

In: messages as (role, content). Out: the prompt's ids, and the ids with which the template ends an answer.

Only the template may spell special tokens. Before it is rendered, every special token spelled in a content gives its
place to a stand-in that nobody can guess, and so does the beginning or end of one where a content begins or ends with
it. Afterwards the rendered text is cut at the stand-ins: what they stand for is plain text, the rest is parsed.
"""

from __future__ import annotations

import datetime
import json
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pellucid_model.tokenizers import ChatTemplate, Tokenizer

MAX_CHARACTERS = 2**24
"""A rendered prompt may have so many."""
MAX_SECONDS = 5.0
"""Rendering may take so long."""

Message = tuple[str, str]
"""Role and content."""
Piece = tuple[str, bool]
"""Text, and whether special tokens spelled in it are those tokens."""


class ChatError(Exception):
    """The template cannot render these messages; `index` is the one it looked at last."""

    def __init__(self, text: str, index: int | None) -> None:
        super().__init__(text)
        self.index = index


class ChatPrompter:
    """One checkpoint's template. Raises ValueError where it is no valid Jinja template."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._names = dict(template.special_tokens)
        self._tokenizer = tokenizer
        self._specials = _Specials(tokenizer.special_tokens)
        try:
            self._template = _environment().from_string(template.source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from None
        self.end_ids = self._ends_of_turn()
        """Ids that end an answer, whether or not the checkpoint names them as end tokens."""

    def encode(self, pieces: Sequence[Piece]) -> list[int]:
        """Ids of what `render` gave. No BOS is added: the template writes its own."""
        return self._tokenizer.encode_pieces(pieces)

    def render(self, messages: Sequence[Message], *, open_answer: bool = True) -> list[Piece]:
        """The prompt's text. `open_answer`: with the beginning of the assistant's turn behind it. Raises ChatError."""
        stand_ins = _StandIns()
        hidden = [(role, self._specials.hide(content, stand_ins)) for role, content in messages]
        return stand_ins.pieces(self._rendered(hidden, open_answer))

    def _rendered(self, messages: Sequence[Message], open_answer: bool) -> str:
        watch = _Watch(time.monotonic() + MAX_SECONDS)
        shown = [_Shown(watch, index, role, content) for index, (role, content) in enumerate(messages)]
        given = {"tools": None, "documents": None, "add_generation_prompt": open_answer}
        try:
            texts, size = [], 0
            for text in self._template.generate(self._names | given | {"messages": shown}):
                watch.check()
                size += len(text)
                if not size <= MAX_CHARACTERS:
                    raise ChatError(f"comes to more than {MAX_CHARACTERS} characters", None)
                texts.append(text)
        except ChatError:
            raise
        except Exception as error:  # A template raises whatever its operations on these messages raise.
            said = " ".join(str(error).split())[:300]
            raise ChatError(f"the model's chat template refuses it: {said}", watch.index) from None
        return "".join(texts)

    def _ends_of_turn(self) -> tuple[int, ...]:
        """The special token that the template writes behind an assistant's message, if it does."""
        stand_ins = _StandIns()
        answer = stand_ins.add("")
        try:
            text = self._rendered([("user", "a"), ("assistant", answer)], open_answer=False)
        except ChatError:
            return ()
        end = self._specials.at_start(text.rpartition(answer)[2].lstrip()) if answer in text else None
        return () if end is None else (self._tokenizer.special_tokens[end],)


class _Specials:
    """Spellings of the special tokens, and where a content holds them."""

    def __init__(self, spellings: Iterable[str]) -> None:
        longest_first = sorted(spellings, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._beginnings = {each[:size] for each in longest_first for size in range(1, len(each))}
        self._ends = {each[size:] for each in longest_first for size in range(1, len(each))}
        self._longest = len(longest_first[0]) - 1 if longest_first else 0

    def at_start(self, text: str) -> str | None:
        match = self._whole.match(text)
        return None if match is None else match[0]

    def hide(self, content: str, stand_ins: _StandIns) -> str:
        """The content with stand-ins for special tokens, and for parts of them at its ends. Templates trim contents."""
        content = self._whole.sub(lambda match: stand_ins.add(match[0]), content)
        text = content.strip()
        before, behind = content[: len(content) - len(content.lstrip())], content[len(content.rstrip()) :]
        sizes = range(min(self._longest, len(text)), 0, -1)
        if (size := next((size for size in sizes if text[-size:] in self._beginnings), 0)) > 0:
            text = text[:-size] + stand_ins.add(text[-size:])
        if (size := next((size for size in sizes if text[:size] in self._ends), 0)) > 0:
            text = stand_ins.add(text[:size]) + text[size:]
        return before + text + behind if text else content


class _StandIns:
    """Of one rendering: digits of chance between characters for private use, which templates leave alone."""

    def __init__(self) -> None:
        self._key = str(secrets.randbits(96))
        self._texts: list[str] = []

    def add(self, text: str) -> str:
        """What stands for the text."""
        self._texts.append(text)
        return f"\ue000{self._key}.{len(self._texts) - 1}\ue001"

    def pieces(self, rendered: str) -> list[Piece]:
        parts = re.split(rf"\ue000{self._key}\.(\d+)\ue001", rendered)
        return [
            (self._texts[int(part)], False) if place % 2 else (part, True) for place, part in enumerate(parts) if part
        ]


class _Watch:
    """Of one rendering: the message that was looked at last, and the time."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self.index: int | None = None

    def check(self) -> None:
        if time.monotonic() > self._deadline:
            raise ChatError(f"takes the model's chat template more than {MAX_SECONDS:g} s", self.index)


class _Shown(dict[str, str]):
    """A message as the template sees it."""

    def __init__(self, watch: _Watch, index: int, role: str, content: str) -> None:
        super().__init__(role=role, content=content)
        self._watch = watch
        self._index = index

    def __getitem__(self, key: str) -> str:
        self._watch.index = self._index
        self._watch.check()
        return super().__getitem__(key)


class _Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %}, with which templates mark answers for training: its body, as it is."""

    tags: set[str] = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates are written for: see `apply_chat_template` of the transformers library."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
