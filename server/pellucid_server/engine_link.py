"""The frontend's end of the engine process: starts it, talks to it, and starts it again when it dies or hangs.

In come Submit and Abort messages; out go events: the engine is up (Ready), has done a step (StepDone), or is down.
After "down" nothing that was sent before is known to the next engine. The engine reads the end of its socket when this
process dies, however that happens, and ends too.

Events are called right where bytes come in (`_EngineProtocol`), with no task in between: a step is on its way to the
streams in the same turn of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from pellucid_server.engine.framing import Frames, frame
from pellucid_server.engine.messages import (
    Abort,
    Configure,
    FromEngine,
    Ping,
    Ready,
    StepDone,
    Submit,
    decode_from_engine,
)
from pellucid_server.errors import StartError
from pellucid_server.logs import log
from pellucid_server.watchdog import START_SECONDS, Watchdog

ENGINE_COMMAND = (sys.executable, "-m", "pellucid_server.engine")
"""The number of the inherited socket follows as the last argument."""
MIN_BACKOFF = 0.1
MAX_BACKOFF = 5.0
EXIT_SECONDS = 5.0
"""How long the engine may take to end when the server does, before it is killed."""
BURY_SECONDS = 0.5
"""The same for an engine that has closed its end of the socket and is of no more use."""
READ_BYTES = 2**18
"""At most in one read from the socket."""


class EngineEvents(Protocol):
    """Who listens. Called on the event loop; must not wait."""

    def engine_up(self, ready: Ready) -> None: ...

    def engine_step(self, step: StepDone) -> None: ...

    def engine_down(self) -> None: ...

    def engine_restarting(self, reason: str) -> None:
        """A new engine is about to start. `reason` says how the last one ended: exit, signal, hung or start_failed."""
        ...


class EngineLink:
    """One engine at a time. `run` for as long as the server lives. `timeout`, `start_timeout`: see watchdog."""

    def __init__(
        self,
        events: EngineEvents,
        command: Sequence[str] = ENGINE_COMMAND,
        timeout: float = 0.0,
        start_timeout: float = START_SECONDS,
    ) -> None:
        self._events = events
        self._command = tuple(command)
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._hung: str | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._up = False
        self._backoff = MIN_BACKOFF

    @property
    def pid(self) -> int:
        """Process id of the engine; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def send(self, *messages: Submit | Abort | Ping) -> None:
        """In one write, so that they meet the same step. Never waits. Dropped while no engine is up: whoever listens
        submits again on "up".
        """
        if self._up and self._transport is not None:
            self._transport.write(b"".join(map(frame, messages)))

    async def run(self, configure: Configure) -> None:
        """Keeps an engine running. Raises StartError where the first one does not start; else until cancelled."""
        started_once = False
        try:
            while True:
                failure = await self._live(configure)
                started_once = started_once or self._up
                self._up = False
                if started_once:
                    self._events.engine_down()
                reason = await self._bury(BURY_SECONDS)
                if not started_once:
                    raise StartError(failure or _first_start_failure(reason))
                log(logging.ERROR, "the engine is down and will be restarted", cause=failure or reason)
                await asyncio.sleep(self._backoff)
                self._backoff = min(MAX_BACKOFF, self._backoff * 2)
                self._events.engine_restarting("start_failed" if failure else reason.split()[0])
        finally:
            # An engine that is still loading does not look at its socket.
            patience = EXIT_SECONDS if self._up else 0.0
            self._up = False
            await self._bury(patience)

    def kill(self) -> None:
        """Ends the engine at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _live(self, configure: Configure) -> str | None:
        """One engine's life, from start to the end of its messages. Returns why it refused to start, if it did."""
        self._hung = None
        watchdog = Watchdog(self._timeout, lambda: self.send(Ping()), self._start_timeout)
        over = await self._spawn(configure, lambda message: self._hear(message, watchdog))
        watch = asyncio.create_task(self._watch(watchdog))
        try:
            await over
        except _Refused as refusal:
            return str(refusal)
        finally:
            watch.cancel()
        return None

    async def _watch(self, watchdog: Watchdog) -> None:
        """Kills an engine that hangs: its socket closes, and all goes on as after any other death."""
        silence = await watchdog.until_hung()
        self._hung = f"hung for {silence:g} s"
        self.kill()

    def _hear(self, message: FromEngine, watchdog: Watchdog) -> None:
        if isinstance(message, StepDone):
            watchdog.hear(max(message.step_seconds))
            if message.progress:
                self._backoff = MIN_BACKOFF
            self._events.engine_step(message)
        elif isinstance(message, Ready):
            self._up = True
            watchdog.engine_up(message.warm_up_seconds)
            self._events.engine_up(message)
        else:
            raise _Refused(message.message)

    async def _spawn(self, configure: Configure, hear: Callable[[FromEngine], None]) -> asyncio.Future[None]:
        """A new engine; the future is done once there is nothing more to hear from it."""
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C in the terminal reaches the frontend alone, which then drains.
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        self._transport, _ = await loop.create_unix_connection(lambda: _EngineProtocol(hear, over), sock=ours)
        self._transport.write(frame(configure))
        return over

    async def _bury(self, patience: float) -> str:
        """Closes the socket and waits for the process to end, at last by killing it. Returns how it ended."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        process = self._process
        if process is None:
            return "exit"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), patience)
        self.kill()
        await process.wait()
        self._process = None
        if self._hung is not None:
            return self._hung
        code = process.returncode or 0
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"


class _Refused(Exception):
    """The engine cannot start, and says why."""


class _EngineProtocol(asyncio.BufferedProtocol):
    """Hands on each message as it arrives, until `over`: done when nothing more comes, or failed as `hear` did."""

    def __init__(self, hear: Callable[[FromEngine], None], over: asyncio.Future[None]) -> None:
        self._hear = hear
        self._over = over
        self._frames = Frames(decode_from_engine)
        self._part = memoryview(bytearray(READ_BYTES))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._part

    def buffer_updated(self, nbytes: int) -> None:
        if self._over.done():
            return
        try:
            for message in self._frames.push(self._part[:nbytes]):
                self._hear(message)
        except msgspec.MsgspecError:
            self._end()  # What cannot be decoded comes from an engine that went wrong: as good as dead.
        except Exception as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self, error: Exception | None = None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)


def _first_start_failure(reason: str) -> str:
    if reason.startswith("hung"):
        return f"the engine process did not come up while it was loading the model ({reason}); its log may say why"
    hint = "perhaps memory ran out: lower --kv-cache-memory" if "SIGKILL" in reason else "its log above may say why"
    return f"the engine process ended while it was loading the model ({reason}); {hint}"
