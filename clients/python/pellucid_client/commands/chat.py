"""`pellucid chat`: a conversation, a line for each turn; the answers appear as they are made."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from pellucid_client._options import GenerateOptions
from pellucid_client.client import Client
from pellucid_client.commands.answers import usage_line
from pellucid_client.commands.common import Commands, add_command, connect, require_stdin
from pellucid_client.commands.options import add_options, chosen
from pellucid_client.commands.output import CommandError, note, write
from pellucid_client.errors import PellucidError

HELP = "/reset begins anew, /system TEXT sets the system prompt and begins anew, /help shows this, Ctrl-D ends."


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "chat",
        _chat,
        "talk with a model that has a chat template",
        f"A line is a turn. {HELP} Ctrl-C ends an answer early; what has come of it stays. Where standard input is no "
        "terminal, each of its lines is a turn, and only the answers are printed. Options left out take the server's "
        "defaults. Exit code 1: the server said no.",
        each="on an answer ",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    parser.add_argument("--show-usage", action="store_true", help="token counts, times and seed on standard error")
    add_options(parser)


def _chat(arguments: argparse.Namespace) -> int:
    require_stdin("standard input")
    with connect(arguments) as client:
        _Conversation(client, chosen(arguments), arguments.system, arguments.show_usage).run()
    return 0


class _Conversation:
    """The messages so far, and the turns that come."""

    def __init__(self, client: Client, options: GenerateOptions, system: str | None, show_usage: bool) -> None:
        self._client = client
        self._options = options
        self._system = system
        self._show_usage = show_usage
        self._is_terminal = sys.stdin.isatty()
        self._messages: list[dict[str, str]] = []
        self._begin()

    def run(self) -> None:
        """Until the lines end. Raises where a turn fails and nobody can type another one."""
        if self._is_terminal:
            note(HELP)
        for line in self._lines():
            command, _, rest = line.strip().partition(" ")
            if command == "/reset":
                self._begin()
            elif command == "/system":
                self._system = rest or None
                self._begin()
            elif command == "/help":
                note(HELP)
            elif line.strip():
                self._turn(line)

    def _begin(self) -> None:
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def _lines(self) -> Iterator[str]:
        while True:
            if self._is_terminal:
                write("> ")
            try:
                line = sys.stdin.readline()
            except UnicodeDecodeError as error:
                raise CommandError(f"standard input is not UTF-8 text: {error.reason} at byte {error.start}") from None
            if not line:
                break
            yield line.removesuffix("\n").removesuffix("\r")
        if self._is_terminal:
            write("\n")

    def _turn(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        try:
            self._messages.append({"role": "assistant", "content": self._answer()})
        except PellucidError as error:
            self._messages.pop()
            if not self._is_terminal:
                raise
            note(f"pellucid: {error}")

    def _answer(self) -> str:
        options: GenerateOptions = {**self._options, "messages": self._messages}
        stream = self._client.generate(**options)
        try:
            for chunk in stream:
                write(chunk.text)
        except KeyboardInterrupt:
            stream.cancel()
            if not self._is_terminal:
                raise
        except PellucidError:
            if stream.text:
                write("\n")
            raise
        write("\n")
        if self._show_usage and stream.usage is not None:
            note(usage_line(stream.result()))
        return stream.text
