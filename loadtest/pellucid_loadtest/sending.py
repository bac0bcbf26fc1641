"""gRPC: the channel of a user, the messages of requests, and what a failed call is called.

A channel here has a connection of its own and never retries, so that what is measured is one attempt of one client.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import grpc
from google.protobuf.json_format import MessageToDict

from pellucid.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    server_pb2,
    server_pb2_grpc,
)
from pellucid_client._security import call_metadata, channel_credentials, read_token
from pellucid_client.errors import error_from_rpc
from pellucid_loadtest.options import OVERFLOW, LoadOptions
from pellucid_loadtest.workloads import ModelShape, Request

CONNECT_SECONDS = 5.0
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # Otherwise channels to one address share a connection.
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class TargetError(Exception):
    """The server to test cannot be used; the text is one line for people."""


@dataclass(frozen=True)
class Target:
    """The server under test. `server` is its ServerInfo as JSON."""

    model: ModelShape
    server: dict[str, object]


@dataclass(frozen=True)
class Failure:
    """How a call ended that did not end well."""

    code: str
    reason: str
    message: str


class UserChannel:
    """The connection of one user. Raises ValueError for files that TLS or the token cannot be had from."""

    def __init__(self, address: str, security: LoadOptions | None = None) -> None:
        loopback = address.startswith(("127.", "localhost:", "[::1]:"))
        # A proxy from the environment cannot reach our loopback.
        options = [*_OPTIONS, ("grpc.enable_http_proxy", 0)] if loopback else list(_OPTIONS)
        self.address = address
        credentials, self.metadata = _security(security)
        self._channel = (
            grpc.insecure_channel(address, options)
            if credentials is None
            else grpc.secure_channel(address, credentials, options)
        )
        self.inference = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def connect(self) -> None:
        """Opens the connection now, so that no request pays for it. Where it fails, the requests will say so."""
        with contextlib.suppress(grpc.RpcError):
            self._server_info(wait=True)

    def target(self, model: str | None) -> Target:
        """What is served here; `model` None means the only one. Raises TargetError."""
        try:
            server = self._server_info(wait=False)
            listed = model_pb2_grpc.ModelServiceStub(self._channel).ListModels(
                model_pb2.ListModelsRequest(), timeout=CONNECT_SECONDS, metadata=self.metadata
            )
        except grpc.RpcError as error:
            raise TargetError(f"no Pellucid server to test: {error_from_rpc(error, self.address)}") from None
        names = ", ".join(each.name for each in listed.models)
        found = [each for each in listed.models if model in (None, each.name)]
        if model is not None and not found:
            raise TargetError(f"--model: the server at {self.address} has no {model!r}; it has {names}")
        if len(found) != 1:
            raise TargetError(f"--model: choose one of those at {self.address}: {names}")
        return Target(_shape(found[0]), MessageToDict(server, preserving_proto_field_name=True))

    def close(self) -> None:
        self._channel.close()

    def _server_info(self, *, wait: bool) -> server_pb2.GetServerInfoResponse:
        stub = server_pb2_grpc.ServerServiceStub(self._channel)
        request = server_pb2.GetServerInfoRequest()
        info: server_pb2.GetServerInfoResponse = stub.GetServerInfo(
            request, timeout=CONNECT_SECONDS, wait_for_ready=wait, metadata=self.metadata
        )
        return info


def _security(options: LoadOptions | None) -> tuple[grpc.ChannelCredentials | None, tuple[tuple[str, str], ...]]:
    """None: plain text; and what goes with every call."""
    if options is None:
        return None, ()
    credentials = channel_credentials(
        None,
        tls=options.tls,
        ca_certificate=options.ca_certificate,
        certificate=options.certificate,
        key=options.key,
    )
    return credentials, call_metadata((), None if options.token_file is None else read_token(options.token_file))


def _shape(model: model_pb2.Model) -> ModelShape:
    return ModelShape(
        name=model.name,
        context=model.max_context_tokens,
        max_output=model.max_output_tokens,
        vocab_size=model.vocab_size,
        eos_token_ids=tuple(model.eos_token_ids),
    )


def generate_request(request: Request, model: str, options: LoadOptions) -> inference_pb2.GenerateRequest:
    """The message of one request. The prompt goes as token ids, so that its length is exact."""
    message = inference_pb2.GenerateRequest(model=model)
    message.token_ids.ids.extend(request.prompt)
    message.sampling.seed = request.sampling_seed
    if options.temperature is not None:
        message.sampling.temperature = options.temperature
    message.stopping.max_new_tokens = request.max_new_tokens
    message.stopping.ignore_eos = options.ignore_eos
    if options.context is not None:
        message.context.CopyFrom(inference_pb2.ContextPolicy(overflow=f"{OVERFLOW}{options.context.upper()}"))
    return message


def failure(error: grpc.RpcError, address: str) -> Failure:
    described = error_from_rpc(error, address)
    return Failure(described.code.name, described.reason or "", described.message)
