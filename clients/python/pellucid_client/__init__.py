"""Client of a Pellucid server: synchronous, asyncio, and the command line `pellucid`.

    >>> from pellucid_client import Client
    >>> with Client("127.0.0.1:50051") as client:
    ...     print(client.generate("今天天气", temperature=0).result().text)

It needs gRPC alone; importing it never loads torch.
"""

from pellucid import __version__ as __version__
from pellucid_client._requests import DetokenizeOptions, GenerateOptions, TokenizeOptions
from pellucid_client.aio import AsyncClient, AsyncGenerateStream
from pellucid_client.client import Client, GenerateStream
from pellucid_client.errors import (
    Cancelled,
    ConnectionFailed,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PellucidError,
    PermissionDenied,
    PromptTooLong,
    RequestIdInUse,
    RequestTooLarge,
    ResourceExhausted,
    SlowConsumer,
    Unauthenticated,
    Unavailable,
    Violation,
)
from pellucid_client.results import (
    Chunk,
    Completion,
    Finish,
    Load,
    Model,
    PromptInfo,
    Sampling,
    ServerInfo,
    Stopping,
    Timings,
    Tokenization,
    Usage,
)

__all__ = [
    "AsyncClient",
    "AsyncGenerateStream",
    "Cancelled",
    "Chunk",
    "Client",
    "Completion",
    "ConnectionFailed",
    "DeadlineExceeded",
    "DetokenizeOptions",
    "Finish",
    "GenerateOptions",
    "GenerateStream",
    "InternalError",
    "InvalidRequest",
    "Load",
    "Model",
    "ModelNotFound",
    "Overloaded",
    "PellucidError",
    "PermissionDenied",
    "PromptInfo",
    "PromptTooLong",
    "RequestIdInUse",
    "RequestTooLarge",
    "ResourceExhausted",
    "Sampling",
    "ServerInfo",
    "SlowConsumer",
    "Stopping",
    "Timings",
    "Tokenization",
    "TokenizeOptions",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "Violation",
]
