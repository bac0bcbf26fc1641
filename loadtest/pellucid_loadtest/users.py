"""The Locust user: one client with a connection of its own that streams one answer after the other."""

from __future__ import annotations

from typing import ClassVar

import gevent
from locust import User, constant, task
from locust.exception import StopUser

from pellucid_loadtest.records import Record
from pellucid_loadtest.sending import UserChannel
from pellucid_loadtest.session import Session

FAILURE_PAUSE_SECONDS = 0.1
"""After a failure in a closed loop, so that users do not hammer a server that is down."""


class CallFailed(Exception):
    """A failed request as Locust counts it: equal text for all failures of one kind."""


class GenerateUser(User):
    """Sends what its process's session hands out."""

    wait_time = constant(0)
    session: ClassVar[Session | None] = None
    """Of the run in progress, the same for all users; None: there is nothing to do."""

    def on_start(self) -> None:
        self._channel = UserChannel(str(self.host), None if self.session is None else self.session.options)
        if self.session is not None:
            self.session.enter()
            self._channel.connect()

    @task
    def generate(self) -> None:
        session = self.session
        work = session.take() if session is not None else None
        if session is None or work is None:
            raise StopUser
        record = session.send(self._channel, work)
        self._tell_locust(record, session)
        if record.failed and not session.options.open_loop:
            gevent.sleep(FAILURE_PAUSE_SECONDS)

    def on_stop(self) -> None:
        self._channel.close()
        if self.session is not None:
            self.session.leave()

    def _tell_locust(self, record: Record, session: Session) -> None:
        """Rows for Locust's own tables and web page; the report is made from the records."""
        if not (record.ok or record.failed):
            return
        measured = session.warm_until is not None and record.arrival >= session.warm_until
        times = {"": record.e2e, "/ttft": record.ttft, "/tpot": record.tpot} if record.ok else {"": record.e2e}
        for suffix, seconds in times.items():
            if seconds is not None:
                self.environment.events.request.fire(
                    request_type="grpc",
                    name=f"Generate{suffix}" if measured else f"Generate{suffix} (warm-up)",
                    response_time=seconds * 1e3,
                    response_length=record.output_tokens,
                    exception=None if record.ok else CallFailed(f"{record.code} {record.reason}".strip()),
                    context={},
                )
