"""Every example runs against a live server and prints what it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pellucid_testing.server import ROOT, SOURCES, ServerProcess, serve

EXAMPLES = ROOT / "examples"
TESTED = {"python_sync.py", "python_asyncio.py", "buf_curl.sh"}
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def demo() -> Iterator[ServerProcess]:
    with serve(None, "--kv-cache-memory", "16MiB", "--threads", "1") as running:
        yield running


def lines_of(command: Sequence[str | Path], *arguments: str) -> list[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(SOURCES),
        "PYTHONIOENCODING": "utf-8",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, encoding="utf-8", timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_all_of_them_are_here() -> None:
    # Modules have tests of their own: tests/end_to_end/test_custom_model.py and test_adopted_model.py.
    models = {"custom_model", "adopted"}
    assert {path.name for path in EXAMPLES.iterdir()} - {"__pycache__"} == TESTED | models | {"README.md"}
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(name in text for name in TESTED)


def test_python_sync(demo: ServerProcess) -> None:
    stream, answer, refusal = lines_of([sys.executable, EXAMPLES / "python_sync.py"], demo.address)
    assert stream
    assert answer.startswith("不错") or "不错" in answer
    assert answer.split()[1] in ("stop_string", "eos")
    assert refusal.startswith("sampling.top_p: ")
    demo.wait_for_metric("pellucid_requests_running", 0)


@pytest.mark.parametrize("count", [1, 2])
def test_python_asyncio(demo: ServerProcess, count: int) -> None:
    addresses = [demo.address] * count
    *answers, stream = lines_of([sys.executable, EXAMPLES / "python_asyncio.py"], *addresses)
    assert len(answers) == 4
    assert "不错" in answers[0]
    assert all(answer.endswith(("(eos)", "(max_new_tokens)")) for answer in answers)
    assert stream


def test_node(demo: ServerProcess, node: Path) -> None:
    stream, answer, refusal = lines_of(
        [node / "node", ROOT / "clients" / "node" / "examples" / "generate.mjs"], demo.address
    )
    assert stream
    assert "不错" in answer
    assert refusal.startswith("sampling.top_p: ")
    demo.wait_for_metric("pellucid_requests_running", 0)


def test_python_and_node_say_the_same(demo: ServerProcess, node: Path) -> None:
    python = lines_of([sys.executable, EXAMPLES / "python_sync.py"], demo.address)
    other = lines_of([node / "node", ROOT / "clients" / "node" / "examples" / "generate.mjs"], demo.address)
    assert python == other


@pytest.mark.skipif(not (BIN / "buf").exists(), reason="buf is not installed beside this Python")
def test_buf_curl(demo: ServerProcess) -> None:
    out = "\n".join(lines_of([EXAMPLES / "buf_curl.sh"], demo.address))
    decoder, messages = json.JSONDecoder(), list[dict[str, Any]]()
    while out := out.strip():
        message, end = decoder.raw_decode(out)
        messages.append(message)
        out = out[end:]
    health, models, tokens, *stream = messages
    assert health == {"status": "SERVING"}
    assert [model["name"] for model in models["models"]] == ["demo"]
    assert len(tokens["results"][0]["tokenIds"]) >= 4
    text = "".join(output.get("text", "") for message in stream for output in message.get("outputs", []))
    assert "不错" in text
    assert stream[-1]["outputs"][0]["finish"]["reason"].startswith("FINISH_REASON_")
