"""An engine process without a model that speaks the real protocol and misbehaves on order, for tests of faults.

`python scripted_engine.py SCRIPT FD`: SCRIPT is JSON (see `Script`), FD the socket that the frontend hands over. The
prompt of a request decides nothing; token i of a request is FIRST_TOKEN + i % 26, so that a stream with a gap or a
repeat shows. `python scripted_engine.py serve SCRIPT ARGUMENTS…` is `pellucid serve` with this engine behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pellucid_server.engine.connection import ConnectionClosed, EngineConnection
from pellucid_server.engine.messages import (
    Abort,
    Configure,
    Finished,
    LogprobWish,
    Ping,
    Progress,
    Ready,
    StartFailed,
    Stats,
    StepDone,
    Submit,
    TokenLogprob,
)

FIRST_TOKEN = 4
"""Id of the first ordinary character of a character tokenizer."""
PERIOD = 26


@dataclass(frozen=True)
class Script:
    """How the engine behaves. `lives` is a file that counts engine starts, so that a fault can happen only once."""

    lives: str
    step_seconds: float = 0.0
    start_seconds: float = 0.0
    start_failed: str = ""
    exit_at_start: bool = False
    die_after_steps: list[int] = field(default_factory=list)
    """Life i kills itself after so many steps with work; lives beyond the list go on."""
    hang_after_steps: list[int] = field(default_factory=list)
    """Life i stops itself (SIGSTOP) after so many steps with work, 0: before it is ready; lives beyond go on, and so do
    those that are continued."""
    warm_up_seconds: float = 0.0
    """What the engine says its longest warm-up step took; its first step with work takes five times as long."""
    token_pause_after: int = 0
    """Stop making tokens (but not steps) when a request has so many; 0: never."""
    non_finite: bool = False
    cached_tokens: int = 0
    """What it says it found in its cache of every prompt."""
    context_length: int = 128
    kv_block_size: int = 4
    kv_block_count: int = 64
    vocab_size: int = 49

    def program(self) -> list[str]:
        """What python runs to serve with this engine; for `pellucid_testing.server`."""
        return [__file__, "serve", json.dumps(asdict(self))]


def run(script: Script, connection: EngineConnection) -> None:
    """One life."""
    life = _count_life(Path(script.lives))
    (configure,) = connection.receive(None)
    if not isinstance(configure, Configure):
        raise TypeError(f"the first message is {configure}")
    time.sleep(script.start_seconds)
    if script.exit_at_start:
        sys.exit(3)
    if script.start_failed:
        connection.send(StartFailed(script.start_failed))
        return
    hang_after = script.hang_after_steps[life] if life < len(script.hang_after_steps) else -1
    if hang_after == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        hang_after = -1
    connection.send(ready(script))
    steps_left = script.die_after_steps[life] if life < len(script.die_after_steps) else -1
    _Loop(script, connection, steps_left, hang_after).run()


class _Loop:
    def __init__(self, script: Script, connection: EngineConnection, steps_left: int, hang_after: int) -> None:
        self._script = script
        self._connection = connection
        self._steps_left = steps_left
        self._hang_after = hang_after
        self._live: dict[int, tuple[Submit, int]] = {}
        self._steps = 0

    def run(self) -> None:
        while True:
            for message in self._connection.receive(0 if self._live else None):
                if isinstance(message, Submit):
                    self._live[message.key] = (message, len(message.generated))
                elif isinstance(message, Abort):
                    self._live.pop(message.key, None)
                    self._send([], 0.0)
                elif isinstance(message, Ping) and not self._live:
                    self._send([], 0.0)
            if not self._live:
                continue
            if self._steps_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if self._steps == self._hang_after:
                os.kill(os.getpid(), signal.SIGSTOP)
            self._steps_left -= 1
            self._step()

    def _step(self) -> None:
        began = time.monotonic()
        time.sleep(self._script.step_seconds if self._steps else max(self._script.step_seconds, self._first_step()))
        progress = [self._advance(key, began) for key in list(self._live)]
        self._send([entry for entry in progress if entry is not None], time.monotonic() - began)

    def _first_step(self) -> float:
        return 5 * self._script.warm_up_seconds

    def _advance(self, key: int, began: float) -> Progress | None:
        submit, count = self._live[key]
        if self._script.token_pause_after and count >= self._script.token_pause_after:
            return None
        token: int | None = FIRST_TOKEN + count % PERIOD
        finished: Finished | None = None
        if self._script.non_finite:
            token, finished = None, Finished("non_finite")
        elif submit.max_new_tokens == 0:
            token, finished = None, Finished("max_new_tokens")
        elif count + 1 == submit.max_new_tokens:
            finished = Finished("max_new_tokens")
        elif len(submit.prompt) + count + 1 >= submit.max_length:
            finished = Finished("context_full")
        if finished is not None:
            del self._live[key]
        else:
            self._live[key] = (submit, count + 1)
        first = count == len(submit.generated)
        return Progress(
            key,
            [] if token is None else [token],
            finished,
            began,
            0,
            logprobs=[]
            if token is None or submit.output_logprobs is None
            else [_scored(token, submit.output_logprobs)],
            prompt_logprobs=_prompt_scored(submit) if first else [],
            cached_tokens=min(self._script.cached_tokens, len(submit.prompt) - 1),
        )

    def _send(self, progress: list[Progress], seconds: float) -> None:
        self._steps += bool(progress)
        stats = Stats(
            running=len(self._live),
            waiting=0,
            running_tokens=0,
            waiting_tokens=0,
            free_blocks=self._script.kv_block_count,
            used_blocks=0,
            prefill_tokens_total=0,
            preemptions_total=0,
            step_sequences=len(progress),
            step_tokens=len(progress),
            step_seconds=seconds,
            step_phase="decode" if progress else "idle",
        )
        self._connection.send(StepDone(progress, stats, [time.monotonic()]))


def _scored(token: int, wish: LogprobWish, logprob: float | None = -0.5) -> TokenLogprob:
    """The likeliest tokens are 0, 1, 2, …; the token itself and those asked for come behind them."""
    likeliest = [(other, -0.25 * (other + 1), other + 1) for other in range(wish.top_count)]
    others = [(other, -9.0, 9) for other in wish.token_ids]
    return TokenLogprob(token, logprob, 0 if logprob is None else 2, tuple(likeliest + others))


def _prompt_scored(submit: Submit) -> list[TokenLogprob]:
    wish = submit.prompt_logprobs
    if wish is None:
        return []
    return [
        _scored(token, wish, None if place == 0 else -float(place))
        for place, token in enumerate(submit.prompt)
        if place >= wish.start
    ]


def ready(script: Script) -> Ready:
    """What an engine with this script says when it is up."""
    return Ready(
        vocab_size=script.vocab_size,
        parameters=0,
        context_length=script.context_length,
        position_scheme="rotary",
        kv_block_size=script.kv_block_size,
        kv_block_count=script.kv_block_count,
        kv_bytes=0,
        max_step_tokens=512,
        weight_bytes=0,
        device="cpu",
        dtype="float32",
        kernels="none",
        batch_invariant=True,
        architecture="scripted",
        warm_up_seconds=script.warm_up_seconds,
    )


def _count_life(path: Path) -> int:
    """Number of this life, from 0."""
    life = int(path.read_text()) if path.exists() else 0
    path.write_text(str(life + 1))
    return life


def serve_with_script(script: Script, argv: list[str]) -> int:
    """`pellucid serve`, but for the engine's program."""
    from pellucid_server.checkpoint_info import read_checkpoint_info
    from pellucid_server.errors import StartError
    from pellucid_server.frontend import Frontend, Package
    from pellucid_server.logs import set_up_logging
    from pellucid_server.settings import load_settings

    settings = load_settings(argv)
    set_up_logging(settings.log_level, settings.log_format)
    engine = (sys.executable, __file__, json.dumps(asdict(script)))
    package = Package(settings, read_checkpoint_info(settings), "0.0.0", engine)

    async def serve() -> None:
        await Frontend(package).run()

    try:
        asyncio.run(serve())
    except StartError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        sys.exit(serve_with_script(Script(**json.loads(sys.argv[2])), sys.argv[3:]))
    with contextlib.suppress(ConnectionClosed):
        run(Script(**json.loads(sys.argv[1])), EngineConnection(socket.socket(fileno=int(sys.argv[2]))))
