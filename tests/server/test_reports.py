"""When the engine tells what its steps have brought: at once, or, where nobody waits for it, together with the next.

And how long it goes on without looking up: several steps in a row end where there is something to tell or to hear.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pellucid_server.engine import engine as engine_module
from pellucid_server.engine.connection import ConnectionClosed, EngineConnection
from pellucid_server.engine.engine import Engine
from pellucid_server.engine.execution import Executor, Outcome
from pellucid_server.engine.framing import Frames, frame
from pellucid_server.engine.loading import load
from pellucid_server.engine.messages import (
    Abort,
    Constraint,
    Ping,
    Progress,
    StepDone,
    Submit,
    ToEngine,
    decode_from_engine,
)
from pellucid_server.engine.multi_step import MOST_STEPS, Interruption
from pellucid_server.engine.sequence import Step
from pellucid_server.kv.window import ContextWindow
from pellucid_testing.checkpoints import tiny_checkpoint
from pellucid_testing.plans import needs_kernels
from pellucid_testing.stats import stats
from pellucid_testing.stepping import GREEDY, configure, submission


def endless(key: int, prompt: list[int], **changes: Any) -> Submit:
    """A request that ends when it is told to."""
    values: dict[str, Any] = {"context": ContextWindow("roll", 4, 60), "max_length": 10**9}
    return submission(key, prompt, 10**9, **(values | changes))


class Frontend:
    """The other end of an engine."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = Frames(decode_from_engine)
        self.progress: list[Progress] = []
        self.reports: list[StepDone] = []

    def send(self, *messages: ToEngine) -> None:
        self._connection.sendall(b"".join(map(frame, messages)))

    def read(self) -> list[Progress]:
        """What comes with the next read, which waits for it. TimeoutError where nothing comes."""
        news: list[Progress] = []
        part = self._connection.recv(1 << 20)
        assert part, "the engine has ended"
        for message in self._frames.push(part):
            assert isinstance(message, StepDone)
            self.reports.append(message)
            news += message.progress
        self.progress += news
        return news

    def count(self, key: int) -> int:
        """Tokens that have come."""
        return sum(len(one.tokens) for one in self.progress if one.key == key)

    def read_until(self, key: int, tokens: int) -> None:
        while self.count(key) < tokens:
            self.read()

    def read_until_end(self, key: int) -> Progress:
        """-> what came last."""
        while not (ended := [one for one in self.progress if one.key == key and one.finished is not None]):
            self.read()
        return ended[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(checkpoint: Path) -> Engine:
    settings = configure(checkpoint)
    return Engine(load(settings), settings)


@pytest.fixture
def frontend(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Frontend]:
    """Of an engine whose steps all are quick ones."""
    monkeypatch.setattr(engine_module, "message_gap", lambda streams: 3600.0)
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

    def watched(executor: Executor, step: Step, interruption: Interruption) -> Outcome:
        if all(chunk.count == 1 for chunk in step.chunks):
            told.wait(20)  # else a slow reader might find the rest beside the first one
        return execute(executor, step, interruption)

    monkeypatch.setattr(Executor, "execute", watched)
    frontend.send(submission(1, [5, 6, 7], 40))
    first = frontend.read()
    told.set()
    assert [one.finished for one in first] == [None]
    rest = frontend.read()
    assert sum(len(one.tokens) for one in rest) == 39, "what was held came in several parts"
    assert [one.finished is not None for one in rest] == [False] * (len(rest) - 1) + [True]


def test_a_token_that_may_end_the_output_is_told_at_once(frontend: Frontend) -> None:
    frontend.send(submission(1, [5, 6, 7], 40))
    frontend.read_until(1, 40)
    tokens = [token for one in frontend.progress for token in one.tokens]
    watched = tokens[-1]
    frontend.send(endless(2, [5, 6, 7], sampling=GREEDY, watched_ids=[watched, 2**31]))
    frontend.read_until(2, 1 + tokens.index(watched, 1))
    told = [one.tokens for one in frontend.progress if one.key == 2][1:]
    assert all(watched not in each[:-1] for each in told), "tokens came behind it"
    assert told[0][-1:] == [watched] or watched in {each[-1] for each in told}
    frontend.send(Abort(2))


def test_who_wants_tokens_at_once_gets_them_and_so_does_the_company(frontend: Frontend) -> None:
    frontend.send(endless(1, [5, 6, 7]))
    frontend.read_until(1, 1)
    frontend.send(endless(2, [5, 6, 7], at_once=True))
    frontend.read_until(2, 20)
    assert frontend.count(1) > 20
    frontend.send(Abort(1), Abort(2))


def test_nothing_is_held_while_a_prompt_runs_nor_when_nothing_does(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, go_on, execute = threading.Semaphore(0), threading.Event(), Executor.execute

    def watched(executor: Executor, step: Step, interruption: Interruption) -> Outcome:
        prompts = {chunk.sequence.request.key for chunk in step.chunks if chunk.count > 1}
        if 2 in prompts:
            assert go_on.wait(20)
        if not prompts:
            decoded.release()
        return execute(executor, step, interruption)

    monkeypatch.setattr(Executor, "execute", watched)
    frontend.send(endless(1, [5, 6, 7]))
    frontend.read_until(1, 1)
    for _ in range(5):
        assert decoded.acquire(timeout=20)
    frontend.send(endless(2, [8] * 50))
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
        reports = [StepDone([Progress(key, [1], None, None, 0, [])], stats(), [float(key)]) for key in range(4)]
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


def test_what_is_posted_goes_out_once_by_whoever_writes_it_and_the_connection_writes_the_rest() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection, frames = EngineConnection(theirs), Frames(decode_from_engine)
        reports = [StepDone([Progress(key, [1], None, None, 0, [])], stats(), [float(key)]) for key in range(6)]
        ours.setblocking(False)
        connection.hold(reports[0])
        assert connection.posted == b"", "what is held waits for something that is due"
        connection.sent(0)
        connection.post(reports[1])
        with pytest.raises(BlockingIOError):
            ours.recv(1)
        assert frames.push(connection.posted) == reports[:2]
        theirs.sendall(connection.posted[:7])
        connection.sent(7)
        assert frames.push(ours.recv(1 << 20)) == reports[:2]
        assert connection.posted == b""
        connection.post(reports[2])
        theirs.sendall(connection.posted)
        connection.sent(len(connection.posted))
        connection.send(reports[3])
        connection.post(reports[4])
        connection.send(reports[5])
        assert frames.push(ours.recv(1 << 20)) == reports[2:]
        ours.close()
        connection.post(reports[0])
        with pytest.raises(ConnectionClosed):
            connection.sent(3)


# ---- Steps in a row ----


@dataclass
class Watch:
    """Looks on while an engine runs its steps, and can stop it before one."""

    steps: list[Step] = field(default_factory=list)
    interruptions: list[Interruption] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    stop_at: Callable[[Step], bool] = lambda step: False
    stopped: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    @staticmethod
    def over(monkeypatch: pytest.MonkeyPatch, stop_at: Callable[[Step], bool] = lambda step: False) -> Watch:
        watch, execute = Watch(stop_at=stop_at), Executor.execute

        def watched(executor: Executor, step: Step, interruption: Interruption) -> Outcome:
            if not watch.stopped.is_set() and watch.stop_at(step):
                watch.stopped.set()
                assert watch.go_on.wait(20)
            outcome = execute(executor, step, interruption)
            watch.steps.append(step)
            watch.interruptions.append(interruption)
            watch.outcomes.append(outcome)
            return outcome

        monkeypatch.setattr(Executor, "execute", watched)
        return watch

    @property
    def times(self) -> list[int]:
        """How often each step was run in a row."""
        return [len(outcome.ended) for outcome in self.outcomes]


@needs_kernels
@pytest.mark.parametrize("message", ["submit", "abort"])
def test_what_arrives_is_taken_up_after_the_step_that_runs(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    watch = Watch.over(monkeypatch, lambda step: step.repeats == MOST_STEPS)
    frontend.send(endless(1, [5, 6, 7]), endless(2, [8, 9], sampling=GREEDY))
    assert watch.stopped.wait(20)
    place = len(watch.steps)
    frontend.send(endless(3, [10, 11, 12]) if message == "submit" else Abort(2))
    watch.go_on.set()
    while len(watch.steps) < place + 4:
        time.sleep(0.001)
    assert (watch.steps[place].repeats, watch.times[place]) == (MOST_STEPS, 1)
    keys = [{chunk.sequence.request.key for chunk in step.chunks} for step in watch.steps[place:]]
    assert keys[0] == {1, 2}
    assert keys[1] == keys[2] == ({1, 2, 3} if message == "submit" else {1})
    while MOST_STEPS not in watch.times[place + 1 :]:  # nobody says anything any more
        time.sleep(0.001)
    frontend.send(Abort(1), Abort(2), Abort(3))


@needs_kernels
def test_a_run_ends_where_there_is_something_to_tell(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine's speed."""
    gap, told, sent = 0.001, list[StepDone](), set[int]()
    monkeypatch.setattr(engine_module, "message_gap", lambda streams: gap)
    hold, send, post = EngineConnection.hold, EngineConnection.send, EngineConnection.post

    def watched_hold(connection: EngineConnection, report: StepDone) -> None:
        told.append(report)
        hold(connection, report)

    def watched_send(connection: EngineConnection, report: StepDone) -> None:
        sent.add(id(report))
        send(connection, report)  # which holds it first

    def watched_post(connection: EngineConnection, report: StepDone) -> None:
        sent.add(id(report))
        post(connection, report)  # which does so too

    monkeypatch.setattr(EngineConnection, "hold", watched_hold)
    monkeypatch.setattr(EngineConnection, "send", watched_send)
    monkeypatch.setattr(EngineConnection, "post", watched_post)
    frontend.send(submission(1, [5, 6, 7], 1000, context=ContextWindow("roll", 4, 60), max_length=10**9))
    frontend.read_until_end(1)
    assert sum(len(report.at) for report in told) == 1000
    assert [report.at for report in frontend.reports] == [report.at for report in told]
    assert all(b.at[0] - b.stats.step_seconds >= a.at[-1] - 1e-9 for a, b in itertools.pairwise(told)), "they overlap"
    reported_at = -math.inf
    for report in told:
        due = max(report.at[0] - report.stats.step_seconds, reported_at + gap)
        assert all(moment < due for moment in report.at[:-1]), "a step has begun when a report was due"
        if id(report) in sent:
            reported_at = report.at[-1]
        else:
            assert report.at[-1] < due, "a report was due and has not been sent"


@needs_kernels
def test_what_is_posted_arrives_once_and_in_order_whatever_comes_next(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, single steps of a company with penalties, aborts of all that runs, rest."""
    posts, post = [0], EngineConnection.post

    def counted(connection: EngineConnection, report: StepDone) -> None:
        posts[0] += 1
        post(connection, report)

    monkeypatch.setattr(EngineConnection, "post", counted)
    penalised = msgspec.structs.replace(GREEDY, presence_penalty=0.5)
    wishes = [
        (prompt, 60 + 7 * index, GREEDY if index % 3 else penalised)
        for index, prompt in enumerate([[5, 6, 7], [8, 9], [10] * 30, [11, 12], [13], [5, 6, 8], [14] * 50])
    ]
    expected = []
    for key, (prompt, count, sampling) in enumerate(wishes):  # alone, all of it told at the end
        frontend.send(submission(key, prompt, count, sampling=sampling))
        frontend.read_until_end(key)
        expected.append([token for one in frontend.progress if one.key == key for token in one.tokens])
    monkeypatch.setattr(engine_module, "message_gap", lambda streams: 0.0003)
    before = posts[0]
    for first in range(10, 70, 20):
        frontend.send(endless(first + 10, [5, 6, 7]))
        for key, (prompt, count, sampling) in enumerate(wishes, first):
            frontend.send(submission(key, prompt, count, sampling=sampling))
            frontend.read_until(first + 10, frontend.count(first + 10) + 3)
        for key in range(first, first + len(wishes)):
            frontend.read_until_end(key)
        frontend.read_until(first + 10, frontend.count(first + 10) + 30)
        frontend.send(Abort(first + 10))
        for key, tokens in enumerate(expected, first):
            assert [token for one in frontend.progress if one.key == key for token in one.tokens] == tokens
    moments = [moment for report in frontend.reports for moment in report.at]
    assert moments == sorted(moments)
    assert posts[0] > before + 10


@needs_kernels
def test_a_deadline_ends_a_run(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch.over(monkeypatch)
    far, near = time.monotonic() + 3000, time.monotonic() + 0.05
    frontend.send(endless(1, [5, 6, 7], deadline=far))
    frontend.read_until(1, 1)
    frontend.send(endless(2, [8, 9], time_limit_at=near))
    last = frontend.read_until_end(2)
    assert last.finished is not None
    assert last.finished.kind == "time_limit"
    for step, interruption, outcome in zip(watch.steps, watch.interruptions, watch.outcomes, strict=False):
        limited = any(chunk.sequence.request.key == 2 for chunk in step.chunks)
        assert interruption.until <= (near if limited else far)
        assert all(moment < near for moment in outcome.ended[:-1] if limited)
    assert far in {interruption.until for interruption in watch.interruptions}
    frontend.send(Abort(1))


@needs_kernels
def test_single_steps_while_a_constraint_is_compiled(
    engine: Engine, frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever wants to join is looked for between two steps."""
    watch, compiled = Watch.over(monkeypatch), Future[Any]()
    monkeypatch.setattr(engine._constraints, "prepare", lambda constraint: compiled)
    frontend.send(endless(1, [5, 6, 7]))
    frontend.read_until(1, 1)
    while MOST_STEPS not in watch.times:
        time.sleep(0.001)
    frontend.send(endless(2, [8, 9], constraint=Constraint("regex", "[a-z]+")))
    while not engine._preparing:
        time.sleep(0.001)
    begin = len(watch.steps) + 1
    while len(watch.steps) < begin + 20:
        time.sleep(0.001)
    assert {step.repeats for step in watch.steps[begin : begin + 20]} == {1}
    compiled.set_exception(ValueError("no such constraint"))
    assert frontend.read_until_end(2).finished is not None
    begin = len(watch.steps) + 1
    while MOST_STEPS not in watch.times[begin:]:
        time.sleep(0.001)
    frontend.send(Abort(1))
