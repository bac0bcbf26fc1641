"""What cannot be recorded is refused with the reason, and leaves the module as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pellucid_model.contract import Attend
from pellucid_model.kernels import NativeKernels, accelerate
from pellucid_model.kernels.plan import NotRecordable, record
from pellucid_testing.plans import VARIANTS, Odd, needs_kernels


def shifted_in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:] = y[:, :-1]
    return y


REFUSED: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "operator": lambda m, x, tokens, positions: torch.sin(x),
    "value": lambda m, x, tokens, positions: x * 2 if x[0, 0] > 0 else x,
    "rows": lambda m, x, tokens, positions: x * len(tokens),
    "mix": lambda m, x, tokens, positions: x + x.sum(0),
    "transposed": lambda m, x, tokens, positions: x.T.relu().sum(-1, keepdim=True) + x,
    "positions": lambda m, x, tokens, positions: x + positions[:, None],
    "first position": lambda m, x, tokens, positions: x * positions[0],
    "joined positions": lambda m, x, tokens, positions: torch.cat((x[:, :47], positions[:, None]), dim=1),
    "last position": lambda m, x, tokens, positions: m.embedding(positions[-1:].expand(len(positions))),
    "position in a table": lambda m, x, tokens, positions: x + m.gain[positions[-1:].expand(len(positions))][:, None],
    "list of positions": lambda m, x, tokens, positions: x * (1 + max(positions.tolist())),
    "branch by a list": lambda m, x, tokens, positions: x * 2 if 3 in tokens.tolist() else x,
    "array": lambda m, x, tokens, positions: x * float(x.detach().numpy().sum()),
    "bytes": lambda m, x, tokens, positions: x * tokens.untyped_storage().tolist()[0],
    "constant by row": lambda m, x, tokens, positions: torch.cat((x[:, :47], torch.arange(len(x))[:, None]), dim=1),
    "overlap": lambda m, x, tokens, positions: shifted_in_place(x),
    "power": lambda m, x, tokens, positions: x.pow(2.5),
    "largest": lambda m, x, tokens, positions: torch.maximum(x, -x),
    "rolled": lambda m, x, tokens, positions: x + x.roll(1, dims=0),
    "summed": lambda m, x, tokens, positions: x + x.sum(),
    "fails": lambda m, x, tokens, positions: x.view(1, 2, 3),
}


class Refused(Odd):
    """Odd, with one thing that cannot be recorded."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = REFUSED[what]

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return self.what(self, super().forward(tokens, positions, attend), tokens, positions)


@needs_kernels
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_recorded_says_so(what: str) -> None:
    model = Refused(what)
    accelerate(model, NativeKernels(VARIANTS[0]), "float32")
    with pytest.raises(NotRecordable, match=r"it |what the module"):
        record(model, model)  # type: ignore[arg-type]
    assert torch.is_tensor(model.norm(torch.zeros(1, 24)))  # its layers are as they were
