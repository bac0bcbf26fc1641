"""Random requests in a crowd, each compared with the same request alone. `make soak`; a short run is in the tests.

    python -m pellucid_testing.soak [--requests 20000] [--seed 0] [--kills 8] [--speculative-tokens 5]

Two servers serve one tiny model. The crowd's has a KV pool far too small for what runs at once, small steps, a prefix
cache and drafts; its engine is killed some times. The lone one runs one request at a time, reuses and guesses nothing.
Every request that ends by itself must be the same there to the last bit: tokens, text, finish, log-probabilities. One
that is cancelled, or runs into its deadline, must have got a beginning of it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pellucid_client import AsyncClient
from pellucid_client.errors import Cancelled, DeadlineExceeded, Overloaded, PellucidError, Unavailable
from pellucid_client.results import Completion, Output
from pellucid_testing.checkpoints import CHARACTERS, tiny_checkpoint, tiny_config
from pellucid_testing.server import ServerProcess, serve

CONFIG = tiny_config(context_length=96)
V = CONFIG.vocab_size
CROWD = (
    *("--max-running", "24", "--max-queue", "200", "--max-step-tokens", "48"),
    *("--kv-block-size", "4", "--kv-cache-memory", "120KiB", "--dtype", "float32"),
)
LONE = ("--max-running", "8", "--kv-block-size", "16", "--dtype", "float32", "--prefix-cache", "off")
STREAMS = 48
"""Requests in flight at once."""
FLAT = 1.10
"""How much more memory the crowd's server may hold at the end than after its first fifth."""

Fate = Literal["whole", "cancelled", "deadline"]
FATES: tuple[Fate, ...] = ("whole", "cancelled", "deadline")


@dataclass(frozen=True)
class Case:
    """One request, and what happens to it on the way."""

    number: int
    prompt: str | list[int]
    options: dict[str, Any]
    fate: Fate
    cancel_after: int
    """Messages."""

    @property
    def name(self) -> str:
        return f"case {self.number}: {self.prompt!r} {self.options} {self.fate}"


@dataclass
class Tally:
    """What came of a run."""

    ended: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)
    preemptions: float = 0
    cached_tokens: float = 0
    drafted_tokens: float = 0
    accepted_tokens: float = 0
    kills: int = 0
    restarts: float = 0


def draw_case(number: int, seed: int) -> Case:
    """The same case for the same number and seed. About a quarter of all cases share the others' prompts."""
    draw = random.Random(f"{seed} {number}")
    family = random.Random(f"{seed} {draw.randrange(40)}")
    common = "".join(family.choices(CHARACTERS, k=family.randrange(60)))
    text = common[: draw.randrange(len(common) + 1)] + "".join(draw.choices(CHARACTERS, k=draw.randrange(1, 30)))
    prompt: str | list[int] = text if draw.random() < 0.7 else [draw.randrange(4, V) for _ in range(len(text))]
    fate = draw.choices(FATES, [0.8, 0.12, 0.08])[0]
    options = {**_sampling(draw), **_stopping(draw), **_context(draw), **_output(draw), **_cache(draw)}
    if draw.random() < 0.08:
        options |= draw.choice(
            [{"regex": "[a-m]{3,12}"}, {"choices": ["abc", "abd", "xyz!"]}, {"regex": "(天|地|玄)+"}]
        )
    if draw.random() < 0.1:
        options["n"] = draw.randrange(2, 5)
    if draw.random() < 0.2:
        options["priority"] = draw.randrange(-3, 4)
    if fate == "deadline":
        options["timeout"] = 10 ** draw.uniform(-4, -0.5)  # whatever the speed of the machine, too short for some
    return Case(number, prompt, options, fate, draw.randrange(1, 6))


def _sampling(draw: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"seed": draw.randrange(2**64), "temperature": draw.choice([0, 0.3, 0.8, 1, 2.5])}
    choices: dict[str, Callable[[], Any]] = {
        "top_k": lambda: draw.randrange(0, 70),
        "top_p": lambda: draw.uniform(0.05, 1),
        "min_p": lambda: draw.uniform(0, 0.5),
        "typical_p": lambda: draw.uniform(0.1, 1),
        "repetition_penalty": lambda: draw.uniform(0.7, 1.6),
        "presence_penalty": lambda: draw.uniform(-1, 1.5),
        "frequency_penalty": lambda: draw.uniform(-0.5, 1),
        "logit_bias": lambda: {draw.randrange(4, V): draw.uniform(-8, 8) for _ in range(draw.randrange(1, 5))},
        "allowed_token_ids": lambda: draw.sample(range(4, V), draw.randrange(5, 40)),
    }
    return options | {name: make() for name, make in choices.items() if draw.random() < 0.15}


