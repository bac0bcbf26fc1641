"""The training loop's inside: one optimiser step, the validation loss, and the state that resumes both exactly.

In: a recipe and encoded lines. Out: a trained `Decoder`. A step draws a batch, computes loss and gradient, refuses both
if they are not finite, clips, sets the learning rate, and only then changes the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid_model.attention import TrainingAttend
from pellucid_model.decoder import Decoder
from pellucid_model.training.data import IGNORED, Batch, BatchSource, Dataset, validation_batches
from pellucid_model.training.errors import DivergedError, TrainingError
from pellucid_model.training.recipe import Recipe
from pellucid_model.training.schedule import learning_rate

STATE_VERSION = 1


@dataclass(frozen=True)
class StepResult:
    step: int
    """Steps done so far, this one included."""
    loss: float
    """Nats per trained token of the batch, before the step."""
    learning_rate: float
    gradient_norm: float
    """Before clipping."""
    tokens: int
    """Trained tokens of the batch."""


class Trainer:
    """A model on its way. Weights and dropout are drawn from torch's global generator, seeded here."""

    def __init__(self, recipe: Recipe, data: Dataset, device: torch.device) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.tokenizer = data.tokenizer
        self.device = device
        self.step = 0
        self.model = Decoder(recipe.model_config(data.tokenizer.vocab_size))
        self.model.initialize(recipe.init_std)
        self.model.to(device)
        self._optimizer = _adamw(self.model, recipe)
        pad_id = data.tokenizer.pad_id or 0
        self._batches = BatchSource(data.train, recipe, pad_id)
        self._validation = validation_batches(data.validation, pad_id)

    @property
    def parameters(self) -> int:
        """Trained numbers; a tied head counts once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def finished(self) -> bool:
        return self.step >= self.recipe.steps

    def train_step(self) -> StepResult:
        """One optimiser step. Raises DivergedError, with the weights as they were before it."""
        self.model.train()
        batch = self._batches.next()
        rate = learning_rate(self.step, self.recipe)
        loss = self._loss(batch, self.recipe.dropout)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.gradient_clip or math.inf)
        result = StepResult(self.step + 1, loss.item(), rate, norm.item(), batch.tokens)
        if not (math.isfinite(result.loss) and math.isfinite(result.gradient_norm)):
            raise DivergedError(
                f"training stopped at step {result.step}: loss {result.loss:.4g}, gradient norm "
                f"{result.gradient_norm:.4g}, learning rate {rate:.3g}; try a lower --learning-rate, a longer --warmup "
                f"or a smaller --gradient-clip (now {self.recipe.gradient_clip:g}; 0 is off)"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.step += 1
        return result

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Nats per token of the held-out lines, <eos> included. Raises DivergedError where it is not finite."""
        self.model.eval()
        total = sum(self._loss(batch, 0.0).item() * batch.tokens for batch in self._validation)
        loss = total / sum(batch.tokens for batch in self._validation)
        if not math.isfinite(loss):
            raise DivergedError(
                f"training stopped after step {self.step}: validation loss {loss:.4g}; "
                "try a lower --learning-rate or a longer --warmup"
            )
        return loss

    def _loss(self, batch: Batch, dropout: float) -> Tensor:
        """Mean cross entropy over the labels that are not IGNORED."""
        rows, length = batch.inputs.shape
        attend = TrainingAttend(rows, length, dropout=dropout, device=self.device)
        inputs, labels = batch.inputs.to(self.device).flatten(), batch.labels.to(self.device).flatten()
        hidden = self.model(inputs, attend.positions, attend)
        return F.cross_entropy(self.model.logits(hidden), labels, ignore_index=IGNORED)

    def state(self) -> dict[str, Any]:
        """All that `restore` needs, of types that torch.load(weights_only=True) accepts."""
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return {
            "version": STATE_VERSION,
            "step": self.step,
            "epoch": self._batches.epoch,
            "batch": self._batches.batch,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": cuda,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken. Raises TrainingError where it is of another release or model."""
        if state.get("version") != STATE_VERSION:
            raise TrainingError(f"state.pt has version {state.get('version')}; this release reads {STATE_VERSION}")
        try:
            self.model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError):
            raise TrainingError("state.pt does not fit the model that run.json describes") from None
        self.step = state["step"]
        self._batches.seek(state["epoch"], state["batch"])
        torch.set_rng_state(state["random"])
        if state["random_cuda"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_cuda"], self.device)


def _adamw(model: Decoder, recipe: Recipe) -> torch.optim.AdamW:
    """Weight decay pulls on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(recipe.beta1, recipe.beta2))
