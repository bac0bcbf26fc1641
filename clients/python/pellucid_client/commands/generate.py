"""`pellucid generate`: one prompt streamed as it is made, or a file of prompts run side by side."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from pellucid_client._options import GenerateOptions
from pellucid_client.client import Client, GenerateStream
from pellucid_client.commands import prompt_file
from pellucid_client.commands.answers import CANCELLED, cancelled_note, record, usage_line
from pellucid_client.commands.common import (
    Commands,
    add_command,
    connect,
    positive_count,
    read_text,
    token_ids,
)
from pellucid_client.commands.options import add_options, chosen
from pellucid_client.commands.output import CommandError, note, print_json, write
from pellucid_client.results import Completion


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "generate",
        _generate,
        "continue a prompt; the text appears as it is made",
        "Options left out take the server's defaults. Exit code 1: the server or an input said no, with --file to any "
        f"prompt; {CANCELLED}: the request was cancelled from elsewhere, and the text ends early; 130: Ctrl-C, which "
        "ends the request too.",
        each="on a prompt ",
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text; `-` or none: standard input")
    prompts.add_argument(
        "--token-ids",
        type=token_ids,
        metavar="IDS",
        help="the prompt as token ids, such as 1,2,3; where the model has no tokenizer, the answer is ids too",
    )
    prompts.add_argument(
        "--file",
        metavar="PATH",
        help="one prompt a line, `-`: standard input; a line of answer for each, its line breaks as blanks, empty for "
        "a blank line and where the prompt failed; waits where the server is full",
    )
    parser.add_argument(
        "--concurrency", type=positive_count, default=8, metavar="N", help="with --file: prompts at once (default: 8)"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json",
        action="store_true",
        help="one JSON object a line, with ids, usage and timings; with --file its line number too, and none for a "
        "blank line",
    )
    output.add_argument("--echo", action="store_true", help="print the prompt's text before its continuation")
    output.add_argument("--show-usage", action="store_true", help="token counts, times and seed on standard error")
    _add_logprobs(parser.add_argument_group("log-probabilities", "with --json"))
    request = add_options(parser)
    request.add_argument("--n", type=int, metavar="N", help="[1, 64]; so many outputs, one below the other")
    request.add_argument("--request-id", metavar="ID", help="a name for `pellucid cancel`")
    request.add_argument(
        "--omit-special-tokens", action="store_true", default=None, help="do not add BOS and the like to the prompt"
    )
    request.add_argument(
        "--parse-special-tokens", action="store_true", default=None, help="spellings of special tokens become tokens"
    )


def _add_logprobs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--logprobs", type=int, metavar="K", help="of the output's tokens, with the K likeliest beside each"
    )
    group.add_argument("--logprob-token-ids", type=token_ids, metavar="IDS", help="and with these beside each")
    group.add_argument("--prompt-logprobs", type=int, metavar="K", help="the same for the prompt's tokens")
    group.add_argument("--prompt-logprob-token-ids", type=token_ids, metavar="IDS", help="and with these beside each")
    group.add_argument(
        "--prompt-logprobs-start", type=int, metavar="N", help="leave out the prompt's tokens before this one"
    )


def _generate(arguments: argparse.Namespace) -> int:
    options = chosen(arguments)
    if not arguments.json and any(
        name.startswith(("logprob", "prompt_logprob")) for name in options if options.get(name) is not None
    ):
        raise CommandError("log-probabilities are shown with --json only")
    if arguments.file is None:
        prompt = read_text(arguments.prompt) if arguments.token_ids is None else arguments.token_ids
        return _run_one(arguments, prompt, options)
    if arguments.request_id is not None:
        raise CommandError("--request-id names one request; it does not go with --file")
    if arguments.n is not None and not arguments.json:
        raise CommandError("--n goes with --file only where there is --json: a line of text holds one answer")
    return asyncio.run(prompt_file.run(arguments, prompt_file.read(arguments.file), options))


def _run_one(arguments: argparse.Namespace, prompt: str | list[int], options: GenerateOptions) -> int:
    with connect(arguments) as client, client.generate(prompt, **options) as stream:
        if arguments.json:
            print_json(record(completion := stream.result()))
        else:
            as_ids = not isinstance(prompt, str) and not _has_tokenizer(client, options)
            completion = _print_stream(stream, prompt if arguments.echo else "", as_ids)
    if arguments.show_usage:
        note(usage_line(completion))
    if completion.finish.reason != "cancelled":
        return 0
    note(f"pellucid: {cancelled_note(completion)}")
    return CANCELLED


def _has_tokenizer(client: Client, options: GenerateOptions) -> bool:
    return bool(client.model(options.get("model"), timeout=options.get("timeout")).tokenizer_sha256)


def _print_stream(stream: GenerateStream, before: str | list[int], as_ids: bool) -> Completion:
    """The first output as it comes, then the others."""
    first = _Printer(before, as_ids)
    for chunk in stream:
        if chunk.index == 0:
            first.add(chunk.text, chunk.token_ids)
    first.end()
    completion = stream.result()
    for output in completion.outputs[1:]:
        printer = _Printer(before, as_ids)
        printer.add(output.text, output.token_ids)
        printer.end()
    return completion


class _Printer:
    """One output: its text, or ids with blanks between them, `before` in front."""

    def __init__(self, before: str | list[int], as_ids: bool) -> None:
        self._as_ids = as_ids
        self._separator = ""
        if isinstance(before, str):
            write(before)
        elif as_ids:
            self.add("", before)

    def add(self, text: str, token_ids: Sequence[int]) -> None:
        if not self._as_ids:
            write(text)
        elif token_ids:
            write(self._separator + " ".join(map(str, token_ids)))
            self._separator = " "

    def end(self) -> None:
        write("\n")
