"""What the sync and the asyncio client share about calls: each one as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc
from google.protobuf.message import Message

from pellucid.v1 import inference_pb2, model_pb2, server_pb2, tokenizer_pb2
from pellucid_client.errors import DeadlineExceeded, InternalError
from pellucid_client.served import Load, Model, ServerInfo, Tokenization

DEFAULT_ADDRESS = "127.0.0.1:50051"
GENERATE_PATH = "/pellucid.v1.InferenceService/Generate"

Response = TypeVar("Response", bound=Message)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Operation(Generic[Response, Result]):
    """A unary call: where it goes, what comes back, and what the caller gets of it."""

    path: str
    response: type[Response]
    convert: Callable[[Response], Result]


TOKENIZE: Operation[tokenizer_pb2.TokenizeResponse, list[Tokenization]] = Operation(
    "/pellucid.v1.TokenizerService/Tokenize",
    tokenizer_pb2.TokenizeResponse,
    lambda response: [Tokenization.from_message(each) for each in response.results],
)
DETOKENIZE: Operation[tokenizer_pb2.DetokenizeResponse, list[str]] = Operation(
    "/pellucid.v1.TokenizerService/Detokenize",
    tokenizer_pb2.DetokenizeResponse,
    lambda response: list(response.texts),
)
LIST_MODELS: Operation[model_pb2.ListModelsResponse, list[Model]] = Operation(
    "/pellucid.v1.ModelService/ListModels",
    model_pb2.ListModelsResponse,
    lambda response: [Model.from_message(each) for each in response.models],
)
GET_MODEL: Operation[model_pb2.GetModelResponse, Model] = Operation(
    "/pellucid.v1.ModelService/GetModel",
    model_pb2.GetModelResponse,
    lambda response: Model.from_message(response.model),
)
GET_SERVER_INFO: Operation[server_pb2.GetServerInfoResponse, ServerInfo] = Operation(
    "/pellucid.v1.ServerService/GetServerInfo",
    server_pb2.GetServerInfoResponse,
    ServerInfo.from_message,
)
GET_LOAD: Operation[server_pb2.GetLoadResponse, Load] = Operation(
    "/pellucid.v1.ServerService/GetLoad",
    server_pb2.GetLoadResponse,
    Load.from_message,
)
CANCEL: Operation[inference_pb2.CancelResponse, bool] = Operation(
    "/pellucid.v1.InferenceService/Cancel",
    inference_pb2.CancelResponse,
    lambda response: response.result == inference_pb2.CANCEL_RESULT_CANCELLED,
)

# grpc.health.v1, by hand: its messages are one field each, and their package is not among the client's dependencies.
HEALTH_CHECK_PATH = "/grpc.health.v1.Health/Check"
HEALTH_WATCH_PATH = "/grpc.health.v1.Health/Watch"
WHOLE_SERVER = b""
"""A HealthCheckRequest whose service name is empty."""
RETRY_SECONDS = 0.1
"""Between attempts to watch a server that hangs up."""


def is_serving(response: bytes) -> bool:
    """Whether a HealthCheckResponse says SERVING, that is, whether field 1 is 1."""
    return response.startswith(b"\x08\x01")


def serialize(message: Message) -> bytes:
    return message.SerializeToString()


def one(results: list[Result]) -> Result:
    """The only result of a batch of one."""
    if len(results) != 1:
        raise InternalError(f"the server sent {len(results)} results for one input")
    return results[0]


def not_ready(address: str) -> DeadlineExceeded:
    return DeadlineExceeded(f"the server at {address} was not ready in time", code=grpc.StatusCode.DEADLINE_EXCEEDED)
