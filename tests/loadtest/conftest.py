"""Options of the load test with changes, as tests ask for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pellucid_loadtest.options import FLAGS, LoadOptions, load_options
from pellucid_loadtest.workloads import ModelShape

MakeOptions = Callable[..., LoadOptions]


@pytest.fixture
def make_options() -> MakeOptions:
    """Options by their flags' names, such as make_options(rate="5"); the rest are the defaults."""

    def make(**changes: str) -> LoadOptions:
        defaults = {flag.field: flag.default for flag in FLAGS}
        assert set(changes) <= set(defaults)
        return load_options({**defaults, **changes})

    return make


@pytest.fixture
def model() -> ModelShape:
    return ModelShape(name="tiny", context=128, max_output=1000, vocab_size=50, eos_token_ids=(3, 7))
