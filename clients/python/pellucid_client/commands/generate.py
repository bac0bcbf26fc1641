"""`pellucid generate`: one prompt streamed as it is made, or a file of prompts run side by side."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import cast

from pellucid_client._requests import GenerateOptions
from pellucid_client.commands.common import (
    CommandError,
    Commands,
    add_command,
    connect,
    connect_async,
    positive_count,
    positive_seconds,
    print_json,
    read_text,
    token_ids,
)
from pellucid_client.errors import PellucidError
from pellucid_client.results import Completion

Outcome = Completion | PellucidError


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "generate",
        _generate,
        "continue a prompt; the text appears as it is made",
        "Options left out take the server's defaults. Ctrl-C ends the request too; the exit code is then 130.",
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text; `-` or none: standard input")
    prompts.add_argument("--token-ids", type=token_ids, metavar="IDS", help="the prompt as token ids, such as 1,2,3")
    prompts.add_argument("--file", metavar="PATH", help="one prompt a line, blank lines skipped; `-`: standard input")
    parser.add_argument(
        "--concurrency", type=positive_count, default=8, metavar="N", help="with --file: prompts at once (default: 8)"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object a line, with ids, usage and timings")
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
    return asyncio.run(_run_file(arguments, _read_prompts(arguments.file), options))


def _run_one(arguments: argparse.Namespace, prompt: str | list[int], options: GenerateOptions) -> int:
    with connect(arguments) as client, client.generate(prompt, **options) as stream:
        if arguments.json:
            completion = stream.result()
            print_json(completion)
        else:
            if arguments.echo and isinstance(prompt, str):
                print(prompt, end="", flush=True)
            for chunk in stream:
                print(chunk.text, end="", flush=True)
            print(flush=True)
            completion = stream.result()
    if arguments.show_usage:
        print(_usage_line(completion), file=sys.stderr)
    return 0


async def _run_file(arguments: argparse.Namespace, prompts: Sequence[tuple[int, str]], options: GenerateOptions) -> int:
    """Prints answers in the order of the prompts. A prompt that fails is reported and does not hold up the others."""
    gate = asyncio.Semaphore(arguments.concurrency)
    failed = False
    async with connect_async(arguments) as client:

        async def run(prompt: str) -> Outcome:
            async with gate:
                try:
                    return await client.generate(prompt, **options).result()
                except PellucidError as error:
                    return error

        tasks = [asyncio.create_task(run(prompt)) for _, prompt in prompts]
        try:
            for (line, prompt), task in zip(prompts, tasks, strict=True):
                outcome = await task
                failed |= isinstance(outcome, PellucidError)
                _print_outcome(arguments, line, prompt, outcome)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return 1 if failed else 0


def _print_outcome(arguments: argparse.Namespace, line: int, prompt: str, outcome: Outcome) -> None:
    if isinstance(outcome, PellucidError):
        if arguments.json:
            error = {"code": outcome.code.name, "reason": outcome.reason, "message": outcome.message}
            print_json({"line": line, "error": error})
        else:
            print(f"pellucid: {arguments.file}, line {line}: {outcome.message}", file=sys.stderr)
    elif arguments.json:
        print_json({"line": line, **asdict(outcome)})
    else:
        print((prompt if arguments.echo else "") + outcome.text, flush=True)
    if arguments.show_usage and isinstance(outcome, Completion):
        print(f"line {line}: {_usage_line(outcome)}", file=sys.stderr)


def _read_prompts(path: str) -> list[tuple[int, str]]:
    """(line number, prompt) of every line that is not blank."""
    try:
        if path == "-":
            text = sys.stdin.read()
        else:
            with open(path, encoding="utf-8") as file:
                text = file.read()
    except OSError as error:
        raise CommandError(f"--file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CommandError(f"--file {path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    prompts = [(number, line.removesuffix("\r")) for number, line in enumerate(text.split("\n"), start=1)]
    return [(number, prompt) for number, prompt in prompts if prompt.strip()]


def _usage_line(completion: Completion) -> str:
    finish, timings = completion.finish, completion.timings
    matched = "" if finish.matched is None else f" {finish.matched!r}"
    parts = [
        f"prompt {completion.usage.prompt_token_count} tokens",
        f"output {completion.usage.output_token_count} tokens",
        f"finish {finish.reason}{matched}",
        f"first token {_milliseconds(timings.time_to_first_token)}",
        f"total {_milliseconds(timings.total_time)}",
        f"seed {completion.prompt.sampling.seed}",
        f"request {completion.prompt.request_id}",
    ]
    if completion.prompt.dropped_token_count:
        parts.insert(1, f"dropped {completion.prompt.dropped_token_count} tokens of it")
    return ", ".join(parts)


def _milliseconds(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds * 1000:.1f} ms"
