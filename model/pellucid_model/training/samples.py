"""Continues prompts with a model in training, to see what it has learnt. Serving has an engine of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from pellucid_model.attention import TrainingAttend
from pellucid_model.contract import DecoderModel
from pellucid_model.training.vocabulary import Vocabulary

TEMPERATURE = 0.8
TOP_K = 20
_SEED = 7
_MAX_NEW_TOKENS = 60


@dataclass(frozen=True)
class Sample:
    """A prompt, its likeliest continuation and one drawn at random, both without special tokens."""

    prompt: str
    greedy: str
    drawn: str

    def __str__(self) -> str:
        return f"{self.prompt}|{self.greedy}\n{self.prompt}|{self.drawn}"


def draw_samples(model: nn.Module, vocabulary: Vocabulary, prompts: Sequence[str], context_length: int) -> list[Sample]:
    """The same draws for the same model; torch's own random state is not touched.

    A prompt with characters that the tokenizer does not know is left out, as is one without any token.
    """
    random = torch.Generator().manual_seed(_SEED)
    samples = []
    for prompt in prompts:
        ids = vocabulary.encode_beginning(prompt)
        if not ids or vocabulary.unk_id in ids:
            continue
        room = min(_MAX_NEW_TOKENS, context_length - len(ids))
        stop = () if vocabulary.eos_id is None else (vocabulary.eos_id,)
        greedy = continue_tokens(model, ids, room, stop=stop)
        drawn = continue_tokens(model, ids, room, stop=stop, random=random)
        decode = vocabulary.tokenizer.decode
        samples.append(Sample(prompt, decode(greedy), decode(drawn)))
    return samples


@torch.no_grad()
def continue_tokens(
    model: nn.Module,
    ids: Sequence[int],
    max_new_tokens: int,
    *,
    stop: Sequence[int] = (),
    random: torch.Generator | None = None,
) -> list[int]:
    """New tokens after `ids`, the stopping one included; the whole sequence is computed again for each.

    random: None takes the likeliest token, else the draw is from the TOP_K likeliest at TEMPERATURE.
    """
    device = next(model.parameters()).device
    contract = cast("DecoderModel", model)
    training = model.training
    model.eval()
    tokens = list(ids)
    while len(tokens) < len(ids) + max_new_tokens:
        attend = TrainingAttend(1, len(tokens), device=device)
        hidden = model(torch.tensor(tokens, device=device), attend.positions, attend)
        logits = contract.logits(hidden[-1:])[0].float().cpu()
        tokens.append(_choose(logits, random))
        if tokens[-1] in stop:
            break
    model.train(training)
    return tokens[len(ids) :]


def _choose(logits: torch.Tensor, random: torch.Generator | None) -> int:
    """logits [V] -> token id."""
    if random is None:
        return int(logits.argmax())
    values, ids = logits.topk(min(TOP_K, len(logits)))
    return int(ids[torch.multinomial(torch.softmax(values / TEMPERATURE, dim=-1), 1, generator=random)])
