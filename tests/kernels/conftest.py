from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pellucid_model.kernels import Kernels, NativeKernels, TorchKernels, library


@pytest.fixture(params=library.supported_variants())
def native(request: pytest.FixtureRequest) -> NativeKernels:
    """Every compiled variant that this CPU can run."""
    return NativeKernels(request.param)


@pytest.fixture(params=(*library.supported_variants(), "torch"))
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Every implementation."""
    return TorchKernels() if request.param == "torch" else NativeKernels(request.param)


@pytest.fixture(params=(1, 2))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = library.threads()
    library.set_threads(request.param)
    yield request.param
    library.set_threads(before)


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Where only the kernels' threads matter: torch's own wait busily for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
