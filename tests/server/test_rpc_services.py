"""The other services, and reflection. They need no model, so most of them run beside a scripted engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pellucid.v1 import (
    model_pb2,
    model_pb2_grpc,
    server_pb2,
    server_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
    types_pb2,
)
from pellucid_model.tokenizers import CharacterTokenizer, load_tokenizer
from pellucid_testing.calls import Failure, failure, generate
from pellucid_testing.checkpoints import CHARACTERS, tiny_checkpoint, tiny_config
from pellucid_testing.scripted_engine import Script
from pellucid_testing.server import ServerProcess, serve

BUF = Path(sys.executable).with_name("buf")
SERVICES = ("InferenceService", "TokenizerService", "ModelService", "ServerService")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    folder.mkdir()
    CharacterTokenizer.train([CHARACTERS]).save(folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    generation = {"temperature": 0.5, "top_k": 3, "eos_token_id": [7], "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    script = Script(lives=str(folder.parent / "lives"), vocab_size=4 + len(CHARACTERS))
    arguments = ("--max-running", "3", "--max-queue", "5", "--default-top-k", "0")
    with serve(folder, *arguments, program=script.program()) as running:
        yield running


def refused(call: Any, message: Any) -> Failure:
    with pytest.raises(grpc.RpcError) as caught:
        call(message, timeout=10)
    return failure(caught.value)


def test_models(server: ServerProcess, folder: Path) -> None:
    stub = model_pb2_grpc.ModelServiceStub(server.channel())
    (model,) = stub.ListModels(model_pb2.ListModelsRequest()).models
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert (model.name, model.max_context_tokens, model.max_output_tokens) == ("tiny", 128, 16384)
    assert (model.vocab_size, model.tokenizer_sha256) == (52, tokenizer.sha256)
    # Tokenizer, config.json and generation_config.json together.
    assert list(model.eos_token_ids) == [2, 7]
    sampling = model.default_sampling
    # Operator before generation_config before built-in.
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 0, 1.0, 0.0)
    assert not sampling.HasField("seed")
    assert stub.GetModel(model_pb2.GetModelRequest()).model == model
    assert stub.GetModel(model_pb2.GetModelRequest(name="tiny")).model == model
    assert refused(stub.GetModel, model_pb2.GetModelRequest(name="x")).reason == "MODEL_NOT_FOUND"
    effective = generate(server.channel(), stopping={"max_new_tokens": 1}).prompt.effective_sampling
    assert (effective.temperature, effective.top_k) == (0.5, 0)


def test_server_info(server: ServerProcess) -> None:
    stub = server_pb2_grpc.ServerServiceStub(server.channel())
    info, call = stub.GetServerInfo.with_call(server_pb2.GetServerInfoRequest())
    assert dict(call.initial_metadata())["x-pellucid-instance"] == info.instance_id
    assert (info.max_running_requests, info.max_queued_requests, info.max_batched_tokens) == (3, 5, 512)
    assert (info.device, info.dtype, info.schema_revision) == ("cpu", "float32", 2)
    assert info.version.count(".") == 2
    assert info.kv_block_size * info.kv_block_count >= 128
    later = stub.GetServerInfo(server_pb2.GetServerInfoRequest())
    assert later.uptime.ToNanoseconds() > info.uptime.ToNanoseconds() > 0


def test_tokenize_and_detokenize(server: ServerProcess, folder: Path) -> None:
    stub = tokenizer_pb2_grpc.TokenizerServiceStub(server.channel())
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    texts = ["hello 天地", "", "a<eos>"]
    response = stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=texts, return_tokens=True))
    for text, result in zip(texts, response.results, strict=True):
        assert list(result.token_ids) == tokenizer.encode(text)
        assert list(result.tokens) == [tokenizer.token_bytes(token) for token in result.token_ids]
    bare = stub.Tokenize(
        tokenizer_pb2.TokenizeRequest(texts=texts, omit_special_tokens=True, parse_special_tokens=True)
    )
    assert [list(result.tokens) for result in bare.results] == [[], [], []]
    assert [list(result.token_ids) for result in bare.results] == [
        tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=True) for text in texts
    ]
    sequences = [types_pb2.TokenIds(ids=result.token_ids) for result in response.results[:2]]
    texts_again = stub.Detokenize(tokenizer_pb2.DetokenizeRequest(sequences=sequences)).texts
    assert list(texts_again) == texts[:2]
    kept = stub.Detokenize(tokenizer_pb2.DetokenizeRequest(sequences=sequences[:1], keep_special_tokens=True)).texts
    assert kept[0] == "<bos>hello 天地"


def test_what_the_tokenizer_service_refuses(server: ServerProcess) -> None:
    stub = tokenizer_pb2_grpc.TokenizerServiceStub(server.channel())
    many = refused(stub.Tokenize, tokenizer_pb2.TokenizeRequest(texts=["a"] * 1025))
    assert many.violations == {"texts": "has 1025 entries; accepted: at most 1024"}
    ids = [types_pb2.TokenIds(ids=[1]), types_pb2.TokenIds(ids=[1, 52])]
    beyond = refused(stub.Detokenize, tokenizer_pb2.DetokenizeRequest(sequences=ids))
    assert list(beyond.violations) == ["sequences[1].ids[1]"]
    assert refused(stub.Tokenize, tokenizer_pb2.TokenizeRequest(model="x")).reason == "MODEL_NOT_FOUND"
    raw: Any = server.channel().unary_unary("/pellucid.v1.TokenizerService/Tokenize")
    unknown = refused(raw, b"\x28\x01")
    assert (unknown.code, unknown.reason, list(unknown.violations)) == (
        "INVALID_ARGUMENT",
        "UNSUPPORTED_FIELD",
        ["field 5"],
    )
    assert list(refused(raw, b"\x12\x01a\x12\x01\xff").violations) == ["texts[1]"]


def test_a_checkpoint_without_a_tokenizer(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "bare", tiny_config(vocab_size=300), tokenizer=False)
    with serve(folder, "--threads", "1", "--kv-cache-memory", "1MiB") as server:
        channel = server.channel()
        answer = generate(channel, [3, 299], stopping={"max_new_tokens": 5})
        assert (answer.text, len(answer.token_ids)) == ("", 5)
        with pytest.raises(grpc.RpcError) as caught:
            generate(channel, "text", stopping={"stop_strings": ["x"]})
        found = failure(caught.value)
        assert (found.reason, set(found.violations)) == ("UNSUPPORTED_FIELD", {"text", "stopping.stop_strings"})
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        assert refused(stub.Tokenize, tokenizer_pb2.TokenizeRequest(texts=["a"])).reason == "UNSUPPORTED_FIELD"
        (model,) = model_pb2_grpc.ModelServiceStub(channel).ListModels(model_pb2.ListModelsRequest()).models
        assert (model.tokenizer_sha256, model.vocab_size) == ("", 300)


@pytest.mark.parametrize("version", ["grpc-v1", "grpc-v1alpha"])
def test_reflection_with_buf_curl(server: ServerProcess, version: str) -> None:
    url = f"http://{server.address}"
    curl = [str(BUF), "curl", "--http2-prior-knowledge", "--protocol", "grpc", "--reflect-protocol", version]
    listed = subprocess.run([*curl, "--list-services", url], capture_output=True, text=True, timeout=30, check=True)
    assert {f"pellucid.v1.{name}" for name in SERVICES} <= set(listed.stdout.split())
    data = json.dumps({"text": "hello", "stopping": {"maxNewTokens": 3, "ignoreEos": True}})
    called = subprocess.run(
        [*curl, "--data", data, f"{url}/pellucid.v1.InferenceService/Generate"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert called.stdout.count('"tokenIds"') >= 1
    assert "FINISH_REASON_MAX_NEW_TOKENS" in called.stdout
