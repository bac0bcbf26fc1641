"""`pellucid verify`: the command. 0: all is equal; 1: something differs; 2: it could not be tried."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pellucid_model.checkpoint_kind import companions
from pellucid_model.errors import ModelError
from pellucid_model.one_line_parser import OneLineParser
from pellucid_model.tokenizers import Tokenizer, TokenizerError, load_tokenizer
from pellucid_model.tokenizers.base import InvalidTextError, UnknownCharacterError

if TYPE_CHECKING:
    from pellucid_server.engine.loading import Loaded
    from pellucid_server.verify.checks import Difference, Outcome

LIMITS = {"float32": 1e-4, "bfloat16": 1e-1}
"""Largest difference that passes, relative to the prompt's largest |logit|. Rounding stays below a tenth of it in
float32, and below it in bfloat16, where large random weights make the most of it; trained ones some 1e-2."""
PROMPT_LENGTHS = (1, 6, 25)
"""Of the prompts that are tried where none is given."""


@dataclass(frozen=True)
class Wish:
    """The command line."""

    checkpoint: Path
    module: str
    reference: str
    prompts: list[str]
    tokens: list[list[int]]
    new_tokens: int
    dtype: str
    limit: float
    threads: int


def verify_command(argv: list[str]) -> int:
    """The entry point; argv without the words `pellucid verify`."""
    try:
        return _verify(_parse(argv))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 2
    except (ModelError, TokenizerError, InvalidTextError, UnknownCharacterError, ValueError) as error:
        print(f"pellucid verify: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _verify(wish: Wish) -> int:
    from pellucid_server.engine.loading import load
    from pellucid_server.engine.messages import Configure
    from pellucid_server.verify.checks import Verification
    from pellucid_server.verify.reference import make_reference

    tokenizer = load_tokenizer(companions(wish.checkpoint)) if wish.checkpoint.exists() else None
    loaded = load(
        Configure(
            checkpoint=str(wish.checkpoint),
            device="cpu",
            dtype=wish.dtype,
            kv_cache_memory=0,
            kv_block_size=0,
            max_context=0,
            max_running=2,
            max_step_tokens=4096,
            threads=wish.threads,
            tokenizer_size=0,
            log_level="warning",
            log_format="text",
            module=wish.module,
        )
    )
    prompts, ready = _prompts(wish, tokenizer, loaded), loaded.ready
    longest = min(max(map(len, prompts)) + wish.new_tokens, ready.context_length)
    reference = make_reference(wish.checkpoint, wish.module, wish.reference, longest)
    print(f"served   {ready.architecture} in {ready.dtype}, kernels {ready.kernels}")
    print(f"against  {reference.what}")
    verification = Verification(loaded, reference, wish.limit)
    outcomes: list[Outcome] = []
    said: set[str] = set()
    for number, prompt in enumerate(prompts, start=1):
        new = min(wish.new_tokens, ready.context_length - len(prompt))
        print(f"prompt {number} of {len(prompts)}: {len(prompt)} tokens, {new} more")
        for outcome in verification.prompt(prompt, new):
            outcomes.append(outcome)
            print(_line(outcome))
            if outcome.difference is not None:
                lines = [line for line in _report(outcome.difference, tokenizer, wish.limit) if line not in said]
                print("\n".join(lines or ["    as above"]))
                said.update(lines)
    return _sum(outcomes, wish.limit)


def _sum(outcomes: Sequence[Outcome], limit: float) -> int:
    positions, largest = sum(o.positions for o in outcomes), max(o.largest for o in outcomes)
    failed = [outcome for outcome in outcomes if outcome.difference is not None]
    if failed:
        print(f"DIFFERS in {len(failed)} of {len(outcomes)} phases, first in: {failed[0].phase.name}")
        return 1
    same = sum(o.same_top for o in outcomes)
    print(
        f"EQUAL: {positions} positions, largest difference {largest:.1e} of the largest |logit| (limit {limit:.0e}), "
        f"same likeliest token at {same}"
    )
    return 0


def _line(outcome: Outcome) -> str:
    verdict = "ok" if outcome.difference is None else "DIFFERS"
    return f"  {outcome.phase.name:<30} {outcome.positions:>5} positions   {outcome.largest:8.1e}   {verdict}"


def _report(difference: Difference, tokenizer: Tokenizer | None, limit: float) -> list[str]:
    def token(token_id: int) -> str:
        text = "" if tokenizer is None else f" {tokenizer.decode([token_id], keep_special_tokens=True)!r}"
        return f"{token_id}{text}"

    where = "nothing that has the same name in both differs; the difference could not be located"
    return [
        f"    first at position {difference.position}, token {token(difference.token)}: |difference| "
        f"{difference.largest:.3g}, {difference.relative:.1e} of the largest |logit| (limit {limit:.0e})",
        f"    likeliest next token: served {token(difference.served_top)}, reference {token(difference.own_top)}",
        f"    {where if difference.parting is None else difference.parting.text()}",
    ]


def _prompts(wish: Wish, tokenizer: Tokenizer | None, loaded: Loaded) -> list[list[int]]:
    vocab_size, context = loaded.ready.vocab_size, loaded.ready.context_length
    if wish.prompts and tokenizer is None:
        raise ModelError(f"--prompt: {wish.checkpoint} has no tokenizer; give --tokens 1,2,3")
    given = [tokenizer.encode(text) for text in wish.prompts] if tokenizer is not None else []
    prompts = [*given, *wish.tokens]
    if not prompts:
        lengths = sorted({max(1, min(length, context // 2)) for length in PROMPT_LENGTHS})
        prompts = [[(7 * i + 3 * length) % vocab_size for i in range(length)] for length in lengths]
    for prompt in prompts:
        if not prompt or len(prompt) >= context:
            raise ModelError(f"a prompt comes to {len(prompt)} tokens; accepted: 1 to {context - 1}")
        bad = [token for token in prompt if not 0 <= token < vocab_size]
        if bad:
            raise ModelError(f"--tokens: {bad[0]} is no token; accepted: 0 to {vocab_size - 1}")
    return prompts


def _parse(argv: Sequence[str]) -> Wish:
    parser = OneLineParser(
        prog="pellucid verify",
        usage="pellucid verify [FILE.py:CLASS] CHECKPOINT [options]",
        description="Proves that what is served equals the model's own forward, position by position.",
    )
    parser.add_argument("what", nargs="+", help="a checkpoint, and before it your module as for `pellucid serve`")
    parser.add_argument("--module", default="", metavar="FILE.py:CLASS", help="the same as a word before CHECKPOINT")
    parser.add_argument(
        "--reference",
        default="",
        metavar="FILE.py:NAME",
        help="a class, or a function from tokens [1, n] to logits [1, n, V]; or transformers "
        "(default: the adopted module's own forward, or the served module over textbook attention in float64)",
    )
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument(
        "--tokens", action="append", default=[], type=_ids, metavar="1,2,3", help="a prompt of token ids"
    )
    parser.add_argument("--new-tokens", type=_count, default=24, metavar="N", help="tokens to decode (default: 24)")
    parser.add_argument("--dtype", choices=tuple(LIMITS), default="float32", help="(default: float32)")
    defaults = ", ".join(f"{limit:g} in {dtype}" for dtype, limit in LIMITS.items())
    parser.add_argument(
        "--limit", type=float, help=f"largest difference, relative to the largest |logit| (default: {defaults})"
    )
    parser.add_argument("--threads", type=_count, default=0, metavar="N", help="(default: all cores)")
    given = parser.parse_args(argv)
    if len(given.what) > 2 or (len(given.what) == 2 and given.module):
        parser.error(f"{' '.join(given.what)}: give one checkpoint, and at most one module before it")
    module = given.module or (given.what[0] if len(given.what) == 2 else "")
    limit = LIMITS[given.dtype] if given.limit is None else given.limit
    checkpoint = Path(given.what[-1]).expanduser()
    return Wish(
        checkpoint,
        module,
        given.reference,
        given.prompt,
        given.tokens,
        given.new_tokens,
        given.dtype,
        limit,
        given.threads,
    )


def _ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value
