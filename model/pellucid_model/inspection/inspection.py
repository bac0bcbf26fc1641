"""From a checkpoint and a text to a folder of arrays and pictures.

In: a module, token ids, and what they are called. Out: `Inspection`, which holds plain numpy arrays, and its files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pellucid_model.inspection import pictures
from pellucid_model.inspection.labels import choose_fonts, sequence_labels, token_labels
from pellucid_model.reading import Reading, read
from pellucid_model.tokenizers import Tokenizer

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Inspection:
    """What a model made of n tokens."""

    tokens: NDArray[np.int64]
    """[n]."""
    labels: list[str]
    attention: dict[int, Floats]
    """By layer, [Hq, n, n]; rows look, columns are looked at. A layer with a score matrix of its own has none."""
    entropy: dict[int, Floats]
    """By layer, [Hq, n], in nats."""
    relative_entropy: dict[int, Floats]
    """By layer, [Hq]: mean over the tokens that see at least two, as a share of the largest possible entropy."""
    gathered: list[int]
    """The layers without a map."""
    stages: list[str]
    """What each row of norms is of."""
    norms: Floats
    """[stages, n]: Euclidean norm of each token's hidden state."""
    next_ids: NDArray[np.int64]
    """[n, k]: likeliest next tokens, the likeliest first."""
    next_labels: list[list[str]]
    next_probabilities: Floats
    """[n, k]."""

    def save(self, folder: Path, font: Path | None = None) -> list[str]:
        """Write inspection.npz and all pictures -> what the user should know of them."""
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(folder / "inspection.npz", allow_pickle=False, **self.arrays())
        everything = [*self.labels, *(label for row in self.next_labels for label in row)]
        fonts = choose_fonts({character for label in everything for character in label}, font)
        labels = [fonts.drawable(label) for label in self.labels]
        candidates = [[fonts.drawable(label) for label in row] for row in self.next_labels]
        for layer, maps in self.attention.items():
            name = f"attention-layer-{layer:02d}.png"
            pictures.draw_attention(maps, labels, f"layer {layer}", fonts, folder / name)
        if self.attention:
            pictures.draw_heads(list(self.relative_entropy.values()), folder / "entropy.png", fonts)
        pictures.draw_norms(self.norms, self.stages, labels, folder / "norms.png", fonts)
        drawn = self.next_probabilities, candidates, labels
        pictures.draw_next_tokens(*drawn, folder / "next-tokens.png", fonts)
        return self._notices(fonts.missing)

    def _notices(self, missing: frozenset[str]) -> list[str]:
        notices = [_about_missing(missing)] if missing else []
        if self.gathered:
            layers = ", ".join(map(str, self.gathered))
            notices.append(f"layers without a map, since they make a score matrix of their own: {layers}")
        return notices

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The content of inspection.npz."""
        arrays: dict[str, NDArray[Any]] = {
            "tokens": self.tokens,
            "labels": np.array(self.labels),
            "stages": np.array(self.stages),
            "norms": self.norms,
            "next_ids": self.next_ids,
            "next_labels": np.array(self.next_labels),
            "next_probabilities": self.next_probabilities,
        }
        for layer, maps in self.attention.items():
            arrays[f"attention_{layer}"] = maps
            arrays[f"entropy_{layer}"] = self.entropy[layer]
            arrays[f"relative_entropy_{layer}"] = self.relative_entropy[layer]
        return arrays


def inspect_tokens(module: nn.Module, tokens: Sequence[int], tokenizer: Tokenizer | None, top_k: int) -> Inspection:
    """tokens: 1 or more; top_k: next tokens to keep for each."""
    reading = read(module, tokens)
    stages, norms = _norms(reading)
    probabilities, ids = reading.logits.softmax(dim=-1).topk(min(top_k, reading.logits.shape[1]), dim=-1)
    return Inspection(
        tokens=np.array(reading.tokens, dtype=np.int64),
        labels=sequence_labels(reading.tokens, tokenizer),
        attention={layer: _floats(maps) for layer, maps in reading.attention.items()},
        entropy={layer: _floats(reading.entropy(layer)) for layer in reading.attention},
        relative_entropy={layer: _floats(_mean_entropy(reading, layer)) for layer in reading.attention},
        gathered=reading.gathered,
        stages=stages,
        norms=norms,
        next_ids=ids.numpy(),
        next_labels=[token_labels(row, tokenizer) for row in ids.tolist()],
        next_probabilities=_floats(probabilities),
    )


def _mean_entropy(reading: Reading, layer: int) -> torch.Tensor:
    """[Hq], 0 where no token sees two."""
    return torch.nan_to_num(reading.relative_entropy(layer).nanmean(dim=-1), nan=0.0)


def _norms(reading: Reading) -> tuple[list[str], Floats]:
    """The residual stream between blocks where the blocks are known, and in any case what the logits are made of."""
    stages = [f"after block {i}" for i in range(len(reading.residuals) - 1)]
    names = [*(["embedding"] if reading.residuals else []), *stages, "before the head"]
    states = [*reading.residuals, reading.hidden]
    return names, np.stack([_floats(state.norm(dim=-1)) for state in states])


def _floats(tensor: torch.Tensor) -> Floats:
    array: Floats = tensor.detach().float().numpy()
    return array


def _about_missing(missing: frozenset[str]) -> str:
    some = " ".join(sorted(missing)[:8]) + (" ..." if len(missing) > 8 else "")
    return (
        f"no font here has {some}: shown as U+ and a number; install one (Debian, Ubuntu: apt-get install "
        "fonts-noto-cjk) or name it with --font FILE"
    )
