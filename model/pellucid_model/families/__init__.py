"""Checkpoints of other projects, each family declared as data: how its config and its tensor names read as ours."""

from __future__ import annotations

from pellucid_model.families.base import Family
from pellucid_model.families.llama import LLAMA

FAMILIES: dict[str, Family] = {LLAMA.model_type: LLAMA}
"""By the `model_type` of a Hugging Face config.json."""
