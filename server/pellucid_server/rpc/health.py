"""grpc.health.v1: readiness under "" and every service's name, the process itself under "liveness"."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pellucid_server.readiness import Readiness

SERVICE = health.SERVICE_NAME
LIVENESS = "liveness"


class Health:
    """Keeps the health service in step with readiness."""

    def __init__(self, readiness: Readiness, services: Sequence[str]) -> None:
        self._servicer = health.aio.HealthServicer()
        self._names = ("", *services)
        self._readiness = readiness
        self._changed = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def run(self) -> None:
        """Carries every change of readiness to checkers and watchers, for as long as the server lives."""
        await self._servicer.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        self._readiness.listen(lambda _: self._changed.set())
        while True:
            self._changed.clear()
            await self.update()
            await self._changed.wait()

    async def update(self) -> None:
        """Sets every name to what readiness says now."""
        ready = self._readiness.is_ready
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._servicer.set(name, status)
