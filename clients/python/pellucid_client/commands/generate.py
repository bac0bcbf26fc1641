"""`pellucid generate`: one prompt streamed as it is made, or a file of prompts run side by side."""

from __future__ import annotations

import argparse
import asyncio
from typing import cast

from pellucid_client._requests import GenerateOptions
from pellucid_client.client import Client, GenerateStream
from pellucid_client.commands import prompt_file
from pellucid_client.commands.answers import CANCELLED, cancelled_note, usage_line
from pellucid_client.commands.common import (
    Commands,
    add_command,
    connect,
    positive_count,
    positive_seconds,
    read_text,
    token_ids,
)
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
    _add_sampling(parser.add_argument_group("sampling"))
    _add_stopping(parser.add_argument_group("stopping"))
    _add_request(parser.add_argument_group("request"))


# Each option's `dest` is its name in GenerateOptions.
def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--temperature", type=float, metavar="X", help="[0, 100]; 0: always the most likely token")
    group.add_argument("--top-k", type=int, metavar="K", help="only the K most likely tokens; 0: off")
    group.add_argument("--top-p", type=float, metavar="P", help="(0, 1]: the fewest tokens that sum to P; 1: off")
    group.add_argument("--min-p", type=float, metavar="P", help="[0, 1): only tokens of P times the best; 0: off")
    group.add_argument("--seed", type=int, metavar="N", help="[0, 2^64): the same seed gives the same text")


def _add_stopping(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-new-tokens", type=int, metavar="N", help="at most N tokens; 0: only run the prompt")
    group.add_argument("--min-new-tokens", type=int, metavar="N", help="no end before N tokens")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be given several times")
    group.add_argument("--stop-token-ids", type=token_ids, metavar="IDS", help="end at these tokens, such as 1,2,3")
    group.add_argument("--include-stop-in-text", action="store_true", default=None, help="keep the stop text")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the model's end tokens")
    group.add_argument("--time-limit", type=positive_seconds, metavar="SECONDS", help="end well after so long")


def _add_request(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", help="model name; needed where several are loaded")
    group.add_argument("--request-id", metavar="ID", help="a name for `pellucid cancel`")
    group.add_argument(
        "--context",
        choices=("auto", "reject", "truncate", "roll", "reencode"),
        help="when prompt and output pass the context: refuse, cut the prompt once, or let a window slide",
    )
    group.add_argument("--window-tokens", type=int, metavar="N", help="roll, reencode: newest tokens that stay visible")
    group.add_argument("--sink-tokens", type=int, metavar="N", help="roll, reencode: first tokens that stay for ever")
    group.add_argument("--hop-tokens", type=int, metavar="N", help="reencode: tokens dropped at a time")
    group.add_argument(
        "--omit-special-tokens", action="store_true", default=None, help="do not add BOS and the like to the prompt"
    )
    group.add_argument(
        "--parse-special-tokens", action="store_true", default=None, help="spellings of special tokens become tokens"
    )
    group.add_argument(
        "--keep-special-tokens", action="store_true", default=None, help="leave special tokens in the text"
    )


def _generate(arguments: argparse.Namespace) -> int:
    chosen = {name: value for name, value in vars(arguments).items() if name in GenerateOptions.__annotations__}
    options = cast("GenerateOptions", chosen)
    if arguments.file is None:
        prompt = read_text(arguments.prompt) if arguments.token_ids is None else arguments.token_ids
        return _run_one(arguments, prompt, options)
    if arguments.request_id is not None:
        raise CommandError("--request-id names one request; it does not go with --file")
    return asyncio.run(prompt_file.run(arguments, prompt_file.read(arguments.file), options))


def _run_one(arguments: argparse.Namespace, prompt: str | list[int], options: GenerateOptions) -> int:
    with connect(arguments) as client, client.generate(prompt, **options) as stream:
        if arguments.json:
            print_json(completion := stream.result())
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
    """As it comes: the text, or ids with blanks between them."""
    if isinstance(before, str):
        write(before)
    elif as_ids:
        write(" ".join(map(str, before)))
    separator = " " if before else ""
    for chunk in stream:
        if not as_ids:
            write(chunk.text)
        elif chunk.token_ids:
            write(separator + " ".join(map(str, chunk.token_ids)))
            separator = " "
    write("\n")
    return stream.result()
