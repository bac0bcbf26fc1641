"""Gemma: Llama with norms stored as differences from 1, scaled embeddings and gelu gates (Gemma Team 2024)."""

from __future__ import annotations

from typing import Any

import torch

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family, Rule
from pellucid_model.families.changes import plus_one
from pellucid_model.families.llama import LLAMA_RULES, llama_values
from pellucid_model.families.reader import ConfigReader

_STORED = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def gemma_values(config: ConfigReader) -> dict[str, Any]:
    """DecoderConfig's keys as Gemma and its kin have them."""
    config.expect("use_bidirectional_attention", False)
    # Early configs say gelu and mean its approximation.
    for key in ("hidden_act", "hidden_activation"):
        config.expect(key, "gelu_pytorch_tanh", "gelu")
    config.default(head_dim=256, tie_word_embeddings=True)
    values = llama_values(config) | {"activation": "geglu_tanh"}
    # The factor is rounded to the type of the weights that it multiplies: 55.4256 is 55.5 in bfloat16.
    factor = torch.tensor(values["d_model"] ** 0.5, dtype=_STORED.get(str(config.dtype), torch.float32))
    return values | {"embedding_scale": factor.item()}


def plus_one_on_norms(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The same rules, where norm weights are stored as what they differ from 1."""
    return tuple(Rule(rule.theirs, rule.ours, plus_one) if "norm" in rule.theirs else rule for rule in rules)


def _read(config: ConfigReader) -> DecoderConfig:
    return DecoderConfig(**gemma_values(config))


FAMILY = Family("gemma", _read, plus_one_on_norms(LLAMA_RULES), prefix="model.")
