"""When an engine counts as hung, with a clock of the event loop's own and limits of milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pellucid_server.watchdog import Watchdog


class Pings:
    def __init__(self, answer: Callable[[], None] = lambda: None) -> None:
        self.count = 0
        self._answer = answer

    def __call__(self) -> None:
        self.count += 1
        self._answer()


async def survives(watchdog: Watchdog, seconds: float) -> bool:
    try:
        await asyncio.wait_for(watchdog.until_hung(), seconds)
    except TimeoutError:
        return True
    return False


async def test_silence_is_a_hang_after_one_ping() -> None:
    pings = Pings()
    watchdog = Watchdog(0.2, pings)
    watchdog.engine_up(0.0)
    silence = await asyncio.wait_for(watchdog.until_hung(), 30)
    assert silence == pytest.approx(0.2, abs=0.05)
    assert pings.count == 1


async def test_an_engine_that_answers_lives() -> None:
    watchdog: Watchdog
    pings = Pings(lambda: watchdog.hear())
    watchdog = Watchdog(0.1, pings)
    watchdog.engine_up(0.0)
    watching = asyncio.create_task(watchdog.until_hung())
    async with asyncio.timeout(30):
        while pings.count < 3:  # noqa: ASYNC110 what is watched is a wait itself
            await asyncio.sleep(0.01)
    assert not watching.done()
    watching.cancel()


async def test_slow_steps_make_it_patient() -> None:
    watchdog = Watchdog(0.1, Pings())
    watchdog.engine_up(0.02)
    watchdog.hear(0.05)
    watchdog.hear(0.001)
    assert await survives(watchdog, 0.4)
    assert not await survives(watchdog, 30)


async def test_loading_has_a_limit_of_its_own() -> None:
    pings = Pings()
    assert await survives(Watchdog(0.05, pings, start_limit=1.0), 0.3)
    assert not await survives(Watchdog(0.05, pings, start_limit=0.2), 30)
    assert not await survives(Watchdog(0.0, pings, start_limit=0.2), 30)
    assert pings.count == 0


async def test_zero_turns_it_off() -> None:
    watchdog = Watchdog(0.0, Pings(), start_limit=0.1)
    watchdog.engine_up(0.0)
    assert await survives(watchdog, 0.4)
