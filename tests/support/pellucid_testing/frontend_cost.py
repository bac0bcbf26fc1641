"""CPU time of the frontend, and of the Python client, per token, with an engine that only pretends. Linux alone.

usage: PYTHONPATH=tests/support python -m pellucid_testing.frontend_cost [--streams 1,8,32] [--step-ms 3.4] [--tokens N]

Every step brings each stream one token, the time of a step apart. The floor is a bare server of the same gRPC library
in a process of its own, which sends as many messages of the same size at the same times and does nothing else.
Figures of a busy machine mean little; the least of the rounds suffers least.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc

from pellucid.v1 import inference_pb2
from pellucid_client import AsyncClient
from pellucid_model.tokenizers import CharacterTokenizer
from pellucid_testing.scripted_engine import Script
from pellucid_testing.server import serve

ROUNDS = 5
PATH = "/floor/Stream"
MESSAGE = inference_pb2.GenerateResponse(outputs=[inference_pb2.OutputDelta(text="a", token_ids=[20])])


@dataclass(frozen=True)
class Cost:
    """Microseconds of CPU per token."""

    server: float
    client: float


async def least(pid: int, streams: int, tokens: int, one: Callable[[int], Awaitable[int]]) -> Cost:
    """Of some rounds, each of `streams` calls of `one`, which returns the tokens that it got."""
    await asyncio.gather(*(one(10) for _ in range(streams)))
    costs = []
    for _ in range(ROUNDS):
        server, client = cpu_seconds(pid), cpu_seconds("self")
        count = sum(await asyncio.gather(*(one(tokens) for _ in range(streams))))
        costs.append(((cpu_seconds(pid) - server) / count * 1e6, (cpu_seconds("self") - client) / count * 1e6))
    return Cost(*map(min, zip(*costs, strict=True)))


def cpu_seconds(pid: int | str) -> float:
    """Of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def frontend(address: str, pid: int, streams: int, tokens: int) -> Cost:
    async with AsyncClient(address) as client:

        async def one(count: int) -> int:
            stream = client.generate([20] * 50, max_new_tokens=count, ignore_eos=True)
            return sum([len(chunk.token_ids) async for chunk in stream])

        return await least(pid, streams, tokens, one)


async def floor(address: str, pid: int, streams: int, tokens: int) -> Cost:
    async with grpc.aio.insecure_channel(address) as channel:
        call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(PATH)

        async def one(count: int) -> int:
            return sum([1 async for _ in call(str(count).encode(), wait_for_ready=True)])

        return await least(pid, streams, tokens, one)


async def serve_floor(step_seconds: float) -> None:
    """Prints its port and serves until it is killed."""
    raw = MESSAGE.SerializeToString()
    loop = asyncio.get_running_loop()
    step = loop.create_future()

    def next_step() -> None:
        nonlocal step
        done, step = step, loop.create_future()
        done.set_result(None)
        loop.call_later(step_seconds, next_step)

    async def stream(count: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        for _ in range(int(count)):
            await step
            await context.write(raw)

    service, method = PATH.strip("/").split("/")
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {method: grpc.unary_stream_rpc_method_handler(stream)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    next_step()
    await server.wait_for_termination()


@contextlib.contextmanager
def floor_server(step_seconds: float) -> Iterator[tuple[str, int]]:
    """Its address and process id."""
    command = [sys.executable, "-m", "pellucid_testing.frontend_cost", "--serve-floor", str(step_seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = process.stdout.readline().strip() if process.stdout is not None else ""
            yield f"127.0.0.1:{port}", process.pid
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of the frontend per token", allow_abbrev=False)
    parser.add_argument("--streams", default="1,8,32", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--step-ms", default=3.4, type=float)
    parser.add_argument("--tokens", default=200, type=int, help="of a stream, in each round")
    parser.add_argument("--serve-floor", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_floor is not None:
        asyncio.run(serve_floor(options.serve_floor))
        return
    seconds = options.step_ms / 1000
    with tempfile.TemporaryDirectory() as name, floor_server(seconds) as bare:
        folder = Path(name)
        (folder / "config.json").write_text("{}")
        CharacterTokenizer.train(["abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRS"]).save(folder)
        length = options.tokens + 100
        script = Script(str(folder / "lives"), step_seconds=seconds, context_length=length, kv_block_count=10 * length)
        with serve(folder, program=script.program()) as server:
            for streams in options.streams:
                ours = asyncio.run(frontend(server.address, server.process.pid, streams, options.tokens))
                least_possible = asyncio.run(floor(*bare, streams, options.tokens))
                print(
                    f"{streams} streams: frontend {ours.server:.0f}, of which gRPC alone {least_possible.server:.0f}; "
                    f"client {ours.client:.0f}, of which gRPC alone {least_possible.client:.0f} µs per token",
                    flush=True,
                )


if __name__ == "__main__":
    main()
