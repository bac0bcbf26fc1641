"""The options of a request, which `pellucid generate` and `pellucid chat` share. Each one's `dest` is its name in
GenerateOptions.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import cast

from pellucid_client._options import GenerateOptions
from pellucid_client.commands.common import positive_seconds, token_ids


def add_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds all of them; returns the group of those that are about the request as a whole."""
    _add_sampling(parser.add_argument_group("sampling"))
    _add_stopping(parser.add_argument_group("stopping"))
    _add_constraint(parser.add_argument_group("constraint", "what the output must match; one of"))
    _add_cache(parser.add_argument_group("cache of computed prompts"))
    group = parser.add_argument_group("request")
    _add_request(group)
    return group


def chosen(arguments: argparse.Namespace) -> GenerateOptions:
    """The options that were given."""
    names = GenerateOptions.__annotations__
    return cast("GenerateOptions", {name: value for name, value in vars(arguments).items() if name in names})


def biases(text: str) -> dict[int, float]:
    """ "5:-1,7:2.5" -> {5: -1.0, 7: 2.5}"""
    try:
        pairs = [part.split(":") for part in text.replace(",", " ").split()]
        return {int(token_id): float(bias) for token_id, bias in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of biases such as 5:-1,7:2.5") from None


def text_or_file(text: str) -> str:
    """The text itself, or that of a file for @FILE."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text[1:]}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text[1:]}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--temperature", type=float, metavar="X", help="[0, 100]; 0: always the most likely token")
    group.add_argument("--top-k", type=int, metavar="K", help="only the K most likely tokens; 0: off")
    group.add_argument("--top-p", type=float, metavar="P", help="(0, 1]: the fewest tokens that sum to P; 1: off")
    group.add_argument("--min-p", type=float, metavar="P", help="[0, 1): only tokens of P times the best; 0: off")
    group.add_argument(
        "--typical-p", type=float, metavar="P", help="(0, 1]: the most typical tokens that sum to P; 1: off"
    )
    group.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="[0.01, 100], on prompt and output; 1: off"
    )
    group.add_argument("--presence-penalty", type=float, metavar="X", help="[-2, 2], on tokens of the output; 0: off")
    group.add_argument("--frequency-penalty", type=float, metavar="X", help="[-2, 2], for each time they occur; 0: off")
    group.add_argument("--logit-bias", type=biases, metavar="ID:X,…", help="added to the logits of these tokens")
    group.add_argument("--allowed-token-ids", type=token_ids, metavar="IDS", help="the only tokens that may be chosen")
    group.add_argument("--seed", type=int, metavar="N", help="[0, 2^64): the same seed gives the same text")


def _add_stopping(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-new-tokens", type=int, metavar="N", help="at most N tokens; 0: only run the prompt")
    group.add_argument("--min-new-tokens", type=int, metavar="N", help="no end before N tokens")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be given several times")
    group.add_argument("--stop-token-ids", type=token_ids, metavar="IDS", help="end at these tokens, such as 1,2,3")
    group.add_argument("--include-stop-in-text", action="store_true", default=None, help="keep the stop text")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the model's end tokens")
    group.add_argument("--time-limit", type=positive_seconds, metavar="SECONDS", help="end well after so long")


def _add_constraint(group: argparse._ArgumentGroup) -> None:
    ways = group.add_mutually_exclusive_group()
    ways.add_argument(
        "--json-schema", type=text_or_file, metavar="SCHEMA", help="JSON of this schema; @FILE reads a file"
    )
    ways.add_argument("--json-object", action="store_true", default=None, help="any JSON object")
    ways.add_argument("--regex", metavar="REGEX", help="text that this regular expression matches as a whole")
    ways.add_argument(
        "--ebnf-grammar", type=text_or_file, metavar="GRAMMAR", help="text of this grammar; @FILE reads a file"
    )
    ways.add_argument("--choices", action="append", metavar="TEXT", help="one of these; given once for each")


def _add_cache(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--bypass-cache-read", action="store_true", default=None, help="compute the whole prompt")
    group.add_argument("--bypass-cache-write", action="store_true", default=None, help="keep nothing of it for later")
    group.add_argument("--cache-salt", metavar="TEXT", help="share with requests of the same salt only")


def _add_request(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", help="model name; needed where several are loaded")
    group.add_argument("--priority", type=int, metavar="N", help="[-100, 100]; higher runs sooner")
    group.add_argument(
        "--context",
        choices=("auto", "reject", "truncate", "roll", "reencode"),
        help="when prompt and output pass the context: refuse, cut the prompt once, or let a window slide",
    )
    group.add_argument("--window-tokens", type=int, metavar="N", help="roll, reencode: newest tokens that stay visible")
    group.add_argument("--sink-tokens", type=int, metavar="N", help="roll, reencode: first tokens that stay for ever")
    group.add_argument("--hop-tokens", type=int, metavar="N", help="reencode: tokens dropped at a time")
    group.add_argument(
        "--keep-special-tokens", action="store_true", default=None, help="leave special tokens in the text"
    )
