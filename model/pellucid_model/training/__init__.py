"""Training: a corpus, a recipe, a loop that can be interrupted, and the folder that a run leaves behind."""

from __future__ import annotations
