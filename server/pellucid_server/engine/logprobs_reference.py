"""What a token's log-probability is: the specification. logprobs.py computes it fast.

The distribution is the model's own, over the ids below vocab_size: the softmax of the logits as they came out of the
model, before biases, penalties, temperature and filters. So a token that was chosen under a filter may have a low rank,
and the values do not depend on the request's settings.

logprob = logit - highest logit - log of the sum of exp(logit - highest logit), in double precision. All values are
finite: below the lowest float32, and for a logit of -inf, it is the lowest float32.
Ranks count from 1 in the order of (logit descending, id ascending). An id from vocab_size on, which is padding, has the
lowest logprob and rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pellucid_server.engine.messages import LogprobWish, TokenLogprob
from pellucid_server.engine.sampler_reference import FLOAT32_MAX

LOWEST = -FLOAT32_MAX


def token_logprob(logits: Sequence[float], vocab_size: int, token: int, wish: LogprobWish) -> TokenLogprob | None:
    """One token's place in the distribution; None where a logit is NaN or +inf, or all are -inf.

    logits  [V], float32 values, V >= vocab_size

    Alternatives are the wish's top_count likeliest ids, fewer where the others have a logit of -inf, then those of its
    token_ids that are not among them.
    """
    row = [float(x) for x in logits[:vocab_size]]
    if any(math.isnan(x) or x == math.inf for x in row) or max(row) == -math.inf:
        return None
    log_sum = math.log(math.fsum(math.exp(x - max(row)) for x in row))
    order = sorted(range(vocab_size), key=lambda i: (-row[i], i))

    def entry(i: int) -> tuple[int, float, int]:
        if i >= vocab_size:
            return i, LOWEST, 0
        return i, max(LOWEST, row[i] - max(row) - log_sum), order.index(i) + 1

    likeliest = [i for i in order[: wish.top_count] if row[i] > -math.inf]
    asked = [i for i in dict.fromkeys(wish.token_ids) if i not in likeliest]
    return TokenLogprob(*entry(token), tuple(entry(i) for i in likeliest + asked))
