"""Modules that follow the contract and have one fault each, as people really make them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pellucid_testing.checkpoints import CHARACTERS

VOCAB = 4 + len(CHARACTERS)
FILE = Path(__file__)


class Sound(nn.Module):
    """Two layers of attention that choose, with learned positions; the others differ from it in one thing."""

    position_scheme = "absolute"
    context_length = 64
    width, heads, score_scale = 24, 3, 0.05

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        del config
        self.embedding = nn.Embedding(VOCAB, self.width)
        self.places = nn.Embedding(self.context_length, self.width)
        self.blocks = nn.ModuleList(nn.Linear(self.width, 3 * self.width) for _ in range(2))
        self.outputs = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(2))
        self.norm = nn.LayerNorm(self.width)
        self.head = nn.Linear(self.width, VOCAB)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        x = self.embedding(tokens) + self.place(positions)
        for layer, (qkv, output) in enumerate(zip(self.blocks, self.outputs, strict=True)):
            q, k, v = qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
            x = x + output(attend(layer, q, k, v, scale=self.score_scale).flatten(1))
        hidden: Tensor = self.norm(self.mix(x))
        return hidden

    def place(self, positions: Tensor) -> Tensor:
        places: Tensor = self.places(positions)
        return places

    def mix(self, x: Tensor) -> Tensor:
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        return logits


class Convolution(Sound):
    """A convolution over three tokens, padded on both sides: each token sees the next one."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.convolution = nn.Conv1d(self.width, self.width, 3, padding=1)

    def mix(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.convolution(x.T[None])[0].T
        return x + mixed


class BatchMean(Sound):
    """Takes the mean of all tokens of the batch away, whosever they are."""

    def mix(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


class Blind(Sound):
    """Attention's output never reaches the residual stream."""

    def forward(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        x = self.embedding(tokens) + self.place(positions)
        q, k, v = self.blocks[0](x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        attend(0, q, k, v)
        hidden: Tensor = self.norm(x)
        return hidden


class Unordered(Sound):
    """One layer, without positions: a bag of words."""

    def forward(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.blocks[0](x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        hidden: Tensor = self.norm(x + self.outputs[0](attend(0, q, k, v).flatten(1)))
        return hidden


class Uniform(Sound):
    """A scale of almost nothing: every token weighs the same."""

    score_scale = 1e-6


class OneHot(Sound):
    """Scores far too large: one token takes everything."""

    score_scale = 1e4


class SamePlaces(Sound):
    """What a token is hardly reaches the hidden state, in which a constant drowns it."""

    def mix(self, x: Tensor) -> Tensor:
        return 1e-4 * x + torch.arange(self.width)


class Overflow(Sound):
    """Finite weights, but a product that is not."""

    def mix(self, x: Tensor) -> Tensor:
        return x * 3e38 * 3e38


class Self(Sound):
    """Says the token itself, as a model does whose labels were not shifted."""

    ahead = 0

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.norm = nn.Identity()  # type: ignore[assignment]
        self.embedding = nn.Embedding(VOCAB, VOCAB)
        self.head = nn.Linear(VOCAB, VOCAB)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        del positions
        x = torch.nn.functional.one_hot(self.said(tokens), VOCAB) * 9.0
        q = torch.zeros(len(tokens), 1, 2)
        mixed = attend(0, q, q, x[:, None, :2] * 1e-3)
        return torch.cat([x[:, :2] + mixed[:, 0] + 0.01 * self.embedding(tokens)[:, :2], x[:, 2:]], dim=-1)

    def said(self, tokens: Tensor) -> Tensor:
        return tokens

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


class Skipping(Self):
    """On text that counts on through the alphabet it says the token after the next, as with labels shifted twice."""

    def said(self, tokens: Tensor) -> Tensor:
        return (tokens + 2) % VOCAB


class Counting(Self):
    """The same shape, saying the next token."""

    def said(self, tokens: Tensor) -> Tensor:
        return (tokens + 1) % VOCAB


def sick_checkpoint(folder: Path, kind: type[Sound]) -> tuple[Path, str]:
    """Random weights, large enough to choose -> (folder, FILE.py:CLASS)."""
    from pellucid_model.tokenizers.character import CharacterTokenizer

    torch.manual_seed(3)
    module = kind({})
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.7)
    save_file(module.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"context_length": kind.context_length}))
    CharacterTokenizer.train([CHARACTERS]).save(folder)
    return folder, f"{FILE}:{kind.__name__}"
