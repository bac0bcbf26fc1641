"""TLS, client certificates and tokens from the client's side: the classes and the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from pellucid_client import AsyncClient, Client, ConnectionFailed, Unauthenticated
from pellucid_model.tokenizers import CharacterTokenizer
from pellucid_testing.certificates import Authority, Pair
from pellucid_testing.scripted_engine import Script
from pellucid_testing.server import SOURCES, ServerProcess, serve

TOKEN = "some.token-1=="
COMMAND = "from pellucid_client.cli import main; main()"

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


@dataclass(frozen=True)
class Locked:
    """A server that wants a client certificate and a token."""

    server: ServerProcess
    authority: Authority
    client: Pair
    token_file: Path

    @property
    def keys(self) -> dict[str, Any]:
        pair = self.client
        return {"ca_certificate": self.authority.certificate, "certificate": pair.certificate, "key": str(pair.key)}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    folder = tmp_path_factory.mktemp("locked")
    (folder / "config.json").write_text(json.dumps({}))
    CharacterTokenizer.train(["abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRS"]).save(folder)
    authority = Authority(folder)
    pair, token_file = authority.issue("server"), folder / "tokens"
    token_file.write_text(f"# mine\n{TOKEN}  # me\n")
    flags = ["--tls-certificate", pair.certificate, "--tls-key", pair.key, "--tls-client-ca", authority.certificate]
    flags += ["--auth-token-file", token_file]
    program = Script(lives=str(folder / "lives")).program()
    with serve(folder, *map(str, flags), program=program) as server:
        yield Locked(server, authority, authority.issue("client"), token_file)


def test_a_client_with_everything_gets_in(locked: Locked) -> None:
    with Client(locked.server.address, **locked.keys, token=TOKEN) as client:
        assert client.is_ready(timeout=10)
        assert client.generate("hello", max_new_tokens=3).result().usage.output_token_count == 3
        assert client.load().running_request_count == 0


def test_several_addresses_with_tls(locked: Locked) -> None:
    addresses = [locked.server.address, locked.server.address.replace("127.0.0.1", "127.0.0.2")]
    for given in (addresses, "ipv4:" + ",".join(addresses)):
        with Client(given, **locked.keys, token=TOKEN) as client:
            assert client.is_ready(timeout=10)
            assert client.generate("hello", max_new_tokens=3).result().usage.output_token_count == 3


async def test_an_asyncio_client_with_everything_gets_in(locked: Locked) -> None:
    async with AsyncClient(locked.server.address, **locked.keys, token=TOKEN) as client:
        assert (await client.generate("hello", max_new_tokens=3).result()).usage.output_token_count == 3


def test_what_is_missing_is_told(locked: Locked) -> None:
    with Client(locked.server.address, **locked.keys) as client:
        assert client.is_ready(timeout=10)
        with pytest.raises(Unauthenticated, match="a token is required") as caught:
            client.generate("hello").result()
        assert caught.value.reason == "TOKEN_MISSING"
    with (
        Client(locked.server.address, **locked.keys, token=TOKEN[1:]) as client,
        pytest.raises(Unauthenticated) as refused,
    ):
        client.server_info()
    assert refused.value.reason == "TOKEN_INVALID"
    authority = locked.authority.certificate
    wants = "Socket closed; it may want TLS or a client certificate"
    for less, reason in (
        ({}, wants),
        ({"tls": True}, "the TLS handshake failed: CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate"),
        ({"ca_certificate": authority}, wants),
    ):
        options: dict[str, Any] = less
        with (
            Client(locked.server.address, **options, token=TOKEN, attempts=1) as client,
            pytest.raises(ConnectionFailed, match=f": {reason}$"),
        ):
            client.server_info(timeout=10)


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="certificate, key: a client certificate needs both"):
        Client(certificate=tmp_path / "c.pem")
    with pytest.raises(ValueError, match="leave out tls"):
        Client(tls=True, credentials=grpc.ssl_channel_credentials())
    with pytest.raises(ValueError, match=r"ca_certificate: .*missing\.pem: No such file or directory"):
        Client(ca_certificate=tmp_path / "missing.pem")
    for token in ("", "two words", "line\nbreak", "中文"):
        with pytest.raises(ValueError, match=r"^token: accepted are letters") as caught:
            Client(token=token)
        assert not token or token not in str(caught.value)


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES), **environment},
        timeout=60,
        check=False,
    )


def test_the_command_line_takes_flags_or_the_environment(locked: Locked) -> None:
    files = {
        "ca-certificate": locked.authority.certificate,
        "certificate": locked.client.certificate,
        "key": locked.client.key,
        "token-file": locked.token_file,
    }
    flags = [part for name, file in files.items() for part in (f"--{name}", str(file))]
    done = command("info", "--server", locked.server.address, *flags)
    assert (done.returncode, done.stderr) == (0, "")
    variables = {"PELLUCID_" + name.upper().replace("-", "_"): str(file) for name, file in files.items()}
    variables["PELLUCID_SERVER"] = locked.server.address
    assert command("health", **variables).stdout == "ready\n"
    del variables["PELLUCID_TOKEN_FILE"]
    done = command("info", **variables)
    assert done.returncode == 1
    assert "a token is required" in done.stderr
    assert "--token-file" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_command_line_names_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for flag in ("--ca-certificate", "--token-file"):
        done = command("info", flag, str(tmp_path / "missing"))
        assert done.returncode == 1
        name = flag[2:].replace("-", "_")
        assert done.stderr == f"pellucid: {name}: {tmp_path / 'missing'}: No such file or directory\n"
