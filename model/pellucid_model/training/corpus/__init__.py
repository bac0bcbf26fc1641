"""The lines a model is trained on: generated ones or the user's own, cleaned the same way."""

from __future__ import annotations
