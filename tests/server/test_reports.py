"""When the engine tells what its steps have brought: at once, or, where nobody waits for it, together with the next."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pellucid_server.engine import engine as engine_module
from pellucid_server.engine.connection import ConnectionClosed, EngineConnection
from pellucid_server.engine.engine import Engine
from pellucid_server.engine.execution import Executor
from pellucid_server.engine.framing import Frames, frame
from pellucid_server.engine.loading import load
from pellucid_server.engine.messages import Abort, Ping, Progress, StepDone, ToEngine, decode_from_engine
from pellucid_server.engine.sequence import Step
from pellucid_testing.checkpoints import tiny_checkpoint, tiny_config
from pellucid_testing.stats import stats
from pellucid_testing.stepping import configure, submission

LONG = 3000
"""More tokens than a test waits for."""


class Frontend:
    """The other end of an engine."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = Frames(decode_from_engine)
        self.progress: list[Progress] = []

    def send(self, *messages: ToEngine) -> None:
        self._connection.sendall(b"".join(map(frame, messages)))

    def read(self) -> list[Progress]:
        """What comes with the next read, which waits for it. TimeoutError where nothing comes."""
        news: list[Progress] = []
        for message in self._frames.push(self._connection.recv(1 << 20)):
            assert isinstance(message, StepDone)
            news += message.progress
        self.progress += news
        return news

    def count(self, key: int) -> int:
        """Tokens that have come."""
        return sum(len(one.tokens) for one in self.progress if one.key == key)

    def read_until(self, key: int, tokens: int) -> None:
        while self.count(key) < tokens:
            self.read()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), tiny_config(context_length=4096))


@pytest.fixture
def frontend(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Frontend]:
    """Of an engine whose steps all are quick ones."""
    monkeypatch.setattr(engine_module, "message_gap", lambda streams: 3600.0)
    settings = configure(checkpoint)
    engine = Engine(load(settings), settings)
    ours, theirs = socket.socketpair()
    ours.settimeout(20)

    def serve() -> None:
        with theirs, contextlib.suppress(ConnectionClosed):
            engine.serve(EngineConnection(theirs))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Frontend(ours)
    finally:
        ours.close()
        thread.join()


def test_tokens_of_quick_steps_come_together_and_first_ones_and_ends_at_once(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, execute = threading.Event(), Executor.execute

    def watched(executor: Executor, step: Step) -> object:
        if all(chunk.count == 1 for chunk in step.chunks):
            told.wait(20)  # else a slow reader might find the rest beside the first one
        return execute(executor, step)

    monkeypatch.setattr(Executor, "execute", watched)
    frontend.send(submission(1, [5, 6, 7], 40))
    first = frontend.read()
    told.set()
    assert [one.finished for one in first] == [None]
    rest = frontend.read()
    assert sum(len(one.tokens) for one in rest) == 39, "what was held came in several parts"
    assert [one.finished is not None for one in rest] == [False] * (len(rest) - 1) + [True]


def test_who_wants_tokens_at_once_gets_them_and_so_does_the_company(frontend: Frontend) -> None:
    frontend.send(submission(1, [5, 6, 7], LONG))
    frontend.read_until(1, 1)
    frontend.send(submission(2, [5, 6, 7], LONG, at_once=True))
    frontend.read_until(2, 20)
    assert frontend.count(1) > 20
    frontend.send(Abort(1), Abort(2))


def test_nothing_is_held_while_a_prompt_runs_nor_when_nothing_does(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, go_on, execute = threading.Semaphore(0), threading.Event(), Executor.execute

    def watched(executor: Executor, step: Step) -> object:
        prompts = {chunk.sequence.request.key for chunk in step.chunks if chunk.count > 1}
        if 2 in prompts:
            assert go_on.wait(20)
        if not prompts:
            decoded.release()
        return execute(executor, step)

    monkeypatch.setattr(Executor, "execute", watched)
    frontend.send(submission(1, [5, 6, 7], LONG))
    frontend.read_until(1, 1)
    for _ in range(5):
        assert decoded.acquire(timeout=20)
    frontend.send(submission(2, [8] * 50, LONG))
    frontend.read_until(1, 5)
    go_on.set()
    frontend.read_until(2, 1)
    while decoded.acquire(blocking=False):
        pass
    for _ in range(5):
        assert decoded.acquire(timeout=20)
    before = frontend.count(1)
    frontend.send(Abort(1), Abort(2))
    frontend.read()
    assert frontend.count(1) > before


def test_messages_keep_their_order_and_none_is_left_when_the_engine_rests() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection, frames = EngineConnection(theirs), Frames(decode_from_engine)
        reports = [StepDone([Progress(key, [1], None, None, 0)], stats(), [float(key)]) for key in range(4)]
        ours.setblocking(False)
        connection.hold(reports[0])
        connection.hold(reports[1])
        with pytest.raises(BlockingIOError):
            ours.recv(1)
        connection.send(reports[2])
        assert frames.push(ours.recv(1 << 20)) == reports[:3]
        connection.hold(reports[3])
        ours.sendall(frame(Ping()))
        assert connection.receive(None) == [Ping()]
        assert frames.push(ours.recv(1 << 20)) == reports[3:]
