"""Server reflection under both of its names: v1alpha, which the library offers, and v1, which has the same messages."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

SERVICE = reflection.SERVICE_NAME
SERVICE_V1 = "grpc.reflection.v1.ServerReflection"


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Lets clients such as grpcurl and buf curl ask for the schema of `services`."""
    servicer = reflection.aio.ReflectionServicer((*services, SERVICE))
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (SERVICE, SERVICE_V1):
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler}),)
        )
