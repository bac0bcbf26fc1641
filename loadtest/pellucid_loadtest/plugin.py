"""Locust's side: which of its events starts, ends and reports a run.

    test_start          the conductor asks the server for its model; each process gets a session with its share
    spawning_complete   all users run: the warm-up begins, and so do the arrivals of an open loop
    test_stopping       every session drains, and the records come together
    test_stop           the report is written; `process_exit_code` is set

The conductor is the only process, or the master of several. It sends a plan to each worker process before its users
start, and a drain at the end, which every worker answers with the records that it has not sent yet.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gevent
from gevent.event import Event
from locust import events
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from pellucid_loadtest.console import table
from pellucid_loadtest.options import LoadOptions, add_flags, described, load_options
from pellucid_loadtest.records import Record, now, packed, unpacked
from pellucid_loadtest.report import Run, build_report
from pellucid_loadtest.sending import Target, TargetError, UserChannel
from pellucid_loadtest.session import LEAVE_SECONDS, Session, Share
from pellucid_loadtest.users import GenerateUser
from pellucid_loadtest.workloads import ModelShape
from pellucid_loadtest.writing import write_report

LOGGER = logging.getLogger("pellucid_loadtest")

PLAN, DRAIN, RECORDS = "pellucid_plan", "pellucid_drain", "pellucid_records"
DELIVERY_SECONDS = 5.0
"""How long worker processes may take to send their records, after the drain."""
NO_RESULT = 2
"""Exit code for bad options, no server, or a run that ended in its warm-up."""


def install() -> None:
    """Adds the flags and all listeners. The locustfile calls it once."""
    events.init_command_line_parser.add_listener(lambda parser, **_: add_flags(parser))
    events.init.add_listener(_on_init)


def _on_init(environment: Environment, runner: Any, web_ui: Any = None, **_: Any) -> None:
    # Imports take seconds during which gevent's clock stands still: `-t 10s` would end that much too early.
    gevent.get_hub().loop.update_now()
    if isinstance(runner, WorkerRunner):
        Worker(environment, runner)
    else:
        Conductor(environment, runner, web_ui)


@dataclass
class _Progress:
    """How far the conductor's run is; `target` is set once the server has answered."""

    begun: float = field(default_factory=now)
    target: Target | None = None
    options: LoadOptions | None = None
    flags: dict[str, str] = field(default_factory=dict)
    all_users_at: float | None = None
    stopping_at: float | None = None
    records: list[Record] = field(default_factory=list)
    awaited: set[str] = field(default_factory=set)
    delivered: Event = field(default_factory=Event)


