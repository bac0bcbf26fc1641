"""Errors a user of the model package can act on.

ModelError
├── ConfigError       a configuration value that is not understood or out of range
└── CheckpointError   a checkpoint folder that cannot be loaded as it is
"""

from __future__ import annotations


class ModelError(Exception):
    """Base of everything below; its text is one line meant for the person at the keyboard."""


class ConfigError(ModelError):
    """Names the key, the value and what is accepted."""


class CheckpointError(ModelError):
    """Names the file or tensor and what is wrong with it."""
