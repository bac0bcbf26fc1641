"""How long steps take as batch, context and model grow, by the server's own count of its steps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from pellucid_benchmark.random_models import SHAPES
from pellucid_benchmark.servers import PellucidServer
from pellucid_client import AsyncClient
from pellucid_client._options import GenerateOptions

STEPS = 32
"""Decode steps that are looked at."""
PROMPT_PHASES = ("prefill", "mixed")
ENDLESS = 10_000
"""Tokens of a stream that is cancelled when enough was seen."""


BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (100, 400, 900, 1900, 4000)
BASE = "135M"
"""Whose batch and context grow."""
BATCH_CONTEXT = 200
MODEL_BATCHES = (1, 8, 32)
MODEL_PROMPT = 400


@dataclass(frozen=True)
class Point:
    """A step of this kind: of `batch` sequences that hold `context` tokens each, or a prompt of `context` tokens."""

    kind: Literal["decode", "prefill"]
    model: str
    batch: int
    context: int


def points(models: Sequence[str]) -> list[Point]:
    """All that is measured, each once."""
    found = [Point("decode", BASE, batch, BATCH_CONTEXT) for batch in BATCHES]
    found += [Point("decode", BASE, batch, context) for batch in (1, 8) for context in CONTEXTS]
    found += [Point("prefill", BASE, 1, context) for context in CONTEXTS]
    found += [Point("decode", model, batch, BATCH_CONTEXT) for model in SHAPES for batch in MODEL_BATCHES]
    found += [Point("prefill", model, 1, MODEL_PROMPT) for model in SHAPES]
    return list(dict.fromkeys(point for point in found if point.model in models))


async def step_seconds(server: PellucidServer, point: Point, draw: random.Random) -> float:
    """Seconds of one decode step, or of all steps of a prompt."""
    async with AsyncClient(server.address) as client:
        vocab_size = (await client.model()).vocab_size
        prompts = [[draw.randrange(20, vocab_size) for _ in range(point.context)] for _ in range(point.batch)]
        if point.kind == "decode":
            return await _decode(server, client, prompts)
        before = await asyncio.to_thread(server.counters)
        await asyncio.gather(*(_read(client, prompt, 1, lambda _: None) for prompt in prompts))
        after = await asyncio.to_thread(server.counters)
        return after.steps_since(before, PROMPT_PHASES).seconds


async def _decode(server: PellucidServer, client: AsyncClient, prompts: Sequence[Sequence[int]]) -> float:
    """All streams start, and are cancelled after some steps in which every one of them decoded."""
    arrived = [0] * len(prompts)
    changed = asyncio.Event()

    def count(place: int, tokens: int) -> None:
        arrived[place] += tokens
        changed.set()

    async def until_all_have(tokens: int) -> None:
        while min(arrived) < tokens:
            changed.clear()
            await changed.wait()

    async with asyncio.TaskGroup() as group:
        readers = [
            group.create_task(_read(client, prompt, ENDLESS, partial(count, place)))
            for place, prompt in enumerate(prompts)
        ]
        await until_all_have(1)
        before = await asyncio.to_thread(server.counters)
        await until_all_have(min(arrived) + STEPS)
        after = await asyncio.to_thread(server.counters)
        for reader in readers:
            reader.cancel()
    return after.steps_since(before, ["decode"]).mean


async def _read(client: AsyncClient, prompt: Sequence[int], new: int, arrived: Callable[[int], None]) -> None:
    options: GenerateOptions = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True, "context": "roll"}
    async for chunk in client.generate(prompt, **options):
        arrived(len(chunk.token_ids))
