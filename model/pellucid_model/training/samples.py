"""Continues prompts with a model in training, to see what it has learnt. Serving has an engine of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pellucid_model.attention import TrainingAttend
from pellucid_model.decoder import Decoder
from pellucid_model.tokenizers import CharacterTokenizer

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


def draw_samples(model: Decoder, tokenizer: CharacterTokenizer, prompts: Sequence[str]) -> list[Sample]:
    """The same draws for the same model; torch's own random state is not touched.

    A prompt with characters that the tokenizer does not know is left out.
    """
    random = torch.Generator().manual_seed(_SEED)
    samples = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt)
        if tokenizer.unk_id in ids:
            continue
        room = min(_MAX_NEW_TOKENS, model.config.context_length - len(ids))
        greedy = continue_tokens(model, ids, room, stop=tokenizer.eos_ids)
        drawn = continue_tokens(model, ids, room, stop=tokenizer.eos_ids, random=random)
        samples.append(Sample(prompt, tokenizer.decode(greedy), tokenizer.decode(drawn)))
    return samples


@torch.no_grad()
def continue_tokens(
    model: Decoder,
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
    training = model.training
    model.eval()
    tokens = list(ids)
    while len(tokens) < len(ids) + max_new_tokens:
        attend = TrainingAttend(1, len(tokens), device=device)
        hidden = model(torch.tensor(tokens, device=device), attend.positions, attend)
        logits = model.logits(hidden[-1:])[0].float().cpu()
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
