"""The sampler where the logits are: sampler_reference.py in torch operators, so that a GPU's logits need not travel.

In: logits on any device and one SamplerRow per row. Out: one id per row, the reference's in every case. What decides is
done in whole numbers and double precision, as there. Where the device's exp and log, which may differ from the C
library's in the last bit, could decide, and where a row asks for more than is done here (`_is_plain`), its logits go to
the CPU and the sampler there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid_server.engine.sampler import Sampler, SamplerRow
from pellucid_server.engine.sampler_reference import WEIGHT_SCALE

TOP = 1024
"""Top-k, top-p and min-p choose among so many of the likeliest ids; rows that need more go to the CPU."""
SLICE = 1 << 22
"""Logits whose noise is made at once, which bounds the memory that it takes."""
NO_ANSWER, UNDECIDED = -1, -2
"""In place of an id: there is none to choose; the CPU has to decide."""
_MARGIN = 1e-9
"""Far more than z or noise can be off, in nats."""
_WORD = 0xFFFFFFFF


class DeviceSampler:
    """Samples as Sampler does, rows independently of each other, on the device of the logits."""

    def __init__(self, vocab_size: int, on_cpu: Sampler) -> None:
        """vocab_size: ids from here on are never chosen; on_cpu: for rows that are not decided here."""
        self._vocab_size = vocab_size
        self._on_cpu = on_cpu

    def sample(self, logits: Tensor, rows: Sequence[SamplerRow]) -> list[int | None]:
        """The next token of each row; None where its logits are not finite, or no id is possible.

        logits  [R, V] float32, V >= vocab_size
        rows    R of them
        """
        plain = [index for index, row in enumerate(rows) if _is_plain(row)]
        answers = [UNDECIDED] * len(rows)
        if plain:
            decided = choose(_rows(logits, plain)[:, : self._vocab_size], [rows[index] for index in plain]).tolist()
            for index, answer in zip(plain, decided, strict=True):
                answers[index] = answer
        tokens = [None if answer == NO_ANSWER else answer for answer in answers]
        if left := [index for index, answer in enumerate(answers) if answer == UNDECIDED]:
            there = self._on_cpu.sample(_rows(logits, left).cpu(), [rows[index] for index in left])
            for index, token in zip(left, there, strict=True):
                tokens[index] = token
        return tokens


def choose(logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Ids [R] int64, NO_ANSWER or UNDECIDED, on the device of the logits [R, V] float32. The rows are plain."""
    likeliest = logits.argmax(dim=1)  # the lowest id of equal ones
    answers = likeliest
    drawing = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
    for narrow in (True, False):
        chosen = [index for index in drawing if _is_narrow(rows[index]) == narrow]
        if chosen:
            draw = _draw_narrow if narrow else _draw_wide
            drawn = draw(_rows(logits, chosen), _Settings.of([rows[index] for index in chosen], logits.device))
            answers = answers.index_copy(0, torch.tensor(chosen, device=logits.device), drawn)
    highest = logits.gather(1, likeliest[:, None])[:, 0]
    finite = (logits < torch.inf).all(dim=1) & (highest > -torch.inf)
    return torch.where(finite, answers, NO_ANSWER)


def _is_plain(row: SamplerRow) -> bool:
    """Whether nothing but temperature, top-k, top-p and min-p says what the row may choose."""
    sampling = row.sampling
    if not row.is_plain or sampling.typical_p < 1:
        return False
    return sampling.temperature == 0 or sampling.top_k <= TOP


def _is_narrow(row: SamplerRow) -> bool:
    """Whether something bounds what is drawn from."""
    return row.sampling.top_k > 0 or row.sampling.top_p < 1 or row.sampling.min_p > 0


@dataclass(frozen=True)
class _Settings:
    """Of R rows; the tensors are on the device, each [R, 1]."""

    most_candidates: int
    """Ids that top-k leaves, or TOP where it leaves all."""
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    seed_low: Tensor
    seed_high: Tensor
    output_index: Tensor
    sequence_index: Tensor

    @staticmethod
    def of(rows: Sequence[SamplerRow], device: torch.device) -> _Settings:
        each = [row.sampling for row in rows]
        numbers = torch.tensor([(s.temperature, s.top_p, s.min_p) for s in each], dtype=torch.float64)
        seeds = [(s.top_k, s.seed & _WORD, s.seed >> 32) for s in each]
        places = [(row.output_index, row.sequence_index) for row in rows]
        words = torch.cat((torch.tensor(seeds), torch.tensor(places)), dim=1)
        columns = (*numbers.to(device)[:, :, None].unbind(1), *words.to(device)[:, :, None].unbind(1))
        return _Settings(max(s.top_k or TOP for s in each), *columns)

    def part(self, rows: slice) -> _Settings:
        """Of some of the rows."""
        most, *columns = vars(self).values()
        return _Settings(most, *(column[rows] for column in columns))


