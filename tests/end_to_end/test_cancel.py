"""Streams that nobody wants any more, by the hundred: whatever ended them and wherever they stood, nothing is left."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from pellucid.v1 import inference_pb2, inference_pb2_grpc
from pellucid_server.checkpoint_info import read_checkpoint_info
from pellucid_server.ends import End
from pellucid_server.frontend import Frontend, Package
from pellucid_server.live_request import LiveRequest, LiveSequence
from pellucid_server.settings import load_settings
from pellucid_server.summary import Addresses
from pellucid_testing.calls import collect, failure, generate, request
from pellucid_testing.checkpoints import tiny_checkpoint, tiny_config
from pellucid_testing.server import ServerProcess, serve

STREAMS = 125
"""Of each of the four kinds."""
CHANNELS = 5
SECONDS = 30.0
"""Until everything must be free again."""
CONTEXT = 512
# Few run at once and a prompt takes several steps, so that there are always some queued, prefilling and decoding.
FLAGS = (
    *("--dtype", "float32", "--threads", "1", "--max-running", "8", "--max-queue", "600", "--max-step-tokens", "32"),
    *("--max-new-tokens-limit", "1000000"),
)
PROMPT = [5] * 200
ENDLESS: dict[str, Any] = {"stopping": {"max_new_tokens": 1_000_000, "ignore_eos": True}}
ROLL = inference_pb2.ContextPolicy(overflow=inference_pb2.CONTEXT_OVERFLOW_ROLL)

CLIENT = f"""
import sys, time, grpc
from pellucid.v1 import inference_pb2, inference_pb2_grpc
channels = [grpc.insecure_channel(sys.argv[1], [("grpc.use_local_subchannel_pool", 1)]) for _ in range({CHANNELS})]
message = inference_pb2.GenerateRequest.FromString(bytes.fromhex(sys.argv[2]))
stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
calls = [stubs[0].Generate(message)]
next(calls[0])
calls += [stubs[i % {CHANNELS}].Generate(message) for i in range(1, {STREAMS})]
print("streaming", flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("cancel") / "tiny", tiny_config(context_length=CONTEXT))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with serve(folder, *FLAGS) as running:
        yield running


def endless(request_id: str = "") -> inference_pb2.GenerateRequest:
    return request(PROMPT, request_id=request_id, context=ROLL, **ENDLESS)


class Streams:
    """Calls in flight on a few channels; the server has all of them, in every state."""

    def __init__(self, server: ServerProcess) -> None:
        self.channels = [server.channel() for _ in range(CHANNELS)]
        self.calls = [self._start(0)]
        self.first = next(self.calls[0])
        self.calls += [self._start(index) for index in range(1, STREAMS)]
        wait_for_all(server)

    def _start(self, index: int) -> Any:
        stub = inference_pb2_grpc.InferenceServiceStub(self.channels[index % CHANNELS])
        return stub.Generate(endless(f"s{index}"))


def wait_for_all(server: ServerProcess) -> None:
    deadline = time.monotonic() + 60
    while in_flight(server) < STREAMS:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert server.metric("pellucid_requests_running") > 1
    assert server.metric("pellucid_requests_waiting") > 1


def in_flight(server: ServerProcess) -> float:
    names = ("pellucid_requests_running{", "pellucid_requests_waiting{")
    return sum(value for sample, value in server.metrics().items() if sample.startswith(names))


def check_that_nothing_is_left(server: ServerProcess, since: float) -> None:
    for name, value, labels in (
        ("pellucid_requests_running", 0, {}),
        ("pellucid_requests_waiting", 0, {}),
        ("pellucid_kv_cache_blocks", 0, {"state": "used"}),
    ):
        server.wait_for_metric(name, value, timeout=since + SECONDS - time.monotonic(), **labels)
    # No token comes for anybody any more, and new work is done as ever.
    made = server.metric("pellucid_generated_tokens_total")
    time.sleep(0.1)
    assert server.metric("pellucid_generated_tokens_total") == made
    assert len(generate(server.channel(), "abc", stopping={"max_new_tokens": 5, "ignore_eos": True}).token_ids) == 5


def gained(server: ServerProcess, before: dict[str, float], name: str, label: str) -> Counter[str]:
    """What was added to a counter, by this label."""
    change: Counter[str] = Counter()
    for sample, value in server.metrics().items():
        match = re.fullmatch(rf'{name}{{.*\b{label}="(\w+)".*}}', sample)
        if match is not None and value > before[sample]:
            change[match[1]] = int(value - before[sample])
    return change


