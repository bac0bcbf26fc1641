"""What --speculative-tokens brings: speed with and without, on text that repeats itself and on text that does not.

usage: speculation.py [CHECKPOINT] [--speculative-tokens 8] [--streams 1 8] [--rounds 5] [--tokens 128] [--extra …]

Two servers of the same folder (default: the bundled demo) take turns at the same requests; only one works at a time.
Printed are the medians over all rounds and of the rounds' own ratios. Ends with 1 where any output differs.

    copy      a passage that the prompt holds three times has begun once more, and goes on greedily
    plain     a story is to be told, drawn at temperature 0.8 with a fixed seed
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pellucid_client import AsyncClient
from pellucid_loadtest.own_server import StartError, leave_in_order_on_sigterm, own_server

PASSAGE = """\
Panel {n} of the ship's log, as it was found in the drawer below the chart table:
    Monday. Wind from the north-west, force {n}. Two sails torn, one mended before dark.
    Tuesday. Fog until noon. The cook has found a third barrel of apples, and nobody asks where it was.
    Wednesday. Calm. Read to the crew from the second book; they want to hear the first one again.
    Thursday. Passed the island with the white tower at a distance of {n} miles.

"""
STORY = "The keeper of lighthouse number {n} had not seen a ship for weeks. One evening, when the fog came in,"


@dataclass(frozen=True)
class Load:
    """What both servers are asked in a round."""

    text: str
    streams: int
    tokens: int

    def options(self, index: int) -> dict[str, Any]:
        """One stream's request."""
        common = {"max_new_tokens": self.tokens, "ignore_eos": True, "context": "truncate"}
        if self.text == "copy":
            passage = PASSAGE.format(n=index)
            return {"prompt": passage * 3 + passage.splitlines(keepends=True)[0], "temperature": 0, **common}
        return {"prompt": STORY.format(n=index), "temperature": 0.8, "seed": index, **common}


@dataclass(frozen=True)
class Outcome:
    """Of one load, round by round."""

    off: list[float]
    """Tokens per second."""
    on: list[float]
    same: bool

    @property
    def line(self) -> str:
        ratios = [on / off for off, on in zip(self.off, self.on, strict=True)]
        return (
            f"{statistics.median(self.off):8.0f} {statistics.median(self.on):8.0f} tokens/s, ratio "
            f"{statistics.median(ratios):.2f}, of the rounds {min(ratios):.2f} to {max(ratios):.2f}"
            + ("" if self.same else "  OUTPUTS DIFFER")
        )


def main(arguments: Sequence[str]) -> int:
    leave_in_order_on_sigterm()
    options = _options(arguments)
    loads = [Load(text, streams, options.tokens) for text in ("copy", "plain") for streams in options.streams]
    serve = [*([str(options.checkpoint)] if options.checkpoint else []), "--prefix-cache", "off", *options.extra]
    draft = ["--speculative-tokens", str(options.speculative_tokens)]
    try:
        with own_server(serve) as off, own_server([*serve, *draft]) as on:
            outcomes = asyncio.run(_measure(off.address, on.address, loads, options.rounds))
    except StartError as error:
        sys.exit(f"speculation.py: the server did not start: {error}")
    print(f"off and --speculative-tokens {options.speculative_tokens}, medians of {options.rounds} rounds:")
    for load, outcome in zip(loads, outcomes, strict=True):
        print(f"{load.text:8}{load.streams:3} streams {outcome.line}")
    return 0 if all(outcome.same for outcome in outcomes) else 1


async def _measure(off: str, on: str, loads: Sequence[Load], rounds: int) -> list[Outcome]:
    """Every round all loads, every load both servers, in turn the one and the other first; one round is thrown away."""
    outcomes = [Outcome([], [], True) for _ in loads]
    async with AsyncClient(off) as without, AsyncClient(on) as with_drafts:
        for number in range(-1, rounds):
            for place, load in enumerate(loads):
                pair = {False: without, True: with_drafts}
                order = (False, True) if number % 2 else (True, False)
                results = {drafts: await _run(pair[drafts], load) for drafts in order}
                same = outcomes[place].same and results[False][1] == results[True][1]
                if number >= 0:
                    before = outcomes[place]
                    rates = [*before.off, results[False][0]], [*before.on, results[True][0]]
                    outcomes[place] = Outcome(*rates, same)
    return outcomes


async def _run(client: AsyncClient, load: Load) -> tuple[float, list[list[int]]]:
    """Tokens per second of all streams together, and their tokens."""
    began = time.perf_counter()
    streams = [client.generate(**load.options(index)).result() for index in range(load.streams)]
    results = await asyncio.gather(*streams)
    tokens = [list(result.token_ids) for result in results]
    return sum(map(len, tokens)) / (time.perf_counter() - began), tokens


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="speculation.py", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "checkpoint", nargs="?", help="a folder that `pellucid serve` serves; default: the bundled demo"
    )
    parser.add_argument("--speculative-tokens", type=int, default=8)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each stream")
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="further arguments of both servers")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
