from __future__ import annotations

import torch

from pellucid_model.contract import Rotary
from pellucid_model.kernels import RotaryTables


def test_angles_are_exact_far_out() -> None:
    cos, sin = RotaryTables(Rotary.from_base(8, 10_000.0)).table(100_001)
    angle = 100_000.0 * Rotary.from_base(8, 10_000.0).inv_freq
    assert torch.equal(cos[100_000], angle.cos().float())
    assert torch.equal(sin[100_000], angle.sin().float())


def test_growing_changes_no_bit() -> None:
    rotary = Rotary.from_base(6, 500.0)
    grown = RotaryTables(rotary)
    for needed in (1, 2, 1023, 1024, 1025, 3000):
        cos, sin = grown.table(needed)
        assert cos.shape[0] >= needed
    at_once = RotaryTables(rotary).table(3000)
    assert torch.equal(cos, at_once[0])
    assert torch.equal(sin, at_once[1])
    assert cos.shape[1] == 3
    assert cos.dtype == torch.float32


def test_scale() -> None:
    cos, sin = RotaryTables(Rotary(torch.tensor([0.5], dtype=torch.float64), dim=2, scale=1.25)).table(1)
    assert cos[0, 0] == 1.25
    assert sin[0, 0] == 0