@pytest.mark.parametrize("way", ["call", "rpc", "channel", "process"])
def test_streams_that_are_given_up_leave_nothing_behind(server: ServerProcess, way: str) -> None:
    before = server.metrics()
    if way == "process":
        command = [sys.executable, "-c", CLIENT, server.address, endless().SerializeToString().hex()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "streaming\n"
            wait_for_all(server)
            since = time.monotonic()
            client.send_signal(signal.SIGKILL)
    else:
        streams = Streams(server)
        since = time.monotonic()
        if way == "call":
            for call in streams.calls:
                call.cancel()
        elif way == "channel":
            for channel in streams.channels:
                channel.close()
        else:
            stub = inference_pb2_grpc.InferenceServiceStub(server.channel())
            for index in range(STREAMS):
                answer = stub.Cancel(inference_pb2.CancelRequest(request_id=f"s{index}"))
                assert answer.result == inference_pb2.CANCEL_RESULT_CANCELLED
    check_that_nothing_is_left(server, since)
    if way == "rpc":
        reasons = {collect([streams.first, *streams.calls[0]]).reason, *(collect(c).reason for c in streams.calls[1:])}
        assert reasons == {"cancelled"}
    elif way != "process":
        assert {failure(call).code for call in streams.calls} == {"CANCELLED"}
    reason = "cancelled" if way == "rpc" else "client_cancelled"
    ends = gained(server, before, "pellucid_requests_finished_total", "reason")
    assert ends == {reason: STREAMS, "max_new_tokens": 1}
    assert gained(server, before, "pellucid_request_cancellations_total", "cause") == {"client": STREAMS}


class Witness:
    """Sees every token and every end in a server of this process."""

    def __init__(self, frontend: Frontend) -> None:
        self.tokens_after_deadline: Counter[int] = Counter()
        self.ended: list[tuple[LiveRequest, End]] = []
        private: Any = frontend
        self.table = private._table
        accounts = self.table._accounts
        self._tokens, self._ended = accounts.tokens, accounts.ended
        accounts.tokens, accounts.ended = self.count_tokens, self.count_end

    @property
    def is_busy(self) -> bool:
        """Whether a request lives or a block is taken."""
        return bool(self.table.running_count or self.table.waiting_count or self.table.stats.used_blocks)

    def count_tokens(self, request: LiveRequest, sequence: LiveSequence, times: Sequence[float]) -> None:
        if request.deadline is not None:
            self.tokens_after_deadline[request.key] += sum(at > request.deadline for at in times)
        self._tokens(request, sequence, times)

    def count_end(self, request: LiveRequest, end: End) -> None:
        self.ended.append((request, end))
        self._ended(request, end)


async def test_after_a_deadline_comes_no_token_but_one_steps(folder: Path) -> None:
    arguments = [str(folder), "--listen", "127.0.0.1:0", "--metrics-listen", "off", "--log-level", "warning", *FLAGS]
    settings = load_settings(arguments, {})
    frontend = Frontend(Package(settings, read_checkpoint_info(settings), "0.0.0"))
    port: list[int] = []
    private: Any = frontend
    serving = asyncio.Event()

    def announce(addresses: Addresses) -> None:
        port.append(int(addresses.grpc.rpartition(":")[2]))
        serving.set()

    private._announce = announce
    witness = Witness(frontend)
    running = asyncio.create_task(frontend.run())
    async with asyncio.timeout(30):
        await serving.wait()
    rng = random.Random(3)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port[0]}") as channel:
        generate: Any = inference_pb2_grpc.InferenceServiceStub(channel).Generate

        async def run(seconds: float) -> str:
            try:
                async for _ in generate(endless(), timeout=seconds):
                    pass
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return "OK"

        codes = await asyncio.gather(*(run(rng.uniform(0.02, 1.5)) for _ in range(100)))
        assert set(codes) == {"DEADLINE_EXCEEDED"}
        async with asyncio.timeout(SECONDS):
            while witness.is_busy:  # noqa: ASYNC110 the last step to come is not known beforehand
                await asyncio.sleep(0.01)
    private._stop.set()
    await running
    # The shorter deadlines may pass before a request is admitted.
    assert 20 <= len(witness.ended) <= 100
    assert {end.reason for _, end in witness.ended} == {"deadline"}
    assert max(witness.tokens_after_deadline.values(), default=0) <= 1
    # They stood in every state when their time was over.
    states = Counter(
        "decoding" if request.output_token_count else "queued" if request.first_scheduled_at is None else "prefilling"
        for request, _ in witness.ended
    )
    assert len(states) >= 2, states
    assert states["queued"]
    assert states["decoding"]
