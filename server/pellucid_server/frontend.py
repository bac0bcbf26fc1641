"""The frontend process: puts its parts together, starts them in order, and takes them down in order.

Start: gRPC port (health answers NOT_SERVING), metrics port, tokenizer, engine, then SERVING.
Stop, on SIGTERM or SIGINT: NOT_SERVING and no new requests, running streams to their end or to the drain time, gRPC,
engine. A second signal ends everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pellucid_model.tokenizers import Tokenizer, TokenizerError, load_chat_template, load_tokenizer
from pellucid_server.chat import ChatPrompter
from pellucid_server.checkpoint_info import CheckpointInfo
from pellucid_server.delivery import Patience
from pellucid_server.engine.messages import Configure, Ready, StepDone
from pellucid_server.engine_link import ENGINE_COMMAND, EngineLink
from pellucid_server.errors import StartError
from pellucid_server.logs import log
from pellucid_server.metrics import Metrics
from pellucid_server.ports import bind_grpc, serve_metrics
from pellucid_server.readiness import Readiness
from pellucid_server.requests import RequestTable
from pellucid_server.rpc.calls import Calls
from pellucid_server.rpc.directory import Directory
from pellucid_server.rpc.gate import Callers, Gate
from pellucid_server.rpc.health import Health
from pellucid_server.rpc.inference import InferenceService
from pellucid_server.rpc.models import ModelService
from pellucid_server.rpc.server import SERVICES, Methods, Service, add_services, new_server
from pellucid_server.rpc.server_info import ServerService
from pellucid_server.rpc.tokenizer import TokenizerService
from pellucid_server.security import exposure, read_security
from pellucid_server.served import ServedModel, served_model
from pellucid_server.settings import Settings
from pellucid_server.settling import settle
from pellucid_server.summary import Addresses, log_summary
from pellucid_server.text.stop_ids import StopIds
from pellucid_server.text_pool import TextPool

GC_THRESHOLDS = 10_000, 20, 50
"""How much must have been made before garbage is looked for: what a token leaves behind is freed without that."""
STOP_SECONDS = 0.2
"""Grace for calls that are still open when the drain is over, such as health watchers."""
SIGNAL_GAP = 0.2
"""Signals closer than this count as one: some senders reach both a process and its group."""


@dataclass(frozen=True)
class Package:
    """What the frontend was told to serve, and by which engine program."""

    settings: Settings
    checkpoint: CheckpointInfo
    version: str
    engine_command: Sequence[str] = ENGINE_COMMAND


class Frontend:
    """All parts of one server. `run` is its life. Raises StartError where its TLS or token files do not work."""

    def __init__(self, package: Package) -> None:
        settings = package.settings
        self._package = package
        self._settings = settings
        self._instance_id = secrets.token_hex(6)
        self._started_at = time.monotonic()
        self._ready: Ready | None = None
        self._tokenizer: Tokenizer | None = None
        self._longest_token = 0
        self._stop_ids: StopIds | None = None
        self._chat: ChatPrompter | None = None
        self._link = EngineLink(self, package.engine_command, settings.engine_timeout_seconds)
        self._metrics = Metrics(package.checkpoint.name, lambda: self._link.pid)
        self._readiness = Readiness()
        self._readiness.listen(lambda ready: self._metrics.server_ready.set(ready))
        self._directory = Directory(self._readiness)
        max_live = settings.max_running + settings.max_queue
        patience = Patience(settings.slow_reader_seconds, settings.slow_reader_bytes)
        self._table = RequestTable(self._link, self._readiness, self._metrics, max_live, patience, settings.max_running)
        self._pool, self._checks = TextPool(max_live), TextPool(max_live)
        self._health = Health(self._readiness, SERVICES)
        self._security = read_security(settings)
        self._callers = Callers(self._security.tokens)
        self._calls = Calls(self._instance_id, self._metrics, self._callers.identify)
        self._came_up = asyncio.Event()
        self._stop = asyncio.Event()
        self._stopped_at: float | None = None

    async def run(self) -> None:
        """Serves until a signal. Raises StartError where it cannot start."""
        self._handle_signals()
        gates = (Gate(self._callers, self._calls, self._metrics),) if self._security.tokens is not None else ()
        server = new_server(self._settings.max_running + self._settings.max_queue, gates)
        port = bind_grpc(server, self._settings.listen, self._security.credentials())
        metrics_server = serve_metrics(self._settings.metrics_listen, self._metrics.registry)
        addresses = Addresses.bound(self._settings, port, metrics_server)
        add_services(server, self._health, self._handlers())
        await self._health.update()
        await server.start()
        log(logging.INFO, "listening", grpc=addresses.grpc, metrics=addresses.metrics or "off")
        health = asyncio.create_task(self._health.run())
        engine = asyncio.create_task(self._start_engine())
        try:
            if await self._until_up(engine):
                self._check_policy()
                self._announce(addresses)
                settle()
                gc.set_threshold(*GC_THRESHOLDS)
                await self._until_stopped(engine)
            await self._drain()
        finally:
            health.cancel()
            await server.stop(STOP_SECONDS)
            engine.cancel()
            with contextlib.suppress(asyncio.CancelledError, StartError):
                await engine
            self._pool.close()
            self._checks.close()

    # Engine events; see engine_link.EngineEvents.

    def engine_up(self, ready: Ready) -> None:
        self._ready = ready
        self._directory.set_model(self._served_model(ready))
        self._metrics.engine.ready(ready, self._package.version)
        streams = self._table.engine_up()
        self._readiness.engine_up()
        if self._came_up.is_set():
            log(logging.INFO, "the engine is back", streams=streams)
        self._came_up.set()

    def engine_step(self, step: StepDone) -> None:
        self._table.engine_step(step)
        self._metrics.engine.step(step, time.time())

    def engine_down(self) -> None:
        self._readiness.engine_down()
        self._metrics.engine.down()
        self._table.engine_down()

    def engine_restarting(self, reason: str) -> None:
        self._metrics.engine.restarts[reason].inc()

    def _served_model(self, ready: Ready) -> ServedModel:
        return served_model(
            self._settings,
            self._package.checkpoint,
            self._tokenizer,
            self._longest_token,
            self._stop_ids,
            ready,
            self._chat,
        )

    def _handlers(self) -> dict[str, Methods]:
        info = ServerService(
            version=self._package.version,
            instance_id=self._instance_id,
            settings=self._settings,
            readiness=self._readiness,
            table=self._table,
            engine=lambda: self._ready,
            started_at=self._started_at,
        )
        services: tuple[Service, ...] = (
            InferenceService(self._directory, self._table, self._pool, self._checks),
            TokenizerService(self._directory, self._pool),
            ModelService(self._directory),
            info,
        )
        return {name: service.handlers(self._calls) for name, service in zip(SERVICES, services, strict=True)}

    async def _start_engine(self) -> None:
        """The tokenizer first, so that a bad one is told before the model's long load."""
        try:
            self._tokenizer = await asyncio.to_thread(load_tokenizer, self._package.checkpoint.files)
            self._longest_token = await asyncio.to_thread(_longest_token, self._tokenizer)
            self._stop_ids = None if self._tokenizer is None else StopIds(self._tokenizer)
            self._chat = await asyncio.to_thread(_chat_prompter, self._package.checkpoint.files, self._tokenizer)
        except TokenizerError as error:
            raise StartError(str(error)) from None
        await self._link.run(_configure(self._package, self._tokenizer))

    def _check_policy(self) -> None:
        """Raises StartError for a default policy with which every request would be refused."""
        if self._settings.context_overflow == "roll" and not self._directory.model().can_roll:
            raise StartError(
                "--context-overflow roll: this model's positions are absolute, and a window rolls only with rotary, "
                "ALiBi or no positions; use auto or reencode"
            )

    async def _until_up(self, engine: asyncio.Task[None]) -> bool:
        """False where a signal came first. Raises what ended the engine's start."""
        up, stop = asyncio.create_task(self._came_up.wait()), asyncio.create_task(self._stop.wait())
        await asyncio.wait((up, stop, engine), return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        stop.cancel()
        if engine.done():
            await engine
        return self._came_up.is_set() and not self._stop.is_set()

    async def _until_stopped(self, engine: asyncio.Task[None]) -> None:
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait((stop, engine), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if engine.done():
            await engine

    async def _drain(self) -> None:
        log(logging.INFO, "shutting down", drain_seconds=self._settings.drain_seconds)
        self._readiness.drain()
        await self._health.update()
        try:
            async with asyncio.timeout(self._settings.drain_seconds):
                await self._table.wait_until_released()
        except TimeoutError:
            log(logging.WARNING, "drain time is over; ending the requests that are left")
            self._table.shut_down()
            # Their handlers write the final statuses in this time.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self._table.wait_until_released()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._security.tokens is not None:
            loop.add_signal_handler(signal.SIGHUP, self._security.tokens.reload)

    def _on_signal(self, number: int) -> None:
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
            self._stop.set()
        elif time.monotonic() - self._stopped_at > SIGNAL_GAP:
            self._link.kill()
            os._exit(128 + number)

    def _announce(self, addresses: Addresses) -> None:
        if self._ready is not None:
            log_summary(self._settings, self._package.checkpoint, self._directory.model(), self._ready, addresses)
            for warning in exposure(self._settings):
                log(logging.WARNING, warning)


def _longest_token(tokenizer: Tokenizer | None) -> int:
    """In bytes."""
    if tokenizer is None:
        return 0
    return max((len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size)), default=0)


def _chat_prompter(checkpoint: Path, tokenizer: Tokenizer | None) -> ChatPrompter | None:
    """None where there is no chat template, no tokenizer for it, or, with a warning, one that is not valid."""
    template = load_chat_template(checkpoint)
    if template is None or tokenizer is None:
        return None
    try:
        return ChatPrompter(template, tokenizer)
    except ValueError as error:
        log(logging.WARNING, f"the chat template cannot be used, and chat is refused: {error}")
        return None


def _resolved(module: str | None) -> str:
    """FILE.py:CLASS with the file's whole path, "" for none."""
    if module is None:
        return ""
    file, _, name = module.rpartition(":")
    return f"{Path(file).expanduser().resolve()}:{name}"


def _configure(package: Package, tokenizer: Tokenizer | None) -> Configure:
    settings = package.settings
    return Configure(
        checkpoint=str(package.checkpoint.folder.resolve()),
        device=settings.device,
        dtype=settings.dtype,
        quantize=settings.quantize,
        kv_dtype=settings.kv_dtype,
        kv_cache_memory=settings.kv_cache_memory,
        kv_block_size=settings.kv_block_size,
        prefix_cache=settings.prefix_cache,
        speculative_tokens=settings.speculative_tokens,
        cuda_graphs=settings.cuda_graphs,
        max_context=settings.max_context,
        max_running=settings.max_running,
        max_step_tokens=settings.max_step_tokens,
        threads=settings.threads,
        module=_resolved(settings.module),
        tokenizer_size=tokenizer.vocab_size if tokenizer is not None else 0,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )
