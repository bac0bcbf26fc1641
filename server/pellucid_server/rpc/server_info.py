"""ServerService: the server itself, and what it is doing now."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from pellucid.v1 import server_pb2
from pellucid_server.engine.messages import Ready
from pellucid_server.errors import ModelLoading
from pellucid_server.readiness import Readiness
from pellucid_server.requests import RequestTable
from pellucid_server.rpc.calls import Call, Calls
from pellucid_server.rpc.messages import fill_duration
from pellucid_server.settings import Settings

SERVICE = server_pb2.DESCRIPTOR.services_by_name["ServerService"].full_name
SCHEMA_REVISION = 2


@dataclass(frozen=True)
class ServerService:
    """The handlers. `engine` gives what the latest engine said when it was ready; None before the first."""

    version: str
    instance_id: str
    settings: Settings
    readiness: Readiness
    table: RequestTable
    engine: Callable[[], Ready | None]
    started_at: float

    def handlers(self, calls: Calls) -> dict[str, grpc.RpcMethodHandler[bytes, bytes]]:
        return {
            "GetServerInfo": calls.unary("GetServerInfo", server_pb2.GetServerInfoRequest, self.get_server_info),
            "GetLoad": calls.unary("GetLoad", server_pb2.GetLoadRequest, self.get_load),
        }

    async def get_server_info(
        self, message: server_pb2.GetServerInfoRequest, call: Call
    ) -> server_pb2.GetServerInfoResponse:
        engine = self.engine()
        if engine is None:
            raise ModelLoading("the model is still loading; try again shortly")
        info = server_pb2.GetServerInfoResponse(
            version=self.version,
            schema_revision=SCHEMA_REVISION,
            instance_id=self.instance_id,
            max_running_requests=self.settings.max_running,
            max_queued_requests=self.settings.max_queue,
            max_batched_tokens=engine.max_step_tokens,
            kv_block_size=engine.kv_block_size,
            kv_block_count=engine.kv_block_count,
            device=engine.device,
            dtype=engine.dtype,
            kernels=engine.kernels,
            batch_invariant=engine.batch_invariant,
        )
        fill_duration(info.uptime, time.monotonic() - self.started_at)
        return info

    async def get_load(self, message: server_pb2.GetLoadRequest, call: Call) -> server_pb2.GetLoadResponse:
        stats, engine = self.table.stats, self.engine()
        return server_pb2.GetLoadResponse(
            running_request_count=self.table.running_count,
            queued_request_count=self.table.waiting_count,
            used_kv_block_count=stats.used_blocks if stats is not None else 0,
            kv_block_count=engine.kv_block_count if engine is not None else 0,
            running_token_count=stats.running_tokens if stats is not None else 0,
            queued_token_count=stats.waiting_tokens if stats is not None else 0,
            draining=self.readiness.is_draining,
        )
