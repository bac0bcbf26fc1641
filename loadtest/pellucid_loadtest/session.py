"""One run inside one process: hands out requests to users, keeps a record of each, and drains at the end.

    closed loop    take() gives the next request at once
    open loop      a dispatcher puts requests into a queue when they arrive; take() waits for one
    drain()        no new arrivals; those that have arrived are still sent; after the drain time what still runs is
                   cancelled and becomes UNFINISHED, what still waits becomes UNSENT

A session sends requests share, share + shares, share + 2 * shares, … of its workload, so that the sessions of all
processes together send each request once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import gevent
import grpc
from gevent.event import Event
from gevent.queue import Queue

from pellucid_loadtest.arrivals import arrival_times
from pellucid_loadtest.options import LoadOptions
from pellucid_loadtest.records import OK, UNFINISHED, UNSENT, Record, now
from pellucid_loadtest.sending import Failure, UserChannel, failure, generate_request
from pellucid_loadtest.workloads import ModelShape, Request, Workload

LEAVE_SECONDS = 2.0
"""How long users may take to see that their calls are cancelled, and to leave."""
_END = None


@dataclass(frozen=True)
class Share:
    """Which part of the run is this process's: every `count`th request, from `index` on."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class Work:
    """A request and when it was due; `arrival` None means when it is sent."""

    request: Request
    arrival: float | None


class Session:
    """In go users that take and send; out come records."""

    def __init__(self, options: LoadOptions, model: ModelShape, share: Share) -> None:
        self.options = options
        self.model = model
        self.warm_until: float | None = None
        """When the warm-up ends; None until all users run."""
        self._workload = Workload(options, model)
        self._share = share
        self._records: list[Record] = []
        self._numbers = itertools.count(share.index, share.count)
        self._queue: Queue[Work | None] = Queue()
        self._dispatcher: gevent.Greenlet[..., None] | None = None
        self._live: set[Any] = set()
        self._busy = 0
        self._closed = False
        self._cut = False
        self._idle = Event()
        self._idle.set()
        self._users = 0
        self._empty = Event()
        self._empty.set()

    def start(self) -> None:
        """All users run: the warm-up begins, and so do the arrivals of an open loop."""
        if self.warm_until is not None or self._closed:
            return
        begin = now()
        self.warm_until = begin + self.options.warm_up
        if self.options.open_loop:
            self._dispatcher = gevent.spawn(self._dispatch, begin)

    def enter(self) -> None:
        """A user comes; `leave` must follow."""
        self._users += 1
        self._empty.clear()

    def leave(self) -> None:
        """A user has closed its channel."""
        self._users -= 1
        if not self._users:
            self._empty.set()

    def take(self) -> Work | None:
        """The next request to send, and `send` must follow; None when there is nothing more to do."""
        if not self.options.open_loop:
            work = None if self._closed else Work(self._workload.request(next(self._numbers)), None)
        else:
            work = self._queue.get()
            while work is not _END and self._cut:
                self._keep(_unsent(work))
                work = self._queue.get()
            if work is _END:
                self._queue.put(_END)  # For the other users.
        self._busy += work is not None
        self._settle()
        return work

    def send(self, channel: UserChannel, work: Work) -> Record:
        """Sends one request, reads its stream to the end, and returns the record that it keeps."""
        times: list[float] = []
        counts: list[int] = []
        end = Failure(UNFINISHED, "", "")
        call: Any = None
        sent = now()
        try:
            message = generate_request(work.request, self.model.name, self.options)
            sent = now()
            timeout, metadata = self.options.request_timeout, channel.metadata
            call = channel.inference.Generate(message, timeout=timeout, metadata=metadata)
            self._live.add(call)
            for response in call:
                if count := sum(len(output.token_ids) for output in response.outputs):
                    times.append(now())
                    counts.append(count)
            end = Failure(OK, "", "")
        except grpc.RpcError as error:
            end = end if self._cut else failure(error, channel.address)
        finally:  # Locust ends users with an exception, too.
            ended = now()
            if call is not None:
                call.cancel()
            record = Record(
                index=work.request.index,
                arrival=sent if work.arrival is None else work.arrival,
                sent=sent,
                ended=ended,
                code=end.code,
                reason=end.reason,
                message=end.message,
                prompt_tokens=len(work.request.prompt),
                clipped=work.request.clipped,
                token_times=tuple(times),
                token_counts=tuple(counts),
            )
            self._keep(record)
            self._live.discard(call)
            self._busy -= 1
            self._settle()
        return record

    def drain(self) -> None:
        """Ends the run; returns when every request has its record. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._dispatcher is not None:
            self._dispatcher.kill()
        self._queue.put(_END)
        self._settle()
        if not self._idle.wait(self.options.drain):
            self._cut = True
            for call in list(self._live):
                call.cancel()
        # Locust kills users that are still there, and a channel that is killed while it closes hangs the process.
        self._empty.wait(LEAVE_SECONDS)
        while (work := self._queue.get()) is not _END:  # Where no user is left to take it.
            self._keep(_unsent(work))
        self._queue.put(_END)

    def take_records(self) -> list[Record]:
        """The records since the last call."""
        records, self._records = self._records, []
        return records

    def _dispatch(self, begin: float) -> None:
        for index, offset in enumerate(arrival_times(self.options)):
            if index % self._share.count == self._share.index:
                work = Work(self._workload.request(index), begin + offset)
                while (wait := begin + offset - now()) > 0:  # A timer may fire early: gevent's clock is a cached one.
                    gevent.sleep(wait)
                self._queue.put(work)
                self._settle()

    def _keep(self, record: Record) -> None:
        self._records.append(record)

    def _settle(self) -> None:
        """Idle is when no request is under way and, at the end, none waits."""
        waiting = self._queue.qsize() > (1 if self._closed else 0)
        if self._busy or waiting:
            self._idle.clear()
        else:
            self._idle.set()


def _unsent(work: Work) -> Record:
    moment = now()
    return Record(
        index=work.request.index,
        arrival=moment if work.arrival is None else work.arrival,
        sent=moment,
        ended=moment,
        code=UNSENT,
        reason="",
        message="",
        prompt_tokens=len(work.request.prompt),
        clipped=work.request.clipped,
    )
