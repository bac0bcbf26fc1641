"""Time to the first token of short prompts, alone and while long ones prefill, through the public API.

Short prompts come one after another, with pauses drawn at random so that they meet every part of a step. Under load a
long prompt is always in the works: the next one is sent when the last one is done. The longest step is the server's own
count, looked at again and again while a long prompt prefills alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from pellucid_benchmark.engines import Running
from pellucid_benchmark.processes import watching
from pellucid_benchmark.servers import PellucidServer
from pellucid_client import AsyncClient, PellucidError
from pellucid_loadtest.summaries import percentile

NAME = "ttft-under-load"
SHORT_TOKENS = 16
LONG_TOKENS = 1900
PROBES = 40
"""Short prompts in a round, and as many without load."""
LONGEST_PAUSE = 0.2
"""Seconds between two short prompts, at most."""
LOOK_SECONDS = 0.01
"""Between two looks at the server's counters, so that no two steps lie between them."""


@dataclass
class Times:
    """Seconds, of the rounds that were quiet or of all where none was."""

    idle: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    """Of a long prompt alone."""


def measure_under_load(
    engines: Sequence[Running], rounds: int, say: Callable[[str], None]
) -> dict[str, dict[str, float]]:
    """By engine: milliseconds of short prompts alone and under load, of steps, and the ratio of p99s that is left."""
    quiet: dict[str, list[Times]] = {}
    noisy: dict[str, list[Times]] = {}
    for number in range(rounds):
        for engine in engines:
            if engine.server is None:
                continue
            try:
                with watching([engine.server.pid, os.getpid()]) as load:
                    times = asyncio.run(one_round(engine.server, random.Random(number), PROBES))
            except PellucidError as error:
                say(f"{engine.label} {NAME}: {error}")
                continue
            (quiet if load.quiet else noisy).setdefault(engine.label, []).append(times)
            middle = 1000 * statistics.median(times.loaded)
            say(f"{number + 1:3d}  {NAME:15} {engine.label:24} {middle:9.1f} ms{load.remark}")
    return {label: summary_of(quiet.get(label) or noisy[label]) for label in {**quiet, **noisy}}


async def one_round(server: PellucidServer, draw: random.Random, probes: int) -> Times:
    """So many short prompts alone, then as many under load."""
    times = Times()
    async with AsyncClient(server.address) as client:
        vocab_size = (await client.model()).vocab_size

        def prompt(tokens: int) -> list[int]:
            return [draw.randrange(20, vocab_size) for _ in range(tokens)]

        async def ask(tokens: int) -> float:
            stream = client.generate(prompt(tokens), max_new_tokens=1, temperature=0, ignore_eos=True)
            began = time.perf_counter()
            seconds = [time.perf_counter() - began async for chunk in stream if chunk.token_ids]
            return seconds[0]

        async def long_ones() -> None:
            while True:
                await ask(LONG_TOKENS)

        await ask(SHORT_TOKENS)  # warm
        for _ in range(probes):
            times.idle.append(await ask(SHORT_TOKENS))
            await asyncio.sleep(draw.uniform(0, LONGEST_PAUSE))
        times.steps += await _steps_during(server, ask(LONG_TOKENS))
        load = asyncio.create_task(long_ones())
        try:
            for _ in range(probes):
                await asyncio.sleep(draw.uniform(0, LONGEST_PAUSE))
                times.loaded.append(await ask(SHORT_TOKENS))
        finally:
            load.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await load
    return times


async def _steps_during(server: PellucidServer, work: Coroutine[Any, Any, float]) -> list[float]:
    """Seconds of the server's steps until the work is done."""
    before, seconds = await asyncio.to_thread(server.counters), []
    task = asyncio.create_task(work)
    done = False
    while not done:
        done = task.done()
        after = await asyncio.to_thread(server.counters)
        steps = after.steps_since(before)
        if steps.count:
            seconds.append(steps.mean)
        before = after
        await asyncio.sleep(LOOK_SECONDS)
    await task
    return seconds


def summary_of(rounds: Sequence[Times]) -> dict[str, float]:
    """Of all rounds together; `loaded_to_allowed` holds the p99 under load against twice the idle one and a step."""
    idle = sorted(each for times in rounds for each in times.idle)
    loaded = sorted(each for times in rounds for each in times.loaded)
    longest = statistics.median(max(times.steps) for times in rounds)
    allowed = 2 * percentile(idle, 99) + longest
    return {
        "idle_median_ms": 1000 * statistics.median(idle),
        "idle_p99_ms": 1000 * percentile(idle, 99),
        "loaded_median_ms": 1000 * statistics.median(loaded),
        "loaded_p99_ms": 1000 * percentile(loaded, 99),
        "longest_step_ms": 1000 * longest,
        "loaded_to_allowed": percentile(loaded, 99) / allowed,
        "prompts": len(loaded),
    }
