"""Everything that decides what a training run computes: one frozen record, validated once, stored in run.json.

Two recipes come with names, see PRESETS. Every field is also an option of `pellucid train`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pellucid_model.config import Activation, DecoderConfig, Norm, NormPlacement, Position
from pellucid_model.training.errors import TrainingError

Layout = Literal["padded", "packed"]
Dtype = Literal["float32", "bfloat16", "float16"]
Vocabulary = Literal["characters", "bpe", "checkpoint"]
Precision = Literal["float32", "bfloat16"]
Decayed = Literal["matrices", "linears"]

SMALLEST_BPE = 260
"""All 256 bytes, the special tokens, and one merge."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a run. Lengths of text are in characters, those of rows in tokens.

    The text beside each type is what `pellucid train --help` says.
    """

    # The model; DecoderConfig says more.
    context_length: Annotated[int, "positions the model is trained for"]
    d_model: Annotated[int, "width of the residual stream"]
    layers: Annotated[int, "number of blocks"]
    heads: Annotated[int, "query heads"]
    kv_heads: Annotated[int, "heads of keys and values; a divisor of heads"]
    head_dim: Annotated[int, "width of a head"]
    d_ff: Annotated[int, "inner width of the feed-forward part"]
    position: Annotated[Position, "how positions enter"]
    rotary_base: Annotated[float, "base of the rotary frequencies"]
    embedding_scale: Annotated[float, "factor on token embeddings"]
    norm: Annotated[Norm, "kind of normalisation"]
    norm_placement: Annotated[NormPlacement, "before each part of a block, or after it"]
    norm_eps: Annotated[float, "epsilon of the normalisation"]
    activation: Annotated[Activation, "activation of the feed-forward part"]
    biases: Annotated[bool, "biases in every linear layer"]
    tied_head: Annotated[bool, "use the embedding matrix as the output layer"]
    dropout: Annotated[float, "dropout, also of attention weights, [0, 1)"]
    init_std: Annotated[float, "standard deviation of initial weights"]

    # The corpus.
    generated_lines: Annotated[int, "lines to generate where no corpus file is given"]
    min_line_length: Annotated[int, "shorter lines are dropped"]
    max_line_length: Annotated[int, "longer lines are dropped; characters: at most context_length - 2"]
    validation_lines: Annotated[int, "lines held out from training"]
    vocabulary: Annotated[
        Vocabulary, "a token is a character, or a piece that byte-level BPE learns; or as --from has it"
    ]
    bpe_vocab_size: Annotated[int, "entries of a BPE vocabulary, at least 260"]
    layout: Annotated[Layout, "a row is one padded line, or as many lines as fill the context"]
    rows: Annotated[int, "rows in a batch"]
    micro_batches: Annotated[int, "gradient accumulation: parts a batch is computed in, a divisor of rows"]

    # Optimisation: AdamW (Loshchilov and Hutter 2019), linear warmup, then a cosine.
    steps: Annotated[int, "optimiser steps"]
    learning_rate: Annotated[float, "peak, reached at the end of the warmup"]
    final_learning_rate: Annotated[float, "where the cosine ends"]
    warmup: Annotated[int, "steps of linear warmup"]
    beta1: Annotated[float, "decay of AdamW's mean, [0, 1)"]
    beta2: Annotated[float, "decay of AdamW's mean square, [0, 1)"]
    weight_decay: Annotated[float, "AdamW's decay; biases and norms have none"]
    weight_decay_on: Annotated[Decayed, "all matrices, or those of linear layers and not embeddings"]
    gradient_clip: Annotated[float, "largest gradient norm; 0 turns clipping off"]
    precision: Annotated[Precision, "type of matrix products in training; weights and validation are float32"]
    gradient_checkpointing: Annotated[
        bool, "compute each block again in the backward pass: less memory, a third slower"
    ]
    patience: Annotated[int, "stop after this many validations without a new best, and keep the best; 0: never"]
    seed: Annotated[int, "of weights, dropout, order of lines and held-out lines"]

    # What comes out.
    validation_every: Annotated[int, "steps between validations, each of which also saves the run"]
    checkpoint_dtype: Annotated[Dtype, "type in which the checkpoint's weights are stored"]
    sample_prompts: Annotated[tuple[str, ...], "prompts that are continued at each validation"]

    def __post_init__(self) -> None:
        for name in ("generated_lines", "min_line_length", "validation_lines", "rows", "micro_batches", "steps"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
        self._require(self.validation_every >= 1, "validation_every", "at least 1")
        self._require(self.rows % self.micro_batches == 0, "micro_batches", f"a divisor of rows = {self.rows}")
        self._require(self.bpe_vocab_size >= SMALLEST_BPE, "bpe_vocab_size", f"at least {SMALLEST_BPE}")
        self._require(self.patience >= 0, "patience", "at least 0")
        for name in ("warmup", "weight_decay", "gradient_clip", "final_learning_rate"):
            value = getattr(self, name)
            self._require(math.isfinite(value) and value >= 0, name, "a finite number of at least 0")
        for name in ("learning_rate", "init_std"):
            self._require(0 < getattr(self, name) <= 1000, name, "above 0 and at most 1000")
        for name in ("beta1", "beta2"):
            self._require(0 <= getattr(self, name) < 1, name, "in [0, 1)")
        self._require(0 <= self.seed < 2**63, "seed", "in [0, 2^63)")
        self._require(all(_is_utf8(prompt) for prompt in self.sample_prompts), "sample_prompts", "UTF-8 text")
        self._check_line_length()
        self.model_config(vocab_size=1)

    def _check_line_length(self) -> None:
        """A line of characters must fit a row; how many tokens one has otherwise is only known once it is encoded."""
        shortest, longest, room = self.min_line_length, self.max_line_length, self.context_length - 2
        if self.vocabulary == "characters":
            accepted = f"between min_line_length = {shortest} and context_length - 2 = {room}"
            self._require(shortest <= longest <= room, "max_line_length", accepted)
        self._require(shortest <= longest, "max_line_length", f"at least min_line_length = {shortest}")

    def _require(self, ok: bool, name: str, accepted: str) -> None:
        if not ok:
            raise TrainingError(f"{name} = {getattr(self, name)!r}: must be {accepted}")

    def model_config(self, vocab_size: int) -> DecoderConfig:
        """The model's own configuration. Raises ConfigError for a shape that does not fit together."""
        shared = {f.name for f in dataclasses.fields(DecoderConfig)} & {f.name for f in dataclasses.fields(Recipe)}
        return DecoderConfig(
            vocab_size=vocab_size,
            attention_bias=self.biases,
            mlp_bias=self.biases,
            head_bias=self.biases,
            **{name: getattr(self, name) for name in shared},
        )

    @staticmethod
    def descriptions() -> dict[str, str]:
        """What each setting means, by name."""
        return {name: hint.__metadata__[0] for name, hint in get_type_hints(Recipe, include_extras=True).items()}

    def to_json(self, *, shape: bool = True) -> dict[str, Any]:
        """shape: False leaves SHAPE out, for a model that brings its own."""
        values = {**dataclasses.asdict(self), "sample_prompts": list(self.sample_prompts)}
        return values if shape else {name: value for name, value in values.items() if name not in SHAPE}

    @staticmethod
    def from_json(values: dict[str, Any]) -> Recipe:
        """Strict reading of what to_json wrote: unknown and missing keys and values of another type are named."""
        hints = get_type_hints(Recipe)
        if wrong := sorted(set(values) ^ set(hints)):
            raise TrainingError(f"recipe: {wrong[0]} is {'missing' if wrong[0] in hints else 'not known'}")
        values = {**values, "sample_prompts": tuple(values["sample_prompts"])}
        for name, value in values.items():
            if not _fits(value, hints[name]):
                raise TrainingError(f"recipe: {name} = {value!r} has the wrong type")
        return Recipe(**values)


