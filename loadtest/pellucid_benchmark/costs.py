"""What a model asks of the machine in one precision: bytes to read, multiplications to do. Counted, not measured.

A step reads the weights of all linear layers once, and the keys and values of every sequence. Embeddings are not
counted, since a token reads one row of theirs. Operations are multiplications and additions, two for each weight and
row; attention needs two for each number of a query and each key, and as many again for its values.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from pellucid_benchmark.precisions import PRECISIONS
from pellucid_benchmark.processes import WorkerError
from pellucid_model.checkpoint import read_config
from pellucid_model.decoder import Decoder
from pellucid_model.errors import ModelError
from pellucid_model.kernels.modules import HEAD_RATIO

BITS = {"float32": 32.0, "bfloat16": 16.0, "int8": 8.0, "int4": 5.0}
"""Of a number that is stored; for int4 with the scales and minima of its groups. docs/performance.md, Precision."""
SCALE_BITS = 32.0
"""Beside the keys, and the values, of a token and kv head in an int8 cache."""


@dataclass(frozen=True)
class Costs:
    weight_bytes: int
    """Memory of all weights, embeddings included."""
    read_bytes: int
    """Of the weights that every step reads."""
    kv_token_bytes: int
    """Keys and values of one token."""
    body_operations: int
    """Of linear layers, for each token."""
    head_operations: int
    """Of the head, for each token that is sampled."""
    attention_operations: int
    """For each pair of a token and one that it looks at."""

    def step_bytes(self, sequences: int, context: float) -> float:
        """What a decode step reads, for sequences of `context` tokens."""
        return self.read_bytes + sequences * context * self.kv_token_bytes

    def token_operations(self, context: float) -> float:
        """For one decoded token with `context` tokens to look at."""
        return self.body_operations + self.head_operations + context * self.attention_operations

    def prompt_operations(self, tokens: int) -> tuple[int, int]:
        """(of linear layers, of attention) for a prompt that starts from nothing and yields one token."""
        pairs = tokens * (tokens + 1) // 2
        return tokens * self.body_operations + self.head_operations, pairs * self.attention_operations


def costs_of(folder: Path, precision: str) -> Costs:
    """From the shapes in config.json alone; `precision` is one of PRECISIONS. Raises WorkerError, one line."""
    try:
        _, config = read_config(folder, [])
    except ModelError as error:
        raise WorkerError(str(error)) from None
    with torch.device("meta"):
        model = Decoder(config)
    stored = PRECISIONS[precision]
    layers = [each for each in model.modules() if type(each) is nn.Linear]
    read = sum(_bits(each, stored.weights) * each.weight.numel() for each in layers) / 8
    tables = [each for each in model.modules() if type(each) is nn.Embedding]
    rows = sum(each.weight.numel() for each in tables)
    if config.tied_head and stored.weights == stored.tables:
        rows -= model.embedding.weight.numel()  # They are the head's own memory.
    counted = {id(each.weight) for each in (*layers, *tables)}
    others = sum(each.numel() for each in model.parameters() if id(each) not in counted)
    operations = sum(2 * each.weight.numel() for each in layers)
    head = 2 * model.head.weight.numel()
    scale = SCALE_BITS if stored.cache == "int8" else 0.0
    head_bits = config.head_dim * BITS[stored.cache] + scale
    return Costs(
        weight_bytes=round(read + BITS[stored.tables] / 8 * rows + 4 * others),
        read_bytes=round(read),
        kv_token_bytes=round(2 * config.layers * config.kv_heads * head_bits / 8),
        body_operations=operations - head,
        head_operations=head,
        attention_operations=4 * config.layers * config.heads * config.head_dim,
    )


def _bits(layer: nn.Linear, weights: str) -> float:
    """A head keeps 8 bits where the others have 4."""
    is_head = layer.out_features > HEAD_RATIO * layer.in_features
    return BITS["int8" if weights == "int4" and is_head else weights]