def _draw_narrow(logits: Tensor, settings: _Settings) -> Tensor:
    """Steps 5 to 8 and 10 among the likeliest ids -> [R]; UNDECIDED where they may not be enough."""
    vocab_size = logits.shape[1]
    ids = _likeliest(logits, min(vocab_size, settings.most_candidates))  # [R, C]
    values = logits.gather(1, ids).double()
    z = (values - values[:, :1]) / settings.temperature
    rank = torch.arange(ids.shape[1], device=ids.device)
    top_k = settings.top_k
    kept = (values > -torch.inf) & ((top_k == 0) | (rank < top_k))

    weights = _weights(z) * kept
    every_z = (logits.double() - values[:, :1]) / settings.temperature
    total = torch.where(top_k == 0, _weights(every_z).sum(1, keepdim=True), weights.sum(1, keepdim=True)).double()
    wanted = settings.top_p * total
    before = (weights.cumsum(dim=1) - weights).double()
    all_of_them = settings.top_p >= 1
    # Each weight may be off by one, and by its rounding.
    near_top_p = (before - wanted).abs() <= 2 * vocab_size + total * 2.0**-48
    undecided = (near_top_p & kept & ~all_of_them & (rank > 0)).any(dim=1)
    kept = kept & (all_of_them | (before < wanted) | (rank == 0))

    likelihood = z.exp()
    near_min_p = ((likelihood - settings.min_p).abs() <= 1e-12 * settings.min_p) & (z < 0)
    undecided |= (near_min_p & kept).any(dim=1)
    kept = kept & (likelihood >= settings.min_p)

    enough = (top_k > 0)[:, 0] | ~kept[:, -1] | (ids.shape[1] == vocab_size)
    place, clear = _highest((z + _noise(ids, settings)).masked_fill(~kept, -torch.inf))
    return torch.where(enough & clear & ~undecided, ids.gather(1, place[:, None])[:, 0], UNDECIDED)


def _draw_wide(logits: Tensor, settings: _Settings) -> Tensor:
    """Steps 5 and 10 among all ids -> [R]; UNDECIDED where the draw is too close."""
    ids = torch.arange(logits.shape[1], device=logits.device)[None]  # [1, V]
    rows = max(1, SLICE // logits.shape[1])
    drawn = []
    for begin in range(0, len(logits), rows):
        part = slice(begin, begin + rows)
        values, own = logits[part].double(), settings.part(part)
        z = (values - values.amax(dim=1, keepdim=True)) / own.temperature
        place, clear = _highest(z + _noise(ids, own))
        drawn.append(torch.where(clear, place, UNDECIDED))
    return torch.cat(drawn)


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """Ids [R, count] in the order of (logit descending, id ascending).

    Both make one whole number, and no two are equal: a float32's bits, those of negative ones turned round, order as
    it does.
    """
    bits = (logits + 0.0).view(torch.int32).long()  # + 0.0: there is one zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = ordered * 2**32 + (_WORD - ids)
    return _WORD - (keys.topk(count, dim=1).values & _WORD)


def _weights(z: Tensor) -> Tensor:
    """Step 7's, int64."""
    return (z.exp() * WEIGHT_SCALE).long()


def _highest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The place of each row's highest score, and whether no other comes near it. scores [R, n] -> [R], [R]."""
    if scores.shape[1] == 1:
        return torch.zeros_like(scores[:, 0], dtype=torch.int64), torch.ones_like(scores[:, 0], dtype=torch.bool)
    values, places = scores.topk(2, dim=1)
    return places[:, 0], ~(values[:, 0] - values[:, 1] <= _MARGIN)


def _noise(ids: Tensor, settings: _Settings) -> Tensor:
    """sampler_reference.gumbel_noise, float64. ids [R or 1, n]"""
    seed = (settings.seed_low, settings.seed_high)
    word = philox_word(ids, settings.output_index, settings.sequence_index, seed)
    return -(-((word.double() + 0.5) * 2.0**-32).log()).log()


def philox_word(ids: Tensor, output_index: Tensor, sequence_index: Tensor, seed: tuple[Tensor, Tensor]) -> Tensor:
    """The first word of sampler_reference.philox for each id: int64 in [0, 2^32).

    Products of two words wrap around in int64, which leaves their bits as they are.
    """
    c0, c1, c2, c3 = ids, output_index, sequence_index, torch.zeros_like(output_index)
    k0, k1 = seed
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((product1 >> 32) & _WORD) ^ c1 ^ k0, product1 & _WORD
        c2, c3 = ((product0 >> 32) & _WORD) ^ c3 ^ k1, product0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0


def _rows(logits: Tensor, indices: list[int]) -> Tensor:
    """Some rows of the logits; without a copy where they are all."""
    if len(indices) == len(logits):
        return logits
    return logits.index_select(0, torch.tensor(indices, device=logits.device))
