"""Someone else's gRPC client, which knows the API from reflection alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pellucid_testing.server import serve

BUF = Path(sys.executable).with_name("buf")


@pytest.mark.skipif(not BUF.exists(), reason="buf is not installed beside this Python")
def test_buf_curl_generates_over_reflection() -> None:
    with serve(None) as server:

        def curl(method: str, message: dict[str, Any]) -> list[dict[str, Any]]:
            command = [str(BUF), "curl", "--http2-prior-knowledge", "--protocol", "grpc", "--data", json.dumps(message)]
            url = f"http://{server.address}/{method}"
            out = subprocess.run([*command, url], capture_output=True, text=True, timeout=60, check=True).stdout
            decoder, answers = json.JSONDecoder(), []
            while out := out.strip():
                answer, end = decoder.raw_decode(out)
                answers.append(answer)
                out = out[end:]
            return answers

        answers = curl("pellucid.v1.InferenceService/Generate", {"text": "今天天气", "sampling": {"temperature": 0}})
        text = "".join(output.get("text", "") for answer in answers for output in answer.get("outputs", []))
        assert "不错" in text
        assert answers[-1]["outputs"][0]["finish"]["reason"] == "FINISH_REASON_EOS"
        (model,) = curl("pellucid.v1.ModelService/ListModels", {})[0]["models"]
        assert model["name"] == "demo"
        assert (
            curl("grpc.health.v1.Health/Check", {"service": "pellucid.v1.InferenceService"})[0]["status"] == "SERVING"
        )
