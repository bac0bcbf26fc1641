"""How the next token is chosen: the specification, written to be read. Its fast twins are kernels/src/sampler.cpp and,
where that is not compiled, sampler_numpy.py.

In: one row of logits, its settings and its sequence so far. Out: one token id. All of them give the same id for every
input, so each step below says exactly what is computed, in double precision with the C library's exp and log:

 1. A NaN or +inf among the ids below vocab_size, whatever else is said of the id, makes the row non-finite: no
    answer. Impossible are ids >= vocab_size, a logit of -inf, ids that are not in allowed_ids (where there are any),
    ids that the constraint does not permit, and banned ids. If no id is possible, there is no answer either.
 2. Each id's logit_bias is added to its logit.
 3. Penalties change the logits of ids that occurred. The repetition penalty concerns prompt and output: a logit above 0
    is divided by it, another one multiplied, once however often the id occurred (Keskar et al. 2019, arXiv:1909.05858).
    Then presence_penalty + frequency_penalty * (occurrences) is taken off ids that are in the output.
    What 2, the repetition penalty and the other two give is each rounded to float32; beyond the largest one, to it.
 4. Temperature 0: the possible id with the highest logit; the lowest id wins a tie. This is all.
 5. z = (logit - highest logit) / temperature. The highest z is 0, so no temperature is too small.
 6. Top-k keeps the first k ids in the order of (logit descending, id ascending). 0 keeps all.
 7. Top-p weighs every id that is left with the integer floor(exp(z) * 2^40). Integers add up to the same sum in every
    order. It keeps the shortest beginning, in the order of step 6, whose sum reaches top_p * total. 1 keeps all.
 8. Min-p keeps the ids with exp(z) >= min_p; exp(z) is the probability relative to the likeliest id. 0 keeps all.
 9. Typical-p (Meister et al. 2023, arXiv:2202.00666) orders the ids that are left by how far their surprise is from its
    mean, the entropy, and keeps the shortest beginning that reaches typical_p of their weight. The surprise of an id is
    log Z - z, so the distance is |z - mean of z|, whatever Z is; the mean has the weights of step 7, and its numerator
    is the sum of the integers floor(weight * -z). The lowest id wins a tie; ids that weigh nothing go. 1 keeps all.
    It stands last, as in the `transformers` library: what is typical is judged among the ids that may still be drawn.
10. The id with the highest z + noise is drawn; the lowest id wins a tie. Gumbel noise makes this a draw from the
    softmax of z over the ids that are left (Gumbel 1954; Maddison, Tarlow and Minka 2014, arXiv:1411.0030).

The noise of an id is a function of (seed, sequence index, output index, id) alone: Philox4x32-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC11) under the seed as its key. So a draw depends neither on the other
rows of a batch nor on what was drawn before, and a sequence that is computed again draws the same tokens again.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from pellucid_server.engine.messages import Sampling

WEIGHT_SCALE = 2.0**40
"""Top-p's unit: a token 10^12 times less likely than the likeliest weighs nothing."""
FLOAT32_MAX = float.fromhex("0x1.fffffep127")

_MASK = 0xFFFFFFFF


def sample_row(
    logits: Sequence[float],
    vocab_size: int,
    sampling: Sampling,
    banned: Collection[int],
    sequence_index: int,
    output_index: int,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    permitted: Collection[int] | None = None,
) -> int | None:
    """The next token id, or None where there is no answer.

    logits          [V], float32 values, V >= vocab_size
    banned          ids not to be chosen
    sequence_index  which output of its request this is, uint32
    output_index    how many tokens of the output came before, uint32
    prompt, output  the sequence so far
    permitted       ids that the constraint lets follow; None: there is no constraint
    """
    kept = candidates(logits, vocab_size, sampling, banned, prompt, output, permitted)
    if not kept:
        return None
    return max(kept, key=lambda i: (kept[i] + gumbel_noise(sampling.seed, sequence_index, output_index, i), -i))


def candidates(
    logits: Sequence[float],
    vocab_size: int,
    sampling: Sampling,
    banned: Collection[int] = (),
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    permitted: Collection[int] | None = None,
) -> dict[int, float]:
    """What step 10 draws from: z by id, the likeliest first. Empty where there is no answer."""
    row = [float(x) for x in logits[:vocab_size]]
    if any(math.isnan(x) or x == math.inf for x in row):
        return {}
    row = _adjusted(row, sampling, prompt, output)
    allowed = sampling.allowed_ids
    possible = [
        i
        for i, x in enumerate(row)
        if x > -math.inf and i not in banned and (not allowed or i in allowed) and (permitted is None or i in permitted)
    ]
    if not possible:
        return {}
    ordered = sorted(possible, key=lambda i: (-row[i], i))
    if sampling.temperature == 0:
        return {ordered[0]: 0.0}

    z = {i: (row[i] - row[ordered[0]]) / sampling.temperature for i in ordered}
    kept = ordered[: sampling.top_k] if sampling.top_k > 0 else ordered
    if sampling.top_p < 1:
        kept = _reaching(kept, sampling.top_p, lambda i: _weight(z[i]))
    if sampling.min_p > 0:
        kept = [i for i in kept if math.exp(z[i]) >= sampling.min_p]
    if sampling.typical_p < 1:
        kept = _typical([i for i in kept if _weight(z[i]) > 0], sampling.typical_p, z)
    return {i: z[i] for i in kept}


def _adjusted(row: list[float], sampling: Sampling, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """Steps 2 and 3."""
    row = row.copy()
    for i, bias in sampling.logit_bias:
        if i < len(row):
            row[i] = float32(row[i] + bias)
    counts = Counter(output)
    for i in {*prompt, *output}:
        if i >= len(row):
            continue
        if sampling.repetition_penalty != 1:
            penalty = sampling.repetition_penalty
            row[i] = float32(row[i] / penalty if row[i] > 0 else row[i] * penalty)
        if counts[i] > 0:
            row[i] = float32(row[i] - (sampling.presence_penalty + sampling.frequency_penalty * counts[i]))
    return row


def float32(x: float) -> float:
    """The nearest float32; the largest where x is finite but beyond it."""
    return x if math.isinf(x) else ctypes.c_float(max(-FLOAT32_MAX, min(FLOAT32_MAX, x))).value


def _weight(z: float) -> int:
    return int(math.exp(z) * WEIGHT_SCALE)


def _reaching(ordered: list[int], share: float, weight: Callable[[int], int]) -> list[int]:
    """The shortest beginning that holds `share` of the weight."""
    weights = [weight(i) for i in ordered]
    wanted = share * float(sum(weights))
    reached = 0
    for count, added in enumerate(weights, start=1):
        reached += added
        if float(reached) >= wanted:
            return ordered[:count]
    return ordered


def _typical(kept: list[int], share: float, z: dict[int, float]) -> list[int]:
    """Step 9; the likeliest stay first."""
    total = sum(_weight(z[i]) for i in kept)
    mean = -(float(sum(int(_weight(z[i]) * -z[i]) for i in kept)) / float(total))
    typical = set(_reaching(sorted(kept, key=lambda i: (abs(z[i] - mean), i)), share, lambda i: _weight(z[i])))
    return [i for i in kept if i in typical]


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
