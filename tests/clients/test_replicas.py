"""One client over two real servers: turns, a server that drains, a server that dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from pellucid_client import AsyncClient, Client, Completion, ConnectionFailed, DeadlineExceeded, GenerateStream
from pellucid_client._target import channel_options, names_several, target
from pellucid_model.tokenizers import CharacterTokenizer
from pellucid_testing.checkpoints import tiny_checkpoint
from pellucid_testing.scripted_engine import Script
from pellucid_testing.server import ROOT, ServerProcess, serve

from .conftest import Scripted
from .conftest import serve as serve_scripted
from .test_errors import free_address
from .test_retry import LETTERS

FINISHED = "pellucid_requests_finished_total"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint for the scripted engine: it has a tokenizer and no weights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "config.json").write_text(json.dumps({}))
    CharacterTokenizer.train([LETTERS]).save(folder)
    return folder


@contextlib.contextmanager
def pair(folder: Path, tmp_path: Path, **script: Any) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Two servers; the first one's engine follows the script, the second one's simply answers."""
    first = Script(lives=str(tmp_path / "first"), **script)
    second = Script(lives=str(tmp_path / "second"))
    with serve(folder, program=first.program()) as one, serve(folder, program=second.program()) as other:
        yield one, other


def answered(server: ServerProcess) -> float:
    return server.metric(FINISHED, reason="max_new_tokens")


def ask(client: Client, **options: Any) -> Completion:
    return client.generate("a", max_new_tokens=3, ignore_eos=True, timeout=20, **options).result()


def wait_for_both(client: Client, servers: tuple[ServerProcess, ServerProcess]) -> None:
    """Until the client is connected to both."""
    for _ in range(200):
        ask(client)
        if all(answered(server) for server in servers):
            return
    raise AssertionError("one of the servers never got a request")


