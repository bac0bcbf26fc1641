import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "schema_revision", "instance_id", "uptime", "max_running_requests", "max_queued_requests", "max_batched_tokens", "kv_block_size", "kv_block_count", "device", "dtype", "kernels", "batch_invariant")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_REVISION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    version: str
    schema_revision: int
    instance_id: str
    uptime: _duration_pb2.Duration
    max_running_requests: int
    max_queued_requests: int
    max_batched_tokens: int
    kv_block_size: int
    kv_block_count: int
    device: str
    dtype: str
    kernels: str
    batch_invariant: bool
    def __init__(self, version: _Optional[str] = ..., schema_revision: _Optional[int] = ..., instance_id: _Optional[str] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_running_requests: _Optional[int] = ..., max_queued_requests: _Optional[int] = ..., max_batched_tokens: _Optional[int] = ..., kv_block_size: _Optional[int] = ..., kv_block_count: _Optional[int] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., kernels: _Optional[str] = ..., batch_invariant: bool = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("running_request_count", "queued_request_count", "used_kv_block_count", "kv_block_count", "running_token_count", "queued_token_count", "draining")
    RUNNING_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    USED_KV_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    running_request_count: int
    queued_request_count: int
    used_kv_block_count: int
    kv_block_count: int
    running_token_count: int
    queued_token_count: int
    draining: bool
    def __init__(self, running_request_count: _Optional[int] = ..., queued_request_count: _Optional[int] = ..., used_kv_block_count: _Optional[int] = ..., kv_block_count: _Optional[int] = ..., running_token_count: _Optional[int] = ..., queued_token_count: _Optional[int] = ..., draining: bool = ...) -> None: ...
