"""A gRPC server whose answers a test writes, to see what the client makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import code_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from pellucid.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    server_pb2,
    server_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
    types_pb2,
)
from pellucid_testing.node import build_client

Generate = Callable[[inference_pb2.GenerateRequest, grpc.ServicerContext], Iterator[inference_pb2.GenerateResponse]]


def fail(
    context: grpc.ServicerContext, code: grpc.StatusCode, message: str, details: Sequence[Message] = ()
) -> NoReturn:
    """Ends the call with a status and google.rpc details."""
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    assert code_pb2.Code.Name(status.code) == code.name
    context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status raises")


def logprob(token_id: int) -> inference_pb2.TokenLogprob:
    """Of a token that is half a character, with one alternative."""
    other = inference_pb2.TokenAlternative(token_id=9, logprob=-0.25, rank=1, token=b"a")
    return inference_pb2.TokenLogprob(token_id=token_id, logprob=-1.5, rank=2, token=b"\xe5\xa4", alternatives=[other])


def several(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[Any]:
    """Two sequences in turns and together, with log-probabilities."""
    finish = {"reason": inference_pb2.FINISH_REASON_EOS, "output_token_count": 2}
    prompt = inference_pb2.PromptInfo(request_id="r", cached_token_count=2)
    prompt.logprobs.add(token_id=1, token=b"x")
    deltas: list[list[dict[str, Any]]] = [
        [{"sequence_index": 1, "text": "b", "token_ids": [5], "logprobs": [logprob(5)]}],
        [
            {
                "sequence_index": 0,
                "text": "a",
                "token_ids": [3, 4],
                "logprobs": [logprob(3), logprob(4)],
                "finish": finish,
            },
            {"sequence_index": 1, "text": "c", "token_ids": [6], "logprobs": [logprob(6)]},
        ],
        [{"sequence_index": 1, "text": "d", "finish": finish}],
    ]
    for place, outputs in enumerate(deltas):
        message = inference_pb2.GenerateResponse(outputs=[inference_pb2.OutputDelta(**each) for each in outputs])
        if place == 0:
            message.prompt.CopyFrom(prompt)
        if place == 2:
            message.usage.CopyFrom(
                inference_pb2.Usage(prompt_token_count=3, output_token_count=4, cached_token_count=2)
            )
            message.timings.total_time.FromMilliseconds(1500)
        yield message


def answer(*texts: str, reason: inference_pb2.FinishReason = inference_pb2.FINISH_REASON_EOS) -> Generate:
    """A stream of these texts, token ids 1, 2, …"""

    def generate(
        request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        for index, text in enumerate(texts):
            message = inference_pb2.GenerateResponse()
            delta = message.outputs.add(text=text, token_ids=[index + 1])
            if index == 0:
                message.prompt.request_id = request.request_id or "assigned"
                message.prompt.model = "scripted"
                message.prompt.prompt_token_count = 3
                message.prompt.effective_sampling.seed = 7
                message.prompt.effective_max_new_tokens = 256
                message.prompt.effective_context.overflow = inference_pb2.CONTEXT_OVERFLOW_REJECT
            if index == len(texts) - 1:
                delta.finish.reason = reason
                delta.finish.matched_token_id = 2
                delta.finish.output_token_count = len(texts)
                message.usage.prompt_token_count = 3
                message.usage.output_token_count = len(texts)
                message.timings.total_time.FromMilliseconds(1500)
            yield message

    return generate


@dataclass
class Scripted(inference_pb2_grpc.InferenceServiceServicer):
    """The script: what Generate does, and what the unary calls do instead of answering."""

    generate: Generate = field(default_factory=lambda: answer("今天", "天气"))
    unary: Callable[[grpc.ServicerContext], None] = lambda context: None
    requests: list[Any] = field(default_factory=list)
    address: str = ""
    model_name: str = "scripted"
    tokenizer_sha256: str = ""
    health: health.HealthServicer = field(default_factory=health.HealthServicer)

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        yield from self.generate(request, context)

    def seen(self, request: Message, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        self.unary(context)

    def Cancel(
        self, request: inference_pb2.CancelRequest, context: grpc.ServicerContext
    ) -> inference_pb2.CancelResponse:
        self.seen(request, context)
        found = request.request_id == "running"
        return inference_pb2.CancelResponse(
            result=inference_pb2.CANCEL_RESULT_CANCELLED if found else inference_pb2.CANCEL_RESULT_NOT_FOUND
        )


@dataclass
class _Rest(
    model_pb2_grpc.ModelServiceServicer,
    server_pb2_grpc.ServerServiceServicer,
    tokenizer_pb2_grpc.TokenizerServiceServicer,
):
    script: Scripted

    def Tokenize(
        self, request: tokenizer_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> tokenizer_pb2.TokenizeResponse:
        self.script.seen(request, context)
        results = [tokenizer_pb2.Tokenization(token_ids=map(ord, text)) for text in request.texts]
        return tokenizer_pb2.TokenizeResponse(results=results)

    def Detokenize(
        self, request: tokenizer_pb2.DetokenizeRequest, context: grpc.ServicerContext
    ) -> tokenizer_pb2.DetokenizeResponse:
        self.script.seen(request, context)
        return tokenizer_pb2.DetokenizeResponse(texts=["".join(map(chr, each.ids)) for each in request.sequences])

    def ListModels(
        self, request: model_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> model_pb2.ListModelsResponse:
        self.script.seen(request, context)
        return model_pb2.ListModelsResponse(models=[_model(self.script)])

    def GetModel(self, request: model_pb2.GetModelRequest, context: grpc.ServicerContext) -> model_pb2.GetModelResponse:
        self.script.seen(request, context)
        return model_pb2.GetModelResponse(model=_model(self.script, request.name))

    def GetServerInfo(
        self, request: server_pb2.GetServerInfoRequest, context: grpc.ServicerContext
    ) -> server_pb2.GetServerInfoResponse:
        self.script.seen(request, context)
        return server_pb2.GetServerInfoResponse(version="9.8.7", kv_block_size=16, kv_block_count=64, device="cpu")

    def GetLoad(self, request: server_pb2.GetLoadRequest, context: grpc.ServicerContext) -> server_pb2.GetLoadResponse:
        self.script.seen(request, context)
        return server_pb2.GetLoadResponse(running_request_count=2, kv_block_count=64)


def _model(script: Scripted, name: str = "") -> model_pb2.Model:
    return model_pb2.Model(
        name=name or script.model_name,
        vocab_size=100,
        eos_token_ids=[2],
        default_sampling=types_pb2.SamplingParams(temperature=0.0),
        tokenizer_sha256=script.tokenizer_sha256,
    )


def serve(script: Scripted, address: str = "127.0.0.1:0") -> grpc.Server:
    server = grpc.server(ThreadPoolExecutor(max_workers=8), options=[("grpc.so_reuseport", 0)])
    port = server.add_insecure_port(address)
    script.address = f"127.0.0.1:{port}"
    rest = _Rest(script)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(script, server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(rest, server)
    server_pb2_grpc.add_ServerServiceServicer_to_server(rest, server)
    tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(rest, server)
    health_pb2_grpc.add_HealthServicer_to_server(script.health, server)
    script.health.set("", health_pb2.HealthCheckResponse.SERVING)
    server.start()
    return server


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    script = Scripted()
    server = serve(script)
    yield script
    server.stop(grace=None).wait()


@pytest.fixture(scope="session")
def node() -> Path:
    """The folder of node and npm; the Node client is built."""
    return build_client()
