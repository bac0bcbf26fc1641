"""Serves textbook.py unchanged, from a state_dict as it was saved.

pellucid serve examples/adopted/textbook_adapter.py:Served CHECKPOINT
"""

from __future__ import annotations

from typing import Any

import torch
from textbook import TransformerLM
from torch import Tensor, nn

from pellucid_model.adopt import AdoptedModule


class Served(AdoptedModule):
    positions = ("pos_encoding",)
    head = "fc_out"

    def build(self, config: dict[str, Any]) -> nn.Module:
        self.context_length = config["max_len"]
        return TransformerLM(**config)

    def call(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        return self.module(tokens, torch.tril(torch.ones(length, length)))
