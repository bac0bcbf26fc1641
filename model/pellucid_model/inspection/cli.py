"""`pellucid inspect`.

In: a checkpoint and a text. Out: a folder of pictures and one .npz, a summary on standard output, and an exit code:
0 done, 1 files could not be written, 2 the arguments cannot be used.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pellucid_model.checkpoint_kind import companions
from pellucid_model.errors import ModelError
from pellucid_model.one_line_parser import OneLineParser
from pellucid_model.tokenizers import Tokenizer, TokenizerError, load_tokenizer
from pellucid_model.training.cli import at_least_one, require_packages

if TYPE_CHECKING:
    from pellucid_model.inspection.inspection import Inspection

MOST_TOKENS = 128
_MOST_TOKENS_EVER = 1024
_SUMMARY_ROWS = 12


def inspect_command(argv: list[str]) -> int:
    """The entry point; argv without the words `pellucid inspect`."""
    arguments = _parser().parse_args(argv)
    try:
        return _inspect(arguments)
    except (ModelError, TokenizerError, ValueError) as error:
        print(f"pellucid inspect: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"pellucid inspect: {error.filename or 'files'}: {error.strerror}", file=sys.stderr)
        return 1


def _inspect(arguments: argparse.Namespace) -> int:
    require_packages("torch", "safetensors", "matplotlib")
    from pellucid_model.inspection.inspection import inspect_tokens
    from pellucid_model.servable import load_servable

    servable = load_servable(arguments.checkpoint, arguments.module or "")
    tokenizer = load_tokenizer(companions(arguments.checkpoint))
    tokens = _tokens(arguments, tokenizer)
    _check_tokens(tokens, servable.vocab_size, servable.context_length, arguments.max_tokens)
    inspection = inspect_tokens(servable.module.float().eval(), tokens, tokenizer, arguments.top_k)
    folder = arguments.out or Path(f"inspect-{time.strftime('%Y%m%d-%H%M%S')}")
    notices = inspection.save(folder, arguments.font)
    print(_summary(inspection))
    for notice in notices:
        print(f"pellucid inspect: {notice}", file=sys.stderr)
    print(f"{len(list(folder.glob('*.png')))} pictures and inspection.npz in {folder}")
    return 0


def _tokens(arguments: argparse.Namespace, tokenizer: Tokenizer | None) -> list[int]:
    if (arguments.text is None) == (arguments.tokens is None):
        raise ModelError("give a text, or --tokens 1,2,3")
    if arguments.tokens is not None:
        try:
            return [int(token) for token in arguments.tokens.split(",")]
        except ValueError:
            raise ModelError(f"--tokens {arguments.tokens}: must be numbers with commas between them") from None
    if tokenizer is None:
        raise ModelError(f"{arguments.checkpoint} has no tokenizer; give --tokens 1,2,3")
    return tokenizer.encode(arguments.text)


def _check_tokens(tokens: list[int], vocab_size: int, context_length: int | None, most: int) -> None:
    if not tokens:
        raise ModelError("the text has no tokens")
    if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
        raise ModelError(f"token {wrong[0]}: the model has tokens 0 to {vocab_size - 1}")
    if context_length is not None and len(tokens) > context_length:
        raise ModelError(f"the text has {len(tokens)} tokens; the model reads at most {context_length}")
    if len(tokens) > most:
        raise ModelError(
            f"the text has {len(tokens)} tokens; accepted: up to {most}. --max-tokens allows up to "
            f"{_MOST_TOKENS_EVER}: pictures become hard to read, and memory grows with the square"
        )


def _summary(inspection: Inspection) -> str:
    """The last few tokens with what would follow each."""
    count = len(inspection.labels)
    first = max(0, count - _SUMMARY_ROWS)
    lines = [f"likeliest next tokens, after the last {count - first} of {count} tokens:"]
    for row in range(first, count):
        pairs = zip(inspection.next_labels[row], inspection.next_probabilities[row], strict=True)
        lines.append(f"  {inspection.labels[row]}\t" + "  ".join(f"{label} {share:.2f}" for label, share in pairs))
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="pellucid inspect",
        description="Save attention maps, hidden-state norms and likeliest next tokens of a text, as PNG and .npz.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="what `pellucid serve` takes")
    parser.add_argument("text", metavar="TEXT", nargs="?", help="what the model reads")
    parser.add_argument("--tokens", metavar="1,2,3", help="token ids in place of a text")
    parser.add_argument(
        "--module", metavar="FILE.py:CLASS", help="the checkpoint is of this module; the file is executed"
    )
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="where files go (default: inspect-TIME)")
    parser.add_argument("--top-k", type=at_least_one, default=5, metavar="K", help="next tokens (default: %(default)s)")
    parser.add_argument(
        "--max-tokens",
        type=_bounded,
        default=MOST_TOKENS,
        metavar="N",
        help=f"longest text, up to {_MOST_TOKENS_EVER} tokens (default: %(default)s)",
    )
    parser.add_argument("--font", metavar="FILE", type=Path, help="font that has the text's characters")
    return parser


def _bounded(text: str) -> int:
    value = at_least_one(text)
    if value > _MOST_TOKENS_EVER:
        raise argparse.ArgumentTypeError(f"{text}: must be at most {_MOST_TOKENS_EVER}")
    return value
