"""Grows the cos and sin tables that paged attention reads, from the angles of a contract.Rotary."""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid_model.contract import Rotary

CHUNK = 1024  # positions computed at a time, so that a row's bits never depend on when the table grew


class RotaryTables:
    """cos and sin of every position so far, float32 [P, dim / 2]. Angles are taken in float64 and cast at the end."""

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        empty = rotary.inv_freq.new_empty((0, rotary.dim // 2), dtype=torch.float32)
        self._cos = self._sin = empty

    def table(self, positions_needed: int) -> tuple[Tensor, Tensor]:
        """cos, sin [P, dim / 2] with P >= positions_needed. Valid until the next call, which may return longer ones."""
        held = self._cos.shape[0]
        if held < positions_needed:
            chunks = [self._angles(start) for start in range(held, positions_needed, CHUNK)]
            scale = self._rotary.scale
            self._cos = torch.cat((self._cos, *((angles.cos() * scale).float() for angles in chunks)))
            self._sin = torch.cat((self._sin, *((angles.sin() * scale).float() for angles in chunks)))
        return self._cos, self._sin

    def _angles(self, start: int) -> Tensor:
        """Of positions start to start + CHUNK - 1: float64 [CHUNK, dim / 2]."""
        frequencies = self._rotary.inv_freq.double()
        return torch.arange(start, start + CHUNK, dtype=torch.float64, device=frequencies.device)[:, None] * frequencies
