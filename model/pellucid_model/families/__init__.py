"""Checkpoints of other projects, each family declared as data: how its config and its tensor names read as ours.

A family is one file of this folder with a `FAMILY` in it; nothing else needs to be told. See docs/add-a-family.md.

    base.py, reader.py   how families are declared, and the strict reading of a config
    changes.py           what is done to tensors on the way
    rotary.py            rotary embeddings and their scalings in configs
"""

from __future__ import annotations

import importlib
import pkgutil

from pellucid_model.families.base import Family


def _discover() -> dict[str, Family]:
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    found = (getattr(module, "FAMILY", None) for module in modules)
    return {family.model_type: family for family in found if isinstance(family, Family)}


FAMILIES: dict[str, Family] = _discover()
"""By the `model_type` of a Hugging Face config.json."""
