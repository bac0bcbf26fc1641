"""Checkpoints of other projects, each family declared as data: how its config and its tensor names read as ours."""

from __future__ import annotations

from pellucid_model.families.base import Family
from pellucid_model.families.llama import LLAMA
from pellucid_model.families.mistral import MISTRAL
from pellucid_model.families.qwen2 import QWEN2

FAMILIES: dict[str, Family] = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2)}
"""By the `model_type` of a Hugging Face config.json."""
