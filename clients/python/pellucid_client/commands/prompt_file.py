"""`pellucid generate --file`: a prompt a line, several at once, answered in their order.

Line n of the output answers line n of the file: a prompt that failed and a blank line have an empty one, and line
breaks in an answer are blanks. With --json there is an object for each prompt, which holds its line number and its
text unchanged.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pellucid_client._options import GenerateOptions
from pellucid_client.aio import AsyncClient
from pellucid_client.commands.answers import CANCELLED, cancelled_note, record, usage_line
from pellucid_client.commands.common import connect_async, require_stdin
from pellucid_client.commands.output import CommandError, note, print_json, write
from pellucid_client.errors import PellucidError
from pellucid_client.results import Completion

Outcome = Completion | PellucidError | None
"""None: the line is blank."""

_LINE_BREAK = re.compile(r"\r\n|\n|\r")


@dataclass(frozen=True)
class Line:
    """One line of the file."""

    number: int
    text: str

    @property
    def is_blank(self) -> bool:
        return not self.text.strip()


def read(path: str) -> list[Line]:
    """Raises CommandError where the file cannot be read or is not UTF-8."""
    text = _content(path)
    lines = text.removesuffix("\n").split("\n") if text else []
    return [Line(number, line.removesuffix("\r")) for number, line in enumerate(lines, start=1)]


async def run(arguments: argparse.Namespace, lines: Sequence[Line], options: GenerateOptions) -> int:
    """A prompt that fails is reported and does not hold up the others. Where the server is full, prompts wait."""
    gate = asyncio.Semaphore(arguments.concurrency)
    code = 0
    async with connect_async(arguments, wait_for_room=True) as client:
        tasks = [asyncio.create_task(_answer(client, line, options, gate)) for line in lines]
        try:
            for line, task in zip(lines, tasks, strict=True):
                outcome = await task
                _print(arguments, line, outcome)
                code = _worse(code, outcome)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return code


async def _answer(client: AsyncClient, line: Line, options: GenerateOptions, gate: asyncio.Semaphore) -> Outcome:
    if line.is_blank:
        return None
    async with gate:
        try:
            return await client.generate(line.text, **options).result()
        except PellucidError as error:
            return error


def _print(arguments: argparse.Namespace, line: Line, outcome: Outcome) -> None:
    place = f"pellucid: {arguments.file}, line {line.number}"
    if isinstance(outcome, PellucidError) and not arguments.json:
        note(f"{place}: {_LINE_BREAK.sub(' ', outcome.message)}")
    if arguments.json:
        _print_record(line, outcome)
    else:
        before = line.text if arguments.echo else ""
        text = before + _LINE_BREAK.sub(" ", outcome.text) if isinstance(outcome, Completion) else ""
        write(text + "\n")
    if isinstance(outcome, Completion):
        if arguments.show_usage:
            note(f"line {line.number}: {usage_line(outcome)}")
        if outcome.finish.reason == "cancelled":
            note(f"{place}: {cancelled_note(outcome)}")


def _print_record(line: Line, outcome: Outcome) -> None:
    if isinstance(outcome, PellucidError):
        error = {"code": outcome.code.name, "reason": outcome.reason, "message": outcome.message}
        print_json({"line": line.number, "error": error})
    elif outcome is not None:
        print_json({"line": line.number, **record(outcome)})


def _worse(code: int, outcome: Outcome) -> int:
    """The exit code so far, with one more outcome: 1 for a failure, else CANCELLED, else 0."""
    if code == 1 or isinstance(outcome, PellucidError):
        return 1
    cancelled = outcome is not None and outcome.finish.reason == "cancelled"
    return CANCELLED if cancelled else code


def _content(path: str) -> str:
    if path == "-":
        require_stdin("--file -: standard input")
    try:
        with open(0 if path == "-" else path, encoding="utf-8", newline="\n", closefd=path != "-") as file:
            return file.read()
    except OSError as error:
        raise CommandError(f"--file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CommandError(f"--file {path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