def test_two_servers_take_turns(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny")
    arguments = ("--kv-cache-memory", "4MiB", "--threads", "1")
    with serve(folder, *arguments) as one, serve(folder, *arguments) as other:
        with Client([one.address, other.address]) as client:
            client.wait_until_ready(10)
            assert client.is_ready()
            wait_for_both(client, (one, other))
            before = [answered(one), answered(other)]
            for _ in range(40):
                ask(client)
            spread = answered(one) - before[0], answered(other) - before[1]
        assert spread == (20, 20)

        async def crowd() -> set[tuple[int, ...]]:
            async with AsyncClient(f"ipv4:{one.address},{other.address}") as client:
                asked = answered(one), answered(other)
                while answered(one) == asked[0] or answered(other) == asked[1]:  # until it is connected to both
                    await client.generate("a", max_new_tokens=3, ignore_eos=True).result()
                before[:] = answered(one), answered(other)
                streams = [client.generate("a", seed=1, max_new_tokens=20, ignore_eos=True) for _ in range(40)]
                return {answer.token_ids for answer in await asyncio.gather(*(each.result() for each in streams))}

        assert len(asyncio.run(crowd())) == 1  # Whichever server answers.
        spread = answered(one) - before[0], answered(other) - before[1]
        assert sum(spread) == 40
        assert min(spread) >= 10


def test_a_server_that_drains_is_left(folder: Path, tmp_path: Path) -> None:
    with pair(folder, tmp_path, step_seconds=0.02) as (leaving, staying):
        with Client(leaving.address) as direct, Client([leaving.address, staying.address]) as client:
            wait_for_both(client, (leaving, staying))
            stream = direct.generate("a", max_new_tokens=50, ignore_eos=True)
            next(stream)
            leaving.process.send_signal(signal.SIGTERM)
            leaving.event("shutting down")
            ask(client)  # Either server may get this one; a refusal says to try again in a second.
            before, began = answered(staying), time.monotonic()
            for _ in range(20):
                ask(client)
            assert answered(staying) - before == 20
            assert time.monotonic() - began < 10, "each was refused first, and waited for a second"
            assert stream.result().usage.output_token_count == 50
        assert leaving.process.wait(100) == 0


def test_a_server_that_dies_is_left_and_nobody_notices(folder: Path, tmp_path: Path) -> None:
    with pair(folder, tmp_path) as (dying, staying), Client([dying.address, staying.address]) as client:
        wait_for_both(client, (dying, staying))
        failures: list[Exception] = []
        slowest = 0.0
        stop = threading.Event()

        def keep_asking() -> None:
            nonlocal slowest
            while not stop.is_set():
                began = time.monotonic()
                try:
                    ask(client, delivery="final")
                except Exception as error:
                    failures.append(error)
                slowest = max(slowest, time.monotonic() - began)

        threads = [threading.Thread(target=keep_asking) for _ in range(4)]
        for thread in threads:
            thread.start()
        before = answered(staying)
        dying.process.kill()
        dying.process.wait()
        end = time.monotonic() + 30
        while answered(staying) - before <= 200 and time.monotonic() < end:
            time.sleep(0.02)
        stop.set()
        for thread in threads:
            thread.join()
        assert failures == []
        assert slowest < 10
        assert answered(staying) - before > 200


def test_a_stream_moves_before_its_first_message(folder: Path, tmp_path: Path) -> None:
    """The first server holds every answer back: it has the requests when it dies."""
    with pair(folder, tmp_path, step_seconds=0.01, token_pause_after=1) as (dying, staying):
        options: dict[str, Any] = {"max_new_tokens": 50, "delivery": "final", "timeout": 20}
        with Client([dying.address, staying.address]) as client:
            client.wait_until_ready(10)
            streams = [client.generate("a", **options) for _ in range(2)]
            while not dying.metric("pellucid_requests_running"):
                streams.append(client.generate("a", **options))
                time.sleep(0.02)
            dying.process.kill()
            answers = [stream.result() for stream in streams]
        assert [answer.usage.output_token_count for answer in answers] == [50] * len(streams)
        assert answered(staying) == len(streams)


def test_a_stream_that_has_begun_ends_with_its_server(folder: Path, tmp_path: Path) -> None:
    """The first server stops in the middle of its answers."""
    with pair(folder, tmp_path, step_seconds=0.01, token_pause_after=5) as servers:
        dying, staying = servers
        with Client([dying.address, staying.address]) as client:
            client.wait_until_ready(10)
            streams: list[GenerateStream] = []
            while not dying.metric("pellucid_requests_running"):
                streams.append(client.generate("a", max_new_tokens=50, timeout=20))
                next(streams[-1])
            dying.process.kill()
            cut = 0
            for stream in streams:
                try:
                    assert len(stream.result().token_ids) == 50
                except ConnectionFailed:
                    cut += 1
                    assert 1 <= len(stream.token_ids) <= 5
            assert cut >= 1
            assert answered(staying) == len(streams) - cut
            assert ask(client).usage.output_token_count == 3


@pytest.fixture
def scripted_pair() -> Iterator[tuple[Scripted, Scripted]]:
    scripts = Scripted(), Scripted()
    servers = [serve_scripted(script) for script in scripts]
    yield scripts
    for server in servers:
        server.stop(grace=None).wait()


def set_health(script: Scripted, serving: bool) -> None:
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    for name in ("", "pellucid.v1.InferenceService"):
        script.health.set(name, status)


async def test_health_alone_moves_the_traffic(scripted_pair: tuple[Scripted, Scripted]) -> None:
    """Neither server refuses anything: the client goes by what they say of their health."""
    one, other = scripted_pair
    set_health(one, False)
    set_health(other, True)
    with Client([one.address, other.address]) as client:
        for _ in range(10):
            client.generate("x").result()
        assert (len(one.requests), len(other.requests)) == (0, 10)

        set_health(one, True)
        set_health(other, False)
        # The client hears of it soon.
        end, found = time.monotonic() + 30, (0, 0)
        while found != (10, 0) and time.monotonic() < end:
            before = len(one.requests), len(other.requests)
            for _ in range(10):
                with contextlib.suppress(ConnectionFailed):
                    client.generate("x").result()
            found = len(one.requests) - before[0], len(other.requests) - before[1]
        assert found == (10, 0)

        set_health(one, False)
        with pytest.raises(DeadlineExceeded):
            client.wait_until_ready(0.3)
        assert not client.is_ready()

        def ask_until_it_has_heard() -> None:
            while time.monotonic() < end:
                client.generate("x").result()

        with pytest.raises(ConnectionFailed, match="backend unhealthy"):
            ask_until_it_has_heard()
    async with AsyncClient([one.address, other.address]) as asked:
        assert not await asked.is_ready(timeout=5)
        set_health(one, True)
        await asked.wait_until_ready(10)
        assert await asked.is_ready()


def test_what_an_address_may_be() -> None:
    assert target("127.0.0.1:1") == target(["127.0.0.1:1"]) == "127.0.0.1:1"
    assert target(["127.0.0.1:1", "10.0.0.1:2"]) == "ipv4:127.0.0.1:1,10.0.0.1:2"
    assert target(["[::1]:1", "[fe80::1]:2"]) == "ipv6:[::1]:1,[fe80::1]:2"
    for wrong in ([], ["localhost:1", "127.0.0.1:2"], ["127.0.0.1", "127.0.0.2"], ["127.0.0.1:1", "[::1]:2"]):
        with pytest.raises(ValueError, match="address: "):
            Client(wrong)


@pytest.mark.parametrize(
    "address",
    [
        "localhost:50051",
        "my_server.example-1.com:1",
        "服务器:65535",
        "127.0.0.1:50051",
        "[::1]:50051",
        "[fe80::1%eth0]:50051",
        "dns:server:1",
        "dns:///server.default.svc:50051",
        "dns://8.8.8.8/server:50051",
        "ipv4:10.0.0.1:1",
        "ipv4:10.0.0.1:1,10.0.0.2:2",
        "ipv6:[::1]:1,[::2]:2",
        "unix:/run/pellucid.sock",
    ],
)
def test_addresses(address: str) -> None:
    assert target(address) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        " ",
        "nonsense",
        ":50051",
        "host:",
        "host:0",
        "host:65536",
        "host:-1",
        "host:five",
        "host:１",
        "host:99999999999999999999",
        "host:1 ",
        "two words:1",
        "http://host:50051",
        "host:1/path",
        "::1:50051",
        "[::1]",
        "[nonsense]:1",
        "host:1,host:2",
        "dns:",
        "dns:///",
        "dns:///host",
        "ipv4:",
        "ipv4:host:1",
        "ipv4:10.0.0.1:1,",
        "ipv4:[::1]:1",
        "ipv6:::1:1",
        "unix:",
        "a\nb:1",
    ],
)
def test_what_is_no_address_is_refused_with_what_is_accepted(address: str) -> None:
    for given in (address, [address]):
        with pytest.raises(
            ValueError, match=r"^address: .* is not accepted; accepted: HOST:PORT with a port from 1 to"
        ):
            Client(given)
        with pytest.raises(ValueError, match=r"^address: "):
            AsyncClient(given)


