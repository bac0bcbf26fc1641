"""`pellucid tokenize` and `pellucid detokenize`."""

from __future__ import annotations

import argparse

from pellucid_client.commands.common import Commands, add_command, connect, read_text, token_ids
from pellucid_client.commands.output import CommandError, print_json, write


def add_parsers(commands: Commands) -> None:
    tokenize = add_command(commands, "tokenize", _tokenize, "turn text into token ids")
    tokenize.add_argument("text", nargs="?", metavar="TEXT", help="the text; `-` or none: standard input")
    tokenize.add_argument("--model", help="model name; needed where several are loaded")
    tokenize.add_argument("--no-special-tokens", action="store_true", help="do not add BOS and the like")
    tokenize.add_argument(
        "--parse-special-tokens", action="store_true", help="spellings of special tokens become those tokens"
    )
    tokenize.add_argument("--json", action="store_true", help="print ids and the bytes of each token (hex) as JSON")

    detokenize = add_command(commands, "detokenize", _detokenize, "turn token ids into text")
    detokenize.add_argument(
        "token_ids", nargs="?", metavar="IDS", help="such as 1,2,3 or '1 2 3'; `-` or none: standard input"
    )
    detokenize.add_argument("--model", help="model name; needed where several are loaded")
    detokenize.add_argument("--keep-special-tokens", action="store_true", help="leave special tokens in the text")
    detokenize.add_argument("--json", action="store_true", help="print the text as JSON")


def _tokenize(arguments: argparse.Namespace) -> int:
    with connect(arguments) as client:
        result = client.tokenize(
            read_text(arguments.text),
            model=arguments.model,
            omit_special_tokens=arguments.no_special_tokens,
            parse_special_tokens=arguments.parse_special_tokens,
            return_tokens=arguments.json,
            timeout=arguments.timeout,
        )
    if arguments.json:
        print_json(result)
    else:
        write(",".join(map(str, result.token_ids)) + "\n")
    return 0


def _detokenize(arguments: argparse.Namespace) -> int:
    try:
        ids = token_ids(read_text(arguments.token_ids))
    except argparse.ArgumentTypeError as error:
        raise CommandError(str(error)) from None
    with connect(arguments) as client:
        text = client.detokenize(
            ids,
            model=arguments.model,
            keep_special_tokens=arguments.keep_special_tokens,
            timeout=arguments.timeout,
        )
    if arguments.json:
        print_json({"text": text})
    else:
        write(text + "\n")
    return 0
