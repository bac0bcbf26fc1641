"""A short run of what `make soak` does at length."""

from __future__ import annotations

import pytest

from pellucid_testing.soak import soak, verdict


@pytest.mark.timeout(240)
async def test_random_requests_in_company_are_as_alone() -> None:
    """Right alone and wrong in company: batching, preemption, cached prefixes, engine deaths and cancelled neighbours
    change another request's tokens, text or log-probabilities."""
    tally = await soak(requests=250, seed=1, kills=1)
    assert verdict(tally) == []
    assert tally.ended["whole"] > 125
    assert tally.kills == 1
    assert min(tally.ended["cancelled"], tally.ended["deadline"]) > 0
