"""Client of a Pellucid server: synchronous, asyncio, and the command line `pellucid`.

    >>> from pellucid_client import Client
    >>> with Client("127.0.0.1:50051") as client:
    ...     print(client.generate("今天天气", temperature=0).result().text)

It needs gRPC alone; importing it never loads torch. gRPC itself is loaded with the first name that is used, so that the
command line is there for Ctrl-C before.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from pellucid import __version__ as __version__

if TYPE_CHECKING:
    from pellucid_client._options import DetokenizeOptions, GenerateOptions, TokenizeOptions
    from pellucid_client.aio import AsyncClient, AsyncGenerateStream
    from pellucid_client.client import Client, GenerateStream
    from pellucid_client.errors import (
        Cancelled,
        ClientClosed,
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
        Output,
        PromptInfo,
        Sampling,
        Stopping,
        Timings,
        TokenAlternative,
        TokenLogprob,
        Usage,
    )
    from pellucid_client.served import Load, Model, ServerInfo, Tokenization

__all__ = [
    "AsyncClient",
    "AsyncGenerateStream",
    "Cancelled",
    "Chunk",
    "Client",
    "ClientClosed",
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
    "Output",
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
    "TokenAlternative",
    "TokenLogprob",
    "Tokenization",
    "TokenizeOptions",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "Violation",
]

_HOMES = ("errors", "results", "served", "_options", "client", "aio")


def __getattr__(name: str) -> object:
    """Loads a public name when it is first asked for (PEP 562)."""
    if name in __all__:
        for home in _HOMES:
            module = import_module(f"{__name__}.{home}")
            if hasattr(module, name):
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