def test_the_documents_addresses_are_accepted() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "clients.md").read_text("utf-8"), re.DOTALL)
    assert example.count("Client(") == 3
    exec(compile(example, "docs/clients.md", "exec"), {})


@pytest.mark.parametrize(
    ("address", "several"),
    [
        ("127.0.0.1:1", False),
        ("server:50051", False),
        ("ipv4:10.0.0.1:1", False),
        ("ipv4:10.0.0.1:1,10.0.0.2:1", True),
        ("ipv6:[::1]:1,[::2]:1", True),
        ("dns:///pellucid:50051", True),
    ],
)
def test_a_set_of_servers_is_balanced_and_health_checked(address: str, several: bool) -> None:
    assert names_several(address) is several
    configs = [json.loads(str(value)) for name, value in channel_options(address) if name == "grpc.service_config"]
    assert len(configs) == several
    for config in configs:
        assert config["loadBalancingConfig"] == [{"round_robin": {}}]
        assert config["healthCheckConfig"] == {"serviceName": "pellucid.v1.InferenceService"}
        assert "hedging" not in json.dumps(config)


def test_loopback_goes_past_the_proxy() -> None:
    direct = ("grpc.enable_http_proxy", 0)
    for address in ("localhost:1", "127.0.0.1:1", "[::1]:1", "ipv4:127.0.0.1:1,127.0.0.2:1", "dns:///localhost:1"):
        assert direct in channel_options(address)
    for address in ("server:1", "ipv4:127.0.0.1:1,10.0.0.1:1", "dns:///server:1"):
        assert direct not in channel_options(address)


def test_a_name_may_stand_for_the_servers() -> None:
    script = Scripted()
    server = serve_scripted(script)
    try:
        set_health(script, True)
        with Client(f"dns:///localhost:{script.address.rpartition(':')[2]}") as client:
            assert client.generate("x", timeout=20).result().text == "今天天气"
    finally:
        server.stop(grace=None).wait()
    with Client(f"dns:///{free_address()}") as client, pytest.raises(ConnectionFailed):
        client.load()
