"""Serves a model.py of nanoGPT's structure, changed or not, from its ckpt.pt as it was saved.

pellucid serve examples/adopted/nanogpt_adapter.py:Served out/ckpt.pt
(An unchanged nanoGPT needs no adapter: pellucid serve out/ckpt.pt.)
"""

from __future__ import annotations

import sys
from typing import Any

from nanogpt import GPT, GPTConfig
from torch import nn

from pellucid_model.adopt import AdoptedModule


class Served(AdoptedModule):
    positions = ("transformer.wpe",)
    hidden = "transformer.ln_f"  # forward itself keeps the last token only
    ignored_tensors = ("transformer.h.*.attn.bias",)  # causal masks, in checkpoints of older versions

    def build(self, config: dict[str, Any]) -> nn.Module:
        self.context_length = config["block_size"]
        module = GPT(GPTConfig(**config))
        module.config.block_size = sys.maxsize  # of a step's tokens; of a sequence's, context_length
        return module
