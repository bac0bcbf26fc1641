"""`pellucid generate --file`: answers in line with the prompts, and a server that is full is waited for."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo

from pellucid.v1 import inference_pb2
from pellucid_client.commands.prompt_file import Line, read
from pellucid_testing.checkpoints import tiny_checkpoint
from pellucid_testing.server import serve

from .conftest import Scripted, answer, fail
from .test_cli import pellucid
from .test_errors import info, retry


def mirror(
    request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
) -> Iterator[inference_pb2.GenerateResponse]:
    """Answers with the prompt; the earlier the prompt, the later the answer."""
    if request.text == "bad":
        fail(context, grpc.StatusCode.INVALID_ARGUMENT, "no\ngood", [ErrorInfo(reason="PROMPT_TOO_LONG")])
    time.sleep(0.2 / (1 + len(request.text)))
    yield from answer(f"<{request.text}>")(request, context)


def run(scripted: Scripted, text: str, *flags: str) -> subprocess.CompletedProcess[bytes]:
    return pellucid("generate", "--file", "-", *flags, stdin=text.encode(), server=scripted.address)


def test_a_file_of_prompts_is_answered_in_its_order(scripted: Scripted, tmp_path: Path) -> None:
    scripted.generate = mirror
    prompts = ["x" * n for n in range(1, 21)]
    path = tmp_path / "prompts.txt"
    path.write_text("\r\n".join(prompts), encoding="utf-8", newline="")
    done = pellucid("generate", "--file", str(path), "--concurrency", "4", server=scripted.address)
    assert done.returncode == 0
    assert done.stdout.decode().split("\n") == [f"<{prompt}>" for prompt in prompts] + [""]


def test_a_prompt_that_fails_does_not_hold_up_the_others(scripted: Scripted) -> None:
    scripted.generate = mirror
    done = run(scripted, "a\n\nbad\nb\n")
    assert (done.returncode, done.stdout) == (1, b"<a>\n\n\n<b>\n")
    assert done.stderr == b"pellucid: -, line 3: no good\n"

    done = run(scripted, "a\nbad\n\nb\n", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["line"] for line in lines] == [1, 2, 4]
    assert lines[1]["error"] == {"code": "INVALID_ARGUMENT", "reason": "PROMPT_TOO_LONG", "message": "no\ngood"}
    assert [lines[0]["text"], lines[2]["text"]] == ["<a>", "<b>"]
    assert done.returncode == 1


def test_an_answer_is_one_line(scripted: Scripted) -> None:
    scripted.generate = answer("one\ntwo\r\n", "three\rfour")
    assert run(scripted, "a\nb").stdout == b"one two three four\n" * 2
    assert run(scripted, "a\n", "--echo").stdout == b"aone two three four\n"
    assert json.loads(run(scripted, "a\n", "--json").stdout)["text"] == "one\ntwo\r\nthree\rfour"


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\r\n\r\nb\r\n", ["a", "", "b"]),
        (b"a\rb\n", ["a\rb"]),
        ("a\u2028b\x0bc\n".encode(), ["a\u2028b\x0bc"]),
    ],
)
def test_lines_are_those_of_the_file(tmp_path: Path, content: bytes, texts: list[str]) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(content)
    assert read(str(path)) == [Line(number, text) for number, text in enumerate(texts, start=1)]


class Crowded:
    """Takes so many requests at once and refuses the rest, as the server does."""

    def __init__(self, room: int) -> None:
        self.refused = 0
        self.most = 0
        self._room = threading.Semaphore(room)
        self._lock = threading.Lock()
        self._was_full = threading.Event()

    def __call__(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        if not self._room.acquire(blocking=False):
            with self._lock:
                self.refused += 1
            self._was_full.set()
            details = [info("QUEUE_FULL"), retry(0.05)]
            fail(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "full", details)
        try:
            self._was_full.wait(30)
            time.sleep(0.01)
            yield from answer(f"<{request.text}>")(request, context)
        finally:
            self._room.release()


def test_a_full_server_is_waited_for(scripted: Scripted) -> None:
    scripted.generate = crowded = Crowded(2)
    prompts = [str(n) for n in range(12)]
    done = run(scripted, "\n".join(prompts), "--concurrency", "12")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().split() == [f"<{prompt}>" for prompt in prompts]
    assert crowded.refused > 0


def test_waiting_ends_with_the_timeout(scripted: Scripted) -> None:
    scripted.generate = lambda request, context: fail(
        context, grpc.StatusCode.RESOURCE_EXHAUSTED, "full", [info("QUEUE_FULL"), retry(0.05)]
    )
    began = time.monotonic()
    done = run(scripted, "a\nb\n", "--timeout", "1.5")
    assert time.monotonic() - began < 20
    assert (done.returncode, done.stdout) == (1, b"\n\n")
    # The time may be over in a wait or, on a busy machine, in an attempt.
    each = [rf"pellucid: -, line {number}: (full|timeout: 1\.5 s passed .*)\n" for number in (1, 2)]
    assert re.fullmatch("".join(each), done.stderr.decode())
    assert len(scripted.requests) > 2


def test_a_cancelled_prompt_is_told(scripted: Scripted) -> None:
    def generate(
        request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        if request.text == "bad":
            yield from mirror(request, context)
        gone = request.text == "gone"
        reason = inference_pb2.FINISH_REASON_CANCELLED if gone else inference_pb2.FINISH_REASON_EOS
        yield from answer("x", reason=reason)(request, context)

    scripted.generate = generate
    done = run(scripted, "a\ngone\nb\n")
    assert (done.returncode, done.stdout) == (3, b"x\nx\nx\n")
    text = b"pellucid: -, line 2: request assigned was cancelled from elsewhere; its text ends early\n"
    assert done.stderr == text
    assert run(scripted, "gone\nbad\n").returncode == 1
    assert run(scripted, "bad\ngone\n").returncode == 1


def test_more_prompts_than_a_real_server_holds(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny")
    limits = ("--kv-cache-memory", "4MiB", "--threads", "1", "--max-running", "4", "--max-queue", "4")
    flags = ("--concurrency", "40", "--max-new-tokens", "8", "--ignore-eos", "--json")
    with serve(folder, *limits) as server:
        done = pellucid("generate", "--file", "-", *flags, stdin="天地\n".encode() * 40, server=server.address)
        assert (done.returncode, done.stderr) == (0, b"")
        counts = [json.loads(line)["usage"]["output_token_count"] for line in done.stdout.splitlines()]
        assert counts == [8] * 40