SHAPE = frozenset(
    {
        *("d_model", "layers", "heads", "kv_heads", "head_dim", "d_ff", "position", "rotary_base", "embedding_scale"),
        *("norm", "norm_placement", "norm_eps", "activation", "biases", "tied_head", "init_std"),
    }
)
"""Settings that a checkpoint or a module of one's own decides instead of the recipe."""


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _fits(value: Any, hint: Any) -> bool:
    if choices := [choice for choice in get_args(hint) if isinstance(choice, str)]:
        return value in choices
    if hint is float:
        return type(value) in (int, float)
    if hint in (int, bool):
        return type(value) is hint
    return all(isinstance(prompt, str) for prompt in value)


_PROMPTS = ("今天天气", "问：你喜欢", "北京", "")

STUDY_NOTE = Recipe(
    context_length=64,
    d_model=128,
    layers=4,
    heads=8,
    kv_heads=8,
    head_dim=16,
    d_ff=512,
    position="sinusoidal",
    rotary_base=10000.0,
    embedding_scale=math.sqrt(128),
    norm="layernorm",
    norm_placement="pre",
    norm_eps=1e-5,
    activation="relu",
    biases=True,
    tied_head=False,
    dropout=0.1,
    init_std=0.02,
    generated_lines=120_000,
    min_line_length=4,
    max_line_length=62,
    validation_lines=1500,
    vocabulary="characters",
    bpe_vocab_size=4096,
    layout="padded",
    rows=32,
    micro_batches=1,
    steps=10_000,
    learning_rate=2e-4,
    final_learning_rate=0.0,
    warmup=1000,
    beta1=0.9,
    beta2=0.999,
    weight_decay=0.01,
    weight_decay_on="matrices",
    gradient_clip=1.0,
    precision="float32",
    gradient_checkpointing=False,
    patience=0,
    seed=1234,
    validation_every=500,
    checkpoint_dtype="float32",
    sample_prompts=_PROMPTS,
)
"""The recipe of a study note that many follow to train their first decoder."""

DEMO = dataclasses.replace(
    STUDY_NOTE,
    context_length=256,
    d_ff=344,
    position="rotary",
    embedding_scale=1.0,
    norm="rmsnorm",
    norm_eps=1e-6,
    activation="swiglu",
    biases=False,
    tied_head=True,
    dropout=0.0,
    layout="packed",
    rows=2,
    steps=3600,
    learning_rate=4e-3,
    warmup=200,
    beta2=0.98,
    weight_decay=0.1,
    validation_every=400,
    checkpoint_dtype="bfloat16",
)
"""What made the bundled checkpoint, in a few minutes of one CPU core."""

FINE_TUNE = dataclasses.replace(
    DEMO,
    vocabulary="checkpoint",
    max_line_length=2000,
    steps=400,
    learning_rate=3e-4,
    warmup=40,
    beta2=0.999,
    weight_decay=0.01,
    weight_decay_on="linears",
    rows=8,
    validation_lines=200,
    validation_every=50,
    patience=3,
)
"""For weights that know something already: a low rate, and an end as soon as unseen lines stop gaining from it."""

PRESETS: dict[str, Recipe] = {"study-note": STUDY_NOTE, "demo": DEMO, "fine-tune": FINE_TUNE}
