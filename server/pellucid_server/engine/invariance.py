"""Whether a module's tokens are the same alone and in company: known of our own decoder, tried out on others.

Our operators are invariant by construction, and they replace a module's standard layers. What else a module computes,
in torch's own functions, may not be: some of them take another path for another number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid_server.engine.messages import Sampling, Submit
from pellucid_server.engine.runner import ModelRunner
from pellucid_server.engine.scheduler import Scheduler
from pellucid_server.engine.sequence import Sampled
from pellucid_server.kv.blocks import BlockPool

NEW_TOKENS = 4
MATES = 9
"""Enough rows to leave the small cases that torch's operators treat apart."""
_GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def seems_invariant(runner: ModelRunner, pool: BlockPool, vocab_size: int, context_length: int) -> bool:
    """Compare one sequence's logits alone with those beside others, and in one piece with those in small ones."""
    room = min(context_length, pool.token_capacity // (MATES + 1)) - NEW_TOKENS
    if room < 2:
        return False
    lengths = [2 + (room - 2) * key // MATES for key in range(MATES + 1)]
    prompts = [[(7 * i + 3 * key) % vocab_size for i in range(length)] for key, length in enumerate(lengths)]
    alone = _logits(runner, pool, prompts[-1:], step_tokens=sum(map(len, prompts)))
    ways = ((prompts, sum(map(len, prompts))), (prompts, MATES + 2), (prompts[-1:], 3))
    return all(torch.equal(alone, _logits(runner, pool, crowd, tokens)) for crowd, tokens in ways)


def _logits(runner: ModelRunner, pool: BlockPool, prompts: list[list[int]], step_tokens: int) -> Tensor:
    """Logits [NEW_TOKENS, V] of the last sequence, all of them generating the same arbitrary tokens."""
    budget = max(step_tokens, len(prompts))
    scheduler = Scheduler(pool, max_running=len(prompts), max_step_tokens=budget, prefix_cache=False)
    for key, prompt in enumerate(prompts):
        length = len(prompt) + NEW_TOKENS
        scheduler.submit(Submit(key, prompt, _GREEDY, NEW_TOKENS, 0, [], [], length))
    rows = []
    while not scheduler.idle:
        step = scheduler.schedule(0.0)
        logits = runner.run(step)
        sampling = [chunk.sequence.request.key for chunk in step.chunks if chunk.samples]
        rows += [row for key, row in zip(sampling, logits, strict=True) if key == len(prompts) - 1]
        scheduler.complete(step, [[Sampled(0)]] * len(sampling))
    return torch.stack(rows)