def _stopping(draw: random.Random) -> dict[str, Any]:
    new = draw.choice([0, 1, 2, *range(3, 40)])
    options: dict[str, Any] = {"max_new_tokens": new, "ignore_eos": draw.random() < 0.3}
    if draw.random() < 0.2:
        options["min_new_tokens"] = draw.randrange(new + 1)
    if draw.random() < 0.2:
        options["stop"] = [
            "".join(draw.choices(CHARACTERS, k=draw.randrange(1, 3))) for _ in range(draw.randrange(1, 4))
        ]
        options["include_stop_in_text"] = draw.random() < 0.5
    if draw.random() < 0.1:
        options["stop_token_ids"] = [draw.randrange(4, V) for _ in range(3)]
    return options


def _context(draw: random.Random) -> dict[str, Any]:
    kind = draw.choices(["auto", "truncate", "roll", "reencode"], [4, 1, 2, 2])[0]
    options: dict[str, Any] = {"context": kind}
    if kind in ("roll", "reencode") and draw.random() < 0.7:
        options |= {"sink_tokens": draw.randrange(0, 6), "window_tokens": draw.randrange(4, 40)}
        if kind == "reencode":
            options["hop_tokens"] = draw.randrange(1, options["window_tokens"] + 1)
    return options


def _output(draw: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if draw.random() < 0.15:
        options["logprobs"] = draw.randrange(0, 5)
    if draw.random() < 0.1:
        options["prompt_logprobs"] = draw.randrange(0, 3)
    if draw.random() < 0.1:
        options["delivery"] = "final"
    if draw.random() < 0.1:
        options["min_tokens_per_message"] = draw.randrange(1, 9)
    return options


def _cache(draw: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if draw.random() < 0.1:
        options["bypass_cache_read"] = True
    if draw.random() < 0.1:
        options["bypass_cache_write"] = True
    if draw.random() < 0.1:
        options["cache_salt"] = draw.choice(["a", "b"])
    return options


async def soak(
    requests: int, seed: int, kills: int, say: Callable[[str], None] = lambda text: None, draft_tokens: int = 5
) -> Tally:
    """Run the cases 0 to requests - 1; differences are in the tally. Raises AssertionError where something is lost."""
    tally = Tally()
    crowd_options = (*CROWD, "--speculative-tokens", str(draft_tokens))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tiny_checkpoint(Path(folder) / "tiny", CONFIG)
        with serve(checkpoint, *crowd_options) as crowd, serve(checkpoint, *LONE) as alone:
            await _run(crowd, alone, requests, seed, kills, tally, say)
            _check_rest(crowd)
            tally.preemptions = crowd.metric("pellucid_preemptions_total")
            tally.cached_tokens = crowd.metric("pellucid_prefix_cache_hit_tokens_total")
            tally.drafted_tokens = crowd.metric("pellucid_drafted_tokens_total")
            tally.accepted_tokens = crowd.metric("pellucid_accepted_tokens_total")
            tally.restarts = crowd.metric("pellucid_engine_restarts_total")
    return tally


async def _run(
    crowd: ServerProcess,
    alone: ServerProcess,
    requests: int,
    seed: int,
    kills: int,
    tally: Tally,
    say: Callable[[str], None],
) -> None:
    kill_at = {requests * (index + 1) // (kills + 1) for index in range(kills)}
    lone_turn = asyncio.Lock()
    numbers = iter(range(requests))
    async with AsyncClient(crowd.address) as together, AsyncClient(alone.address) as single:

        async def worker() -> None:
            for number in numbers:
                if number in kill_at:
                    await _kill_engine(crowd)
                    tally.kills += 1
                if number % max(1, requests // 5) == 0 and number:
                    await together.wait_until_ready(60)  # else there may be no engine to count
                    tally.resident.append(_resident(crowd))
                    say(f"{number} of {requests}, {len(tally.differences)} differences, {tally.resident[-1]:.0f} MiB")
                case = draw_case(number, seed)
                ended, got = await _in_company(together, case)
                tally.ended[ended] += 1
                if got is not None:
                    async with lone_turn:
                        expected = await _alone(single, case)
                    tally.differences += _compare(case, ended == "whole", got, expected)

        await asyncio.gather(*(worker() for _ in range(STREAMS)))
        tally.resident.append(_resident(crowd))


async def _kill_engine(server: ServerProcess) -> None:
    """Waits for it where the last one is not back yet."""
    while not (children := _children(server.process.pid)):  # noqa: ASYNC110 - a process has no event to await
        await asyncio.sleep(0.02)
    os.kill(children[0], signal.SIGKILL)


async def _in_company(client: AsyncClient, case: Case) -> tuple[str, Completion | list[Output] | None]:
    """How it ended and what came: everything, or what had come until it was cut off."""
    while True:
        stream = client.generate(case.prompt, **case.options)
        messages = 0
        try:
            async for _ in stream:
                messages += 1
                if case.fate == "cancelled" and messages == case.cancel_after:
                    stream.cancel()
                    return "cancelled", list(stream.outputs)
            return "whole", await stream.result()
        except Cancelled:
            return "cancelled", list(stream.outputs)
        except DeadlineExceeded:
            return "deadline", list(stream.outputs)
        except (Overloaded, Unavailable):  # full, or its engine is being restarted
            await asyncio.sleep(0.05)
        except PellucidError as error:
            raise AssertionError(f"{case.name}: {error!r}") from error


async def _alone(client: AsyncClient, case: Case) -> Completion:
    options = {name: value for name, value in case.options.items() if name not in ("timeout", "priority")}
    return await client.generate(case.prompt, **options).result()


def _compare(case: Case, whole: bool, got: Completion | list[Output], expected: Completion) -> list[str]:
    """What differs, one line each."""
    if isinstance(got, Completion):
        pairs: list[tuple[str, object, object]] = [
            ("outputs", got.outputs, expected.outputs),
            ("prompt logprobs", got.prompt.logprobs, expected.prompt.logprobs),
            ("dropped tokens", got.prompt.dropped_token_count, expected.prompt.dropped_token_count),
            ("output count", got.usage.output_token_count, expected.usage.output_token_count),
        ]
        return [f"{case.name}: {name} {a!r}, alone {b!r}" for name, a, b in pairs if a != b]
    if len(got) < len(expected.outputs):
        return []  # which of them have begun is not told apart
    differences = []
    for index, (part, full) in enumerate(zip(got, expected.outputs, strict=True)):
        begins = full.token_ids[: len(part.token_ids)] == part.token_ids and full.text.startswith(part.text)
        if not begins:
            differences.append(f"{case.name}: sequence {index} began {part!r}, alone {full!r}")
    return differences


def _check_rest(server: ServerProcess) -> None:
    """Nothing runs, waits or is held any more, and every block is accounted for."""
    server.wait_for_metric("pellucid_requests_running", 0)
    server.wait_for_metric("pellucid_requests_waiting", 0)
    server.wait_for_metric("pellucid_kv_cache_blocks", 0, state="used")
    total = server.metric("pellucid_kv_cache_blocks_limit")
    held = server.metric("pellucid_kv_cache_blocks")
    if held != total:
        raise AssertionError(f"{held} blocks are free, cached or used, but {total} exist")


def _resident(server: ServerProcess) -> float:
    """MiB of frontend and engine."""
    total = 0
    for pid in (server.process.pid, *_children(server.process.pid)):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                total += int(line.split()[1])
    return total / 1024


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def verdict(tally: Tally, draft_tokens: int = 5) -> list[str]:
    """What is wrong; empty where all is well."""
    wrong = list(tally.differences[:10])
    shown = {"preemption": tally.preemptions, "cached token": tally.cached_tokens}
    if draft_tokens:
        shown["draft that came true"] = tally.accepted_tokens
    for name, count in shown.items():
        if not count:
            wrong.append(f"there was no {name}: the run has not shown what it should")
    if tally.restarts < tally.kills:
        wrong.append(f"the engine was killed {tally.kills} times, but restarted only {tally.restarts:.0f} times")
    if len(tally.resident) > 2 and tally.resident[-1] > FLAT * tally.resident[0]:
        wrong.append(f"memory grew from {tally.resident[0]:.0f} to {tally.resident[-1]:.0f} MiB")
    return wrong


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="soak", description="Random requests in a crowd, compared with lone runs.")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=8, help="how often the engine is killed (default 8)")
    parser.add_argument("--speculative-tokens", type=int, default=5, help="drafts of the crowd's server (default 5)")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    drafts = options.speculative_tokens
    run = soak(options.requests, options.seed, options.kills, lambda text: print(text, flush=True), drafts)
    tally = asyncio.run(run)
    counts = {
        **tally.ended,
        "preemptions": int(tally.preemptions),
        "tokens from the cache": int(tally.cached_tokens),
        "drafted tokens": int(tally.drafted_tokens),
        "accepted tokens": int(tally.accepted_tokens),
        "engine restarts": int(tally.restarts),
    }
    print(f"{options.requests} requests in {time.monotonic() - began:.0f} s")
    print("\n".join(f"{count:10} {name}" for name, count in counts.items()))
    print("MiB of memory on the way:", ", ".join(f"{each:.0f}" for each in tally.resident))
    for line in (wrong := verdict(tally, drafts)):
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
