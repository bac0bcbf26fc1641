"""grpc.health.v1 from the first moment to the last, by Check and by Watch."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pellucid_testing.calls import generate
from pellucid_testing.scripted_engine import Script
from pellucid_testing.server import start_server

SERVICES = ("InferenceService", "TokenizerService", "ModelService", "ServerService")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_readiness_and_liveness_over_a_life(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    script = Script(lives=str(tmp_path / "lives"), hang_after_steps=[0], step_seconds=0.02)
    server = start_server(tmp_path, program=script.program())
    try:
        stub: Any = health_pb2_grpc.HealthStub(server.channel())

        def status(name: str) -> int:
            return int(stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status)

        names = ("", *(f"pellucid.v1.{name}" for name in SERVICES))
        assert {status(name) for name in names} == {NOT_SERVING}
        assert status("liveness") == SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=""))
        assert next(watch).status == NOT_SERVING
        os.kill(server.engine_that_stopped(), signal.SIGCONT)
        assert next(watch).status == SERVING
        assert {status(name) for name in names} == {SERVING}
        with pytest.raises(grpc.RpcError) as caught:
            status("pellucid.v1.Nothing")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        channel = server.channel()
        busy = threading.Thread(target=generate, args=(channel, [5]), kwargs={"stopping": {"max_new_tokens": 20}})
        with server.engine_stopped():
            busy.start()
            server.wait_for_metric("pellucid_requests_waiting", 1)
            server.process.send_signal(signal.SIGTERM)
            assert next(watch).status == NOT_SERVING
            assert {status(name) for name in names} == {NOT_SERVING}
            assert status("liveness") == SERVING
        busy.join(30)
        assert server.process.wait(100) == 0
    finally:
        server.close()
