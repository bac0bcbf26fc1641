"""A module of the user's, tried in steps of several sequences before anything is served with it.

For modules that run as they are, in Python: what only lets one sequence pass is found at start. Whether numbers stay
the same in company is not tried, for no trial can promise it: where torch's operators take another path depends on the
number of rows, of keys and of threads.
"""

from __future__ import annotations

from pellucid_server.engine.messages import Sampling, Submit
from pellucid_server.engine.runner import ModelRunner
from pellucid_server.engine.scheduler import Scheduler
from pellucid_server.engine.sequence import Sampled
from pellucid_server.kv.blocks import BlockPool

SEQUENCES = 10
NEW_TOKENS = 2
_GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def try_company(runner: ModelRunner, pool: BlockPool, vocab_size: int, context_length: int, step_tokens: int) -> None:
    """Prefill sequences of all lengths up to the context's, side by side, then decode. Raises what the module does.

    step_tokens: most tokens of a step
    """
    room = min(context_length, pool.token_capacity // SEQUENCES) - NEW_TOKENS
    if room < 1:
        return
    lengths = [max(1, room * number // SEQUENCES) for number in range(1, SEQUENCES + 1)]
    scheduler = Scheduler(pool, SEQUENCES, max(SEQUENCES, step_tokens), prefix_cache=False)
    for key, length in enumerate(lengths):
        prompt = [(7 * i + 3 * key) % vocab_size for i in range(length)]
        scheduler.submit(Submit(key, prompt, _GREEDY, NEW_TOKENS, 0, [], [], length + NEW_TOKENS))
    while not scheduler.idle:
        step = scheduler.schedule(0.0)
        runner.run(step)
        scheduler.complete(step, [[Sampled(0)] for chunk in step.chunks if chunk.samples])
