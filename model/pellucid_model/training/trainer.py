"""The training loop's inside: one optimiser step, the validation loss, and the state that resumes both exactly.

In: a recipe, encoded lines and the source of a model. Out: a trained module. A step draws a batch, computes loss and
gradient part by part, refuses both if they are not finite, clips, sets the learning rate, and only then changes the
weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid_model.attention import TrainingAttend
from pellucid_model.blocks import checkpoint_blocks, find_blocks
from pellucid_model.contract import DecoderModel
from pellucid_model.training.data import IGNORED, Batch, BatchSource, Dataset, validation_batches
from pellucid_model.training.errors import DivergedError, TrainingError
from pellucid_model.training.models import ModelSource, make_model
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


@dataclass(frozen=True)
class Validation:
    validation_loss: float
    """Nats per token of the held-out lines, the end of each included."""
    perplexity: float
    """Its exponential."""
    loss_per_character: float
    """The same nats per character of the text, which compares vocabularies."""


class Trainer:
    """A model on its way. Weights and dropout are drawn from torch's global generator, seeded here."""

    def __init__(self, recipe: Recipe, data: Dataset, device: torch.device, source: ModelSource) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.vocabulary = data.vocabulary
        self.device = device
        self.step = 0
        self.trainable = make_model(source, recipe, data.vocabulary.size)
        self.model = self.trainable.module
        _check_fit(self.trainable.vocab_size, self.trainable.context_length, data, recipe)
        if recipe.gradient_checkpointing:
            checkpoint_blocks(find_blocks(self.model))
        self.model.to(device)
        self._optimizer = _adamw(self.model, recipe)
        self._batches = BatchSource(data.train, recipe, data.vocabulary.pad_id)
        self._validation = validation_batches(data.validation, data.vocabulary.pad_id)
        self._validation_characters = sum(len(line) for line in data.validation_lines)

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
        self._optimizer.zero_grad(set_to_none=True)
        loss = sum(self._backward(part, part.tokens / batch.tokens) for part in batch.split(self.recipe.micro_batches))
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.gradient_clip or math.inf)
        result = StepResult(self.step + 1, loss, rate, norm.item(), batch.tokens)
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

    def _backward(self, part: Batch, share: float) -> float:
        """Add a part's share of the batch's gradient -> its share of the loss."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.precision == "bfloat16"):
            loss = self._loss(part, self.recipe.dropout) * share
        loss.backward()
        return loss.item()

    @torch.no_grad()
    def validate(self) -> Validation:
        """Read the held-out lines, in float32. Raises DivergedError where the loss is not finite."""
        self.model.eval()
        total = sum(self._loss(batch, 0.0).item() * batch.tokens for batch in self._validation)
        loss = total / sum(batch.tokens for batch in self._validation)
        if not math.isfinite(loss):
            raise DivergedError(
                f"training stopped after step {self.step}: validation loss {loss:.4g}; "
                "try a lower --learning-rate or a longer --warmup"
            )
        return Validation(loss, torch.tensor(loss).exp().item(), total / self._validation_characters)

    def _loss(self, batch: Batch, dropout: float) -> Tensor:
        """Mean cross entropy over the labels that are not IGNORED."""
        rows, length = batch.inputs.shape
        attend = TrainingAttend(rows, length, dropout=dropout, device=self.device)
        inputs, labels = batch.inputs.to(self.device).flatten(), batch.labels.to(self.device).flatten()
        hidden = self.model(inputs, attend.positions, attend)
        logits = cast("DecoderModel", self.model).logits(hidden)
        return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED)

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


def _check_fit(vocab_size: int | None, context_length: int | None, data: Dataset, recipe: Recipe) -> None:
    """A checkpoint's output layer has every token of its tokenizer, and a row fits its context."""
    if vocab_size is not None and data.vocabulary.size > vocab_size:
        raise TrainingError(
            f"the tokenizer has {data.vocabulary.size} tokens, but the model only {vocab_size}; "
            "they do not belong together"
        )
    if context_length is not None and recipe.context_length > context_length:
        raise TrainingError(
            f"context_length = {recipe.context_length}: the model reads at most {context_length} tokens"
        )


def _adamw(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Weight decay pulls on matrices only: on a bias or a norm's weight, of which each number stands alone, it would
    take away what was learnt and regularise nothing.

    "linears" also spares embeddings, of which a step trains the few rows of its own tokens, but decays all.
    """
    spared = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    spared = spared if recipe.weight_decay_on == "linears" else set()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [p for p in parameters if p.dim() > 1 and id(p) not in spared]
    others = [p for p in parameters if p.dim() <= 1 or id(p) in spared]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(recipe.beta1, recipe.beta2))
