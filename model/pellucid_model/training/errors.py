"""Errors a user of `pellucid train` can act on. Each is one line of text.

ModelError
└── TrainingError     a setting, a corpus or a run folder that cannot be used
    └── DivergedError the loss or its gradient is no longer a number
"""

from __future__ import annotations

from pellucid_model.errors import ModelError


class TrainingError(ModelError):
    """Names the setting or the file, and what is accepted."""


class DivergedError(TrainingError):
    """Names step, learning rate, loss and gradient norm."""
