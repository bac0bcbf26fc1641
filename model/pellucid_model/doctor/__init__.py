"""The doctor: looks a model and its training over for the classic faults, and says what to do about each."""

from __future__ import annotations
