"""How fast a shape decodes and prefills on the device, and what memory it takes.

The engine's steps are timed, with scheduling and sampling, without the way through gRPC.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pellucid_benchmark.gpu.clock import now
from pellucid_benchmark.gpu.shapes import SHAPES, weight_count
from pellucid_benchmark.gpu.stack import Stack, prompt_of, random_decoder, request, stack
from pellucid_server.engine.scheduler import Scheduler
from pellucid_server.engine.varlen import BLOCK_SIZE

GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    streams: tuple[int, ...] = (1, 8, 32, 128)
    prompt: int = 128
    """Tokens before decoding."""
    steps: int = 64
    prefills: tuple[int, ...] = (512, 1900)


QUICK = Plan(streams=(1, 4), prompt=8, steps=4, prefills=(24,))


def measure_speed(name: str, device: torch.device, plan: Plan, *, graphs: bool) -> Iterator[dict[str, Any]]:
    """One finding after the other, so that what was found is kept when time is up."""
    config, dtype = SHAPES[name], torch.bfloat16 if device.type == "cuda" else torch.float32
    most = max(plan.streams)
    decoded = plan.prompt + plan.steps
    length = 1 + max(decoded, *plan.prefills)
    cache_tokens = max(most * -(-decoded // BLOCK_SIZE) * BLOCK_SIZE, length)
    model = random_decoder(config, device, dtype)
    weights = _allocated(device)
    made = stack(
        model,
        device,
        dtype,
        graphs=graphs,
        most_rows=most,
        sequence_length=length,
        cache_tokens=cache_tokens,
    )
    yield {"weights_gib": weights / GIB, "notices": made.notices}
    heads = config.layers * config.kv_heads * config.head_dim
    for streams in plan.streams:
        step = _decode_step(made, device, streams, plan)
        read = dtype.itemsize * (weight_count(config) + 2 * heads * streams * (plan.prompt + plan.steps // 2))
        yield {
            "streams": streams,
            "step_ms": 1000 * step,
            "tokens_s": streams / step,
            "read_gb_s": read / step / 1e9,
        }
    for tokens in plan.prefills:
        yield {"prefill": tokens, "tokens_s": tokens / _prefill(made, device, tokens)}
    yield {"all_gib": _allocated(device) / GIB, "peak_gib": _peak(device) / GIB}


def _decode_step(made: Stack, device: torch.device, streams: int, plan: Plan) -> float:
    """Median seconds of steps in which all streams decode."""
    scheduler = made.scheduler(step_tokens=2048)
    for key in range(streams):
        scheduler.submit(request(key, prompt_of(plan.prompt, key, made.vocab_size), plan.steps))
    seconds = []
    while not scheduler.idle:
        began = now(device)
        tokens = _step(made, scheduler)
        if tokens == streams and len(scheduler.running) == streams:
            seconds.append(now(device) - began)
    return statistics.median(seconds[1:])


def _prefill(made: Stack, device: torch.device, tokens: int) -> float:
    """Seconds to the first token of a prompt, in steps of at most 2048 tokens; the median of three after one."""
    seconds = []
    for key in range(4):
        scheduler = made.scheduler(step_tokens=2048)
        began = now(device)
        scheduler.submit(request(0, prompt_of(tokens, key, made.vocab_size), 1))
        while not scheduler.idle:
            _step(made, scheduler)
        seconds.append(now(device) - began)
    return statistics.median(seconds[1:])


def _step(made: Stack, scheduler: Scheduler) -> int:
    """-> tokens that it computed"""
    step = scheduler.schedule(0.0)
    outcome = made.executor.execute(step)
    scheduler.complete(step, outcome.sampled, outcome.scores)
    return step.tokens


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