class Conductor:
    """Runs the test from the only process, or from the master."""

    def __init__(self, environment: Environment, runner: Any, web_ui: Any) -> None:
        self._environment = environment
        self._runner = runner
        self._progress = _Progress()
        self._page: Path | None = None
        self._table: str | None = None
        self._adjust_locust()
        hooks = environment.events
        hooks.test_start.add_listener(self._on_test_start)
        hooks.spawning_complete.add_listener(self._on_spawning_complete)
        hooks.test_stopping.add_listener(self._on_test_stopping)
        hooks.test_stop.add_listener(self._on_test_stop)
        hooks.worker_report.add_listener(self._on_worker_report)
        hooks.quitting.add_listener(self._on_quitting)
        hooks.quit.add_listener(self._on_quit)
        if isinstance(runner, MasterRunner):
            runner.register_message(RECORDS, self._on_records)
        if web_ui is not None:
            web_ui.app.add_url_rule("/report", "pellucid_report", self._latest_report)

    def _adjust_locust(self) -> None:
        """Users are what --concurrency limits, though --users wins; users that a ramp-down takes away end in peace."""
        parsed, options = self._environment.parsed_options, self._options()
        self._environment.stop_timeout = self._environment.stop_timeout or options.drain
        if parsed is not None and options.open_loop and parsed.num_users is None:
            parsed.num_users = options.concurrency
            parsed.spawn_rate = parsed.spawn_rate or min(options.concurrency, 100)

    def _on_test_start(self, **_: Any) -> None:
        self._progress = _Progress()
        GenerateUser.session = None
        self._environment.process_exit_code = NO_RESULT
        try:
            self._begin(self._options())
        except (ValueError, TargetError) as error:
            LOGGER.error("%s", error)
            self._progress.target = None
            gevent.spawn(self._runner.quit if self._headless else self._runner.stop)

    def _begin(self, options: LoadOptions) -> None:
        """Looks at the server and starts this process's session, or tells the workers their parts."""
        host = self._environment.host
        if not host or "/" in host:
            raise ValueError(f"--host: {host or ''!r} is not HOST:PORT, such as 127.0.0.1:50051")
        channel = UserChannel(host, options)
        try:
            target = channel.target(options.model)
        finally:
            channel.close()
        if isinstance(self._runner, MasterRunner):
            self._plan_for_workers(options, target.model)
        else:
            GenerateUser.session = Session(options, target.model, Share())
        self._progress.target = target
        self._progress.options = options
        self._progress.flags = described(vars(self._environment.parsed_options))

    def _plan_for_workers(self, options: LoadOptions, model: ModelShape) -> None:
        workers = sorted(client.id for client in self._runner.clients.ready)
        users = self._runner.target_user_count
        if options.open_loop and users < len(workers):
            raise ValueError(f"--users: {users} is fewer than the {len(workers)} processes; each needs one to send")
        self._progress.awaited = set(workers)
        for index, worker in enumerate(workers):
            plan = {"index": index, "count": len(workers), "model": asdict(model)}
            self._runner.send_message(PLAN, plan, client_id=worker)

    def _on_spawning_complete(self, **_: Any) -> None:
        self._progress.all_users_at = self._progress.all_users_at or now()
        if GenerateUser.session is not None:
            GenerateUser.session.start()

    def _on_test_stopping(self, **_: Any) -> None:
        progress = self._progress
        progress.stopping_at = progress.stopping_at or now()
        if GenerateUser.session is not None:
            GenerateUser.session.drain()
            progress.records += GenerateUser.session.take_records()
        if progress.awaited and progress.options is not None:
            self._runner.send_message(DRAIN)
            progress.delivered.wait(progress.options.drain + LEAVE_SECONDS + DELIVERY_SECONDS)

    def _on_test_stop(self, **_: Any) -> None:
        progress = self._progress
        if progress.target is None or progress.options is None:
            return
        options = progress.options
        ended = progress.stopping_at or now()
        warm_until = ended if progress.all_users_at is None else min(ended, progress.all_users_at + options.warm_up)
        run = Run(
            address=str(self._environment.host),
            users=self._runner.target_user_count,
            flags=progress.flags,
            begun=progress.begun,
            warm_until=warm_until,
            ended=ended,
            missing_processes=len(progress.awaited),
        )
        report = build_report(run, options, progress.target, progress.records)
        folder = write_report(report, run, progress.records, Path(options.output_folder))
        self._page = folder / "report.html"
        self._table = f"{table(report)}\nReport: {self._page}"
        passed = 0 if report["slo"]["passed"] else 1
        self._environment.process_exit_code = passed if report["requests"]["measured"] else NO_RESULT
        if not self._headless:
            print(self._table, flush=True)

    def _on_quitting(self, **_: Any) -> None:
        """Ctrl-C and SIGTERM come here while the test still runs: it ends as its time limit would end it."""
        if self._progress.target is not None and self._progress.stopping_at is None:
            self._runner.quit()

    def _on_quit(self, **_: Any) -> None:
        """After Locust's own tables."""
        if self._headless and self._table is not None:
            print(self._table, flush=True)

    def _on_worker_report(self, data: dict[str, Any], **_: Any) -> None:
        self._progress.records += unpacked(data.pop(RECORDS, []))

    def _on_records(self, msg: Any, **_: Any) -> None:
        """The last records of a worker."""
        self._progress.records += unpacked(msg.data["records"])
        self._progress.awaited.discard(msg.node_id)
        if not self._progress.awaited:
            self._progress.delivered.set()

    def _latest_report(self) -> Any:
        """The web page's /report."""
        if self._page is None:
            return "No report yet: it is written when a test stops.", 404
        return self._page.read_text(encoding="utf-8")

    def _options(self) -> LoadOptions:
        return load_options(vars(self._environment.parsed_options))

    @property
    def _headless(self) -> bool:
        return bool(self._environment.parsed_options and self._environment.parsed_options.headless)


class Worker:
    """Runs a share of the test in a worker process."""

    def __init__(self, environment: Environment, runner: WorkerRunner) -> None:
        self._environment = environment
        self._runner = runner
        self._plan: dict[str, Any] | None = None
        hooks = environment.events
        hooks.test_start.add_listener(self._on_test_start)
        hooks.spawning_complete.add_listener(self._on_spawning_complete)
        hooks.report_to_master.add_listener(self._on_report_to_master)
        hooks.quitting.add_listener(self._on_quitting)
        runner.register_message(PLAN, self._on_plan)
        runner.register_message(DRAIN, self._on_drain, concurrent=True)

    def _on_plan(self, msg: Any, **_: Any) -> None:
        self._plan = msg.data

    def _on_test_start(self, **_: Any) -> None:
        plan, self._plan = self._plan, None
        GenerateUser.session = None
        if plan is not None:
            model = ModelShape(**{**plan["model"], "eos_token_ids": tuple(plan["model"]["eos_token_ids"])})
            options = load_options(vars(self._environment.parsed_options))
            GenerateUser.session = Session(options, model, Share(plan["index"], plan["count"]))

    def _on_spawning_complete(self, **_: Any) -> None:
        if GenerateUser.session is not None:
            GenerateUser.session.start()

    def _on_report_to_master(self, data: dict[str, Any], **_: Any) -> None:
        if GenerateUser.session is not None:
            data[RECORDS] = packed(GenerateUser.session.take_records())

    def _on_drain(self, **_: Any) -> None:
        """Ends this part of the run and hands in what is left."""
        if GenerateUser.session is not None:
            GenerateUser.session.drain()
            self._runner.send_message(RECORDS, {"records": packed(GenerateUser.session.take_records())})

    def _on_quitting(self, **_: Any) -> None:
        """Ctrl-C reaches worker processes too."""
        self._on_drain()
