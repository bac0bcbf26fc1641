"""How the next token is chosen: the specification, written to be read. Its fast twins are kernels/src/sampler.cpp and,
where that is not compiled, sampler_numpy.py.

In: one row of logits and its settings. Out: one token id. All of them give the same id for every input, so each
step below says exactly what is computed, in double precision with the C library's exp and log:

1. Ids >= vocab_size and banned ids are impossible, and so is a logit of -inf. A NaN or +inf among the ids below
   vocab_size (banned or not), or no possible id, makes the row non-finite: there is no answer.
2. Temperature 0: the possible id with the highest logit; the lowest id wins a tie. This is all.
3. z = (logit - highest logit) / temperature. The highest z is 0, so no temperature is too small.
4. Top-k keeps the first k ids in the order of (logit descending, id ascending). 0 keeps all.
5. Top-p weighs every id that is left with the integer floor(exp(z) * 2^40). Integers add up to the same sum in every
   order. It keeps the shortest beginning, in the order of step 4, whose sum reaches top_p * total. 1 keeps all.
6. Min-p keeps the ids with exp(z) >= min_p; exp(z) is the probability relative to the likeliest id. 0 keeps all.
7. The id with the highest z + noise is drawn; the lowest id wins a tie. Gumbel noise makes this a draw from the
   softmax of z over the ids that are left (Gumbel 1954; Maddison, Tarlow and Minka 2014, arXiv:1411.0030).

The noise of an id is a function of (seed, sequence index, output index, id) alone: Philox4x32-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC11) under the seed as its key. So a draw depends neither on the other
rows of a batch nor on what was drawn before, and a sequence that is computed again draws the same tokens again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from pellucid_server.engine.messages import Sampling

WEIGHT_SCALE = 2.0**40
"""Top-p's unit: a token 10^12 times less likely than the likeliest weighs nothing."""

_MASK = 0xFFFFFFFF


def sample_row(
    logits: Sequence[float],
    vocab_size: int,
    sampling: Sampling,
    banned: Collection[int],
    sequence_index: int,
    output_index: int,
) -> int | None:
    """The next token id, or None for a non-finite row.

    logits          [V], float32 values, V >= vocab_size
    banned          ids not to be chosen
    sequence_index  which output of its request this is, uint32
    output_index    how many tokens of the output came before, uint32
    """
    row = [float(x) for x in logits[:vocab_size]]
    if any(math.isnan(x) or x == math.inf for x in row):
        return None
    possible = [i for i, x in enumerate(row) if x > -math.inf and i not in banned]
    if not possible:
        return None
    ordered = sorted(possible, key=lambda i: (-row[i], i))
    highest = row[ordered[0]]
    if sampling.temperature == 0:
        return ordered[0]

    z = {i: (row[i] - highest) / sampling.temperature for i in ordered}
    kept = ordered[: sampling.top_k] if sampling.top_k > 0 else ordered
    if sampling.top_p < 1:
        kept = _nucleus(kept, [int(math.exp(z[i]) * WEIGHT_SCALE) for i in kept], sampling.top_p)
    if sampling.min_p > 0:
        kept = [i for i in kept if math.exp(z[i]) >= sampling.min_p]
    return max(kept, key=lambda i: (z[i] + gumbel_noise(sampling.seed, sequence_index, output_index, i), -i))


def _nucleus(ordered: list[int], weights: list[int], top_p: float) -> list[int]:
    wanted = top_p * float(sum(weights))
    reached = 0
    for count, weight in enumerate(weights, start=1):
        reached += weight
        if float(reached) >= wanted:
            return ordered[:count]
    return ordered


def gumbel_noise(seed: int, sequence_index: int, output_index: int, token_id: int) -> float:
    """Standard Gumbel noise of one token, in [-3.14, 22.88]."""
    word = philox((token_id, output_index, sequence_index, 0), (seed & _MASK, seed >> 32))[0]
    uniform = (word + 0.5) * 2.0**-32
    return -math.log(-math.log(uniform))


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four random 32-bit words for a counter and a key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _MASK, (product0 >> 32) ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3
