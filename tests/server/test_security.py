"""Tokens, TLS and client certificates, over real sockets: who gets in, who does not, and what stops the start."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pellucid.v1 import inference_pb2, inference_pb2_grpc, model_pb2, server_pb2, tokenizer_pb2
from pellucid_model.tokenizers import CharacterTokenizer
from pellucid_server.options import Address
from pellucid_server.rpc import reflection
from pellucid_server.security import exposure, protection
from pellucid_server.settings import Settings
from pellucid_testing.calls import collect, failure, generate, request
from pellucid_testing.certificates import Authority, Pair
from pellucid_testing.scripted_engine import Script
from pellucid_testing.server import ServerProcess, serve, start_server

ALICE, ALICE_NEW, BOB, NOBODY = "alice-token-1", "alice-token-2", "bob.token/+~_==", "nameless"
TOKENS = f"# who may call\n\n{ALICE}  # alice\n{ALICE_NEW} # alice\n  {BOB}  # bob\n{NOBODY}\n"
LONG = {"max_new_tokens": 20}

METHODS = [
    f"/{service.full_name}/{method.name}"
    for file in (inference_pb2, tokenizer_pb2, model_pb2, server_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
REFLECTION = [f"/{name}/ServerReflectionInfo" for name in (reflection.SERVICE, reflection.SERVICE_V1)]
UNKNOWN = ["/pellucid.v1.InferenceService/Nothing", "/nobody.Knows/This"]

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl, which makes keys, is not installed"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripted")
    (folder / "config.json").write_text(json.dumps({}))
    CharacterTokenizer.train(["abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRS"]).save(folder)
    return folder


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    file.write_text(TOKENS)
    return file


@pytest.fixture(scope="module")
def server(folder: Path, token_file: Path) -> Iterator[ServerProcess]:
    with serve(folder, "--auth-token-file", str(token_file), program=script(folder, 0.01)) as running:
        yield running


def script(folder: Path, step_seconds: float = 0.0) -> list[str]:
    return Script(lives=str(folder / "lives"), step_seconds=step_seconds).program()


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def code_of(channel: grpc.Channel, method: str, metadata: Sequence[tuple[str, str]] = ()) -> tuple[str, str]:
    """Status and reason of a call that sends nothing, as its caller sees them."""
    call: Any = channel.stream_stream(method)
    try:
        list(call(iter([b""]), metadata=metadata, timeout=10))
    except grpc.RpcError as error:
        found = failure(error)
        return found.code, found.reason
    return "OK", ""


@pytest.mark.parametrize("method", [*METHODS, *REFLECTION, *UNKNOWN])
def test_every_method_wants_a_token(server: ServerProcess, method: str) -> None:
    channel = server.channel()
    before = server.metric("pellucid_auth_failures_total")
    assert code_of(channel, method) == ("UNAUTHENTICATED", "TOKEN_MISSING")
    assert code_of(channel, method, bearer("wrong")) == ("UNAUTHENTICATED", "TOKEN_INVALID")
    assert code_of(channel, method, bearer(ALICE))[0] != "UNAUTHENTICATED"
    assert server.metric("pellucid_auth_failures_total") == before + 2


def test_the_list_of_methods_is_no_empty_one() -> None:
    assert len(METHODS) == 8


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "Bearer ",
        ALICE,
        f"Basic {ALICE}",
        f"Bearer {ALICE[:-1]}",
        f"Bearer {ALICE}x",
        f"Bearer {ALICE} x",
        f"Bearer {ALICE.upper()}",
        "Bearer # alice",
        "Bearer alice",
    ],
)
def test_near_misses(server: ServerProcess, value: str) -> None:
    channel = server.channel()
    assert code_of(channel, METHODS[-1], [("authorization", value)]) == ("UNAUTHENTICATED", "TOKEN_INVALID")
    both = [*bearer(ALICE), ("authorization", value)]
    assert code_of(channel, METHODS[-1], both) == ("UNAUTHENTICATED", "TOKEN_INVALID")


@pytest.mark.parametrize("token", [ALICE, ALICE_NEW, BOB, NOBODY])
def test_tokens_of_the_file_are_welcome(server: ServerProcess, token: str) -> None:
    channel = server.channel()
    for scheme in ("Bearer", "bearer"):
        assert code_of(channel, METHODS[-1], [("authorization", f"{scheme} {token}")])[0] == "OK"
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    stream = stub.Generate(request(stopping={"max_new_tokens": 3}), metadata=bearer(token), timeout=10)
    assert collect(stream).reason == "max_new_tokens"


def test_health_is_open_to_all(server: ServerProcess) -> None:
    stub: Any = health_pb2_grpc.HealthStub(server.channel())
    for name in ("", "liveness", "pellucid.v1.InferenceService"):
        assert stub.Check(health_pb2.HealthCheckRequest(service=name)).status == health_pb2.HealthCheckResponse.SERVING
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


def test_a_refusal_never_reaches_the_request_table(server: ServerProcess) -> None:
    before = server.metric("pellucid_requests_total", method="Generate", grpc_code="UNAUTHENTICATED")
    finished = server.metric("pellucid_requests_finished_total")
    stub = inference_pb2_grpc.InferenceServiceStub(server.channel())
    found = failure(stub.Generate(request(), timeout=10))
    assert found.message == 'a token is required; send it as metadata: "authorization: Bearer TOKEN"'
    assert found.retry_after is None
    assert server.metric("pellucid_requests_total", method="Generate", grpc_code="UNAUTHENTICATED") == before + 1
    assert server.metric("pellucid_requests_finished_total") == finished
    assert server.metric("pellucid_requests_waiting") == 0


def test_callers_see_and_cancel_their_own_requests_only(server: ServerProcess) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(server.channel())

    def start(token: str) -> Any:
        return stub.Generate(request(request_id="same", stopping=LONG), metadata=bearer(token), timeout=60)

    def cancel(token: str) -> str:
        answer = stub.Cancel(inference_pb2.CancelRequest(request_id="same"), metadata=bearer(token))
        return inference_pb2.CancelResult.Name(answer.result).removeprefix("CANCEL_RESULT_")

    with server.engine_stopped():
        alice, bob = start(ALICE), start(BOB)
        server.wait_for_metric("pellucid_requests_waiting", 2)
        assert cancel(NOBODY) == "NOT_FOUND"
        twice = failure(stub.Generate(request(request_id="same"), metadata=bearer(ALICE_NEW), timeout=20))
        assert twice.reason == "REQUEST_ID_IN_USE"
        assert cancel(ALICE_NEW) == "CANCELLED"
        assert collect(alice).reason == "cancelled"
        assert cancel(ALICE) == "NOT_FOUND"
    answer = collect(bob)
    assert (answer.reason, len(answer.token_ids)) == ("max_new_tokens", 20)


def test_no_token_is_ever_logged(server: ServerProcess) -> None:
    assert [event["message"] for event in server.events] == ["listening", "serving"]
    assert server.events[1]["security"] == "tokens"
    assert server.other_lines == []


def test_the_file_is_followed(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("first\n")
    with serve(folder, "--auth-token-file", str(file), program=script(folder)) as server:
        channel = server.channel()

        def passes(token: str) -> bool:
            return code_of(channel, METHODS[-1], bearer(token))[0] == "OK"

        assert passes("first")
        assert not passes("second")
        file.write_text("second\n")
        server.process.send_signal(signal.SIGHUP)
        server.event("the tokens have been read again")
        assert passes("second")
        assert not passes("first")
        replacement = tmp_path / "new"
        replacement.write_text("third\n")
        replacement.rename(file)
        deadline = time.monotonic() + 30
        while not passes("third"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not passes("second")
        file.write_text("two words\n")
        server.process.send_signal(signal.SIGHUP)
        server.event(
            f"--auth-token-file {file}: line 1 is no token; accepted: letters, digits and -._~+/ without blanks, then "
            "perhaps # and a name; the tokens read before stay in force"
        )
        assert passes("third")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "No such file or directory; name a readable file"),
        (b"", "holds no token; write one a line"),
        (b"# only a comment\n\n", "holds no token; write one a line"),
        (b"good\nnot good\n", "line 2 is no token"),
        (b"se#cret\n", "line 1 is no token"),
        ("中文\n".encode(), "line 1 is no token"),
        (b"\xff\xfe\n", "is not UTF-8 text"),
    ],
)
def test_a_token_file_that_does_not_work_stops_the_start(
    folder: Path, tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    file = tmp_path / "tokens"
    if content is not None:
        file.write_bytes(content)
    (line,) = refused_start(folder, "--auth-token-file", str(file))
    assert f"--auth-token-file {file}: {complaint}" in line
    assert "good" not in line
    assert "se#cret" not in line


def refused_start(folder: Path, *arguments: str) -> list[str]:
    return last_words(start_server(folder, *arguments, program=script(folder)))


def last_words(server: ServerProcess) -> list[str]:
    """Of a server that does not start."""
    code = server.process.wait(100)
    server.close()
    assert code == 1
    assert server.events == []
    return server.other_lines


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


def tls(pair: Pair) -> tuple[str, ...]:
    return ("--tls-certificate", str(pair.certificate), "--tls-key", str(pair.key))


def secure(server: ServerProcess, authority: Authority, client: Pair | None = None) -> grpc.Channel:
    credentials = grpc.ssl_channel_credentials(
        authority.certificate.read_bytes(),
        None if client is None else client.key.read_bytes(),
        None if client is None else client.certificate.read_bytes(),
    )
    return grpc.secure_channel(server.address, credentials, [("grpc.use_local_subchannel_pool", 1)])


def gets_in(channel: grpc.Channel) -> bool:
    with channel:
        code, _ = code_of(channel, METHODS[-1])
    assert code in ("OK", "UNAVAILABLE")
    return code == "OK"


@needs_openssl
def test_tls(folder: Path, authority: Authority, stranger: Authority) -> None:
    with serve(folder, *tls(authority.issue("server")), program=script(folder)) as server:
        assert server.events[1]["security"] == "TLS"
        assert not gets_in(server.channel())
        assert not gets_in(secure(server, stranger))
        with secure(server, authority) as channel:
            assert generate(channel, stopping={"max_new_tokens": 3}).reason == "max_new_tokens"
        assert server.stop() == 0


@needs_openssl
def test_tls_and_tokens(folder: Path, authority: Authority, token_file: Path) -> None:
    flags = (*tls(authority.issue("server")), "--auth-token-file", str(token_file))
    with (
        serve(folder, *flags, program=script(folder)) as server,
        secure(server, authority) as channel,
    ):
        assert code_of(channel, METHODS[-1]) == ("UNAUTHENTICATED", "TOKEN_MISSING")
        assert code_of(channel, METHODS[-1], bearer(BOB))[0] == "OK"


@needs_openssl
def test_client_certificates(folder: Path, authority: Authority, stranger: Authority) -> None:
    flags = (*tls(authority.issue("server")), "--tls-client-ca", str(authority.certificate))
    alice, bob = authority.issue("alice"), authority.issue("bob")
    with serve(folder, *flags, program=script(folder, 0.01)) as server:
        assert not gets_in(server.channel())
        assert not gets_in(secure(server, authority))
        assert not gets_in(secure(server, authority, stranger.issue("alice")))
        with secure(server, authority, alice) as hers, secure(server, authority, bob) as his, server.engine_stopped():
            stub = inference_pb2_grpc.InferenceServiceStub(hers)
            call = stub.Generate(request(request_id="a", stopping=LONG), timeout=60)
            server.wait_for_metric("pellucid_requests_waiting", 1)
            cancel = inference_pb2.CancelRequest(request_id="a")
            his_answer = inference_pb2_grpc.InferenceServiceStub(his).Cancel(cancel).result
            assert his_answer == inference_pb2.CANCEL_RESULT_NOT_FOUND
            assert stub.Cancel(cancel).result == inference_pb2.CANCEL_RESULT_CANCELLED
            assert collect(call).reason == "cancelled"


@needs_openssl
def test_renewed_certificates_are_used_without_a_restart(
    folder: Path, authority: Authority, stranger: Authority
) -> None:
    pair = authority.issue("server", "renewed")
    old = pair.certificate.read_bytes(), pair.key.read_bytes()
    with serve(folder, *tls(pair), program=script(folder)) as server:
        open_channel = secure(server, authority)
        assert code_of(open_channel, METHODS[-1])[0] == "OK"
        new = stranger.issue("server")
        pair.certificate.write_bytes(new.certificate.read_bytes())
        # Half of a new pair is none: the old one goes on.
        assert gets_in(secure(server, authority))
        server.event(
            f"--tls-certificate {pair.certificate} and --tls-key {pair.key}: the key is not the certificate's; name a "
            "PEM certificate and its private key without a passphrase; the TLS files read before stay in use"
        )
        pair.key.write_bytes(new.key.read_bytes())
        assert gets_in(secure(server, stranger))
        assert not gets_in(secure(server, authority))
        server.event("the TLS files have changed and are in use")
        # A connection made before lives on.
        assert code_of(open_channel, METHODS[-1])[0] == "OK"
        open_channel.close()
        pair.key.unlink()
        assert gets_in(secure(server, stranger))
        pair.certificate.write_bytes(old[0])
        pair.key.write_bytes(old[1])
        assert gets_in(secure(server, authority))


@needs_openssl
def test_tls_files_that_do_not_work_stop_the_start(folder: Path, authority: Authority, tmp_path: Path) -> None:
    good, other = authority.issue("server"), authority.issue("other")
    missing, garbage = tmp_path / "missing.pem", tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    both = f"--tls-certificate {good.certificate} and --tls-key"
    cases = {
        tls(Pair(missing, good.key)): f"--tls-certificate {missing}: No such file or directory",
        tls(Pair(good.certificate, missing)): f"--tls-key {missing}: No such file or directory",
        tls(Pair(good.certificate, other.key)): f"{both} {other.key}: the key is not the certificate's",
        tls(Pair(good.certificate, garbage)): f"{both} {garbage}: they cannot be read as such",
        (*tls(good), "--tls-client-ca", str(missing)): f"--tls-client-ca {missing}: No such file or directory",
        (*tls(good), "--tls-client-ca", str(garbage)): f"--tls-client-ca {garbage}: holds no PEM certificate",
    }
    started = [start_server(folder, *flags, program=script(folder)) for flags in cases]
    for server, complaint in zip(started, cases.values(), strict=True):
        (line,) = last_words(server)
        assert complaint in line


def test_warnings_say_what_is_open() -> None:
    outside = Address("0.0.0.0", 1)
    inside: dict[str, Any] = {"metrics_listen": None}
    both: dict[str, Any] = {"tls_certificate": "c", "tls_key": "k"}
    tokens: dict[str, Any] = {"auth_token_file": "t"}
    assert exposure(Settings(**both)) == exposure(Settings()) == []
    assert "without TLS and without tokens" in "".join(exposure(Settings(listen=outside, **inside)))
    assert "without TLS: tokens" in "".join(exposure(Settings(listen=outside, **inside, **tokens)))
    assert "without tokens or client" in "".join(exposure(Settings(listen=outside, **inside, **both)))
    assert exposure(Settings(listen=outside, **inside, **both, **tokens)) == []
    assert exposure(Settings(listen=outside, **inside, **both, tls_client_ca="ca")) == []
    (warning,) = exposure(Settings(metrics_listen=outside))
    assert warning.startswith("--metrics-listen 0.0.0.0:1 is open")
    assert protection(Settings(**both, **tokens, tls_client_ca="ca")) == "TLS, client certificates, tokens"
