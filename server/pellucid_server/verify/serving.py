"""One sequence through the engine's own parts, as a server would run it, with the logits of every position.

In: tokens, all known; how many of them are the prompt; a window; the size of prefill chunks. Out: logits by token. The
sampler is left out: the next token is the one that is given, or the likeliest where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pellucid_server.engine.loading import Loaded
from pellucid_server.engine.messages import LogprobWish, Sampling, Submit
from pellucid_server.engine.runner import ModelRunner
from pellucid_server.engine.scheduler import Scheduler
from pellucid_server.engine.sequence import Chunk, Sampled
from pellucid_server.kv.window import FULL, ContextWindow

_GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
_LONG = 2**31 - 1


@dataclass
class ServedRun:
    """What came out of one run."""

    tokens: list[int]
    """All of them, those that were generated included."""
    logits: dict[int, Tensor] = field(default_factory=dict)
    """By the token they stand behind: [V] float32."""


def serve_sequence(
    loaded: Loaded,
    prompt: list[int],
    new_tokens: int,
    *,
    forced: list[int] | None = None,
    context: ContextWindow = FULL,
    chunk: int = 512,
    runner: ModelRunner | None = None,
) -> ServedRun:
    """Prefill the prompt, then decode `new_tokens` tokens: those of `forced`, or the likeliest."""
    scheduler = Scheduler(loaded.pool, 1, chunk, loaded.ready.native_window, prefix_cache=False)
    scheduler.submit(
        Submit(
            key=0,
            prompt=prompt,
            sampling=_GREEDY,
            max_new_tokens=new_tokens,
            min_new_tokens=0,
            eos_ids=[],
            stop_ids=[],
            max_length=_LONG if context.span else len(prompt) + new_tokens,
            context=context,
            prompt_logprobs=LogprobWish(),
        )
    )
    run = ServedRun(list(prompt))

    def keep(chunk: Chunk, first_foretold: int, rows: Tensor) -> None:
        run.logits.update(enumerate(rows.clone(), start=first_foretold - 1))

    while not scheduler.idle:
        step = scheduler.schedule(0.0)
        rows = (runner or loaded.runner).run(step, keep).cpu()
        sampled = []
        for row in rows:
            run.logits[len(run.tokens) - 1] = row.clone()
            made = len(run.tokens) - len(prompt)
            run.tokens.append(int(torch.nan_to_num(row).argmax()) if forced is None else forced[made])
            sampled.append([Sampled(run.tokens[-1])])
        scheduler.complete(step, sampled)
    return run
