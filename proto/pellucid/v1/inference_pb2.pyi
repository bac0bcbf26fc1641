import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from pellucid.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DeliveryMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DELIVERY_MODE_UNSPECIFIED: _ClassVar[DeliveryMode]
    DELIVERY_MODE_INCREMENTAL: _ClassVar[DeliveryMode]
    DELIVERY_MODE_FINAL: _ClassVar[DeliveryMode]

class ContextOverflow(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTEXT_OVERFLOW_UNSPECIFIED: _ClassVar[ContextOverflow]
    CONTEXT_OVERFLOW_AUTO: _ClassVar[ContextOverflow]
    CONTEXT_OVERFLOW_REJECT: _ClassVar[ContextOverflow]
    CONTEXT_OVERFLOW_TRUNCATE: _ClassVar[ContextOverflow]
    CONTEXT_OVERFLOW_ROLL: _ClassVar[ContextOverflow]
    CONTEXT_OVERFLOW_REENCODE: _ClassVar[ContextOverflow]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_STOP_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP_STRING: _ClassVar[FinishReason]
    FINISH_REASON_MAX_NEW_TOKENS: _ClassVar[FinishReason]
    FINISH_REASON_CONTEXT_FULL: _ClassVar[FinishReason]
    FINISH_REASON_TIME_LIMIT: _ClassVar[FinishReason]
    FINISH_REASON_CONSTRAINT_DONE: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_NO_TOKEN: _ClassVar[FinishReason]

class CancelResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CANCEL_RESULT_UNSPECIFIED: _ClassVar[CancelResult]
    CANCEL_RESULT_CANCELLED: _ClassVar[CancelResult]
    CANCEL_RESULT_NOT_FOUND: _ClassVar[CancelResult]
DELIVERY_MODE_UNSPECIFIED: DeliveryMode
DELIVERY_MODE_INCREMENTAL: DeliveryMode
DELIVERY_MODE_FINAL: DeliveryMode
CONTEXT_OVERFLOW_UNSPECIFIED: ContextOverflow
CONTEXT_OVERFLOW_AUTO: ContextOverflow
CONTEXT_OVERFLOW_REJECT: ContextOverflow
CONTEXT_OVERFLOW_TRUNCATE: ContextOverflow
CONTEXT_OVERFLOW_ROLL: ContextOverflow
CONTEXT_OVERFLOW_REENCODE: ContextOverflow
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason
FINISH_REASON_STOP_STRING: FinishReason
FINISH_REASON_MAX_NEW_TOKENS: FinishReason
FINISH_REASON_CONTEXT_FULL: FinishReason
FINISH_REASON_TIME_LIMIT: FinishReason
FINISH_REASON_CONSTRAINT_DONE: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_NO_TOKEN: FinishReason
CANCEL_RESULT_UNSPECIFIED: CancelResult
CANCEL_RESULT_CANCELLED: CancelResult
CANCEL_RESULT_NOT_FOUND: CancelResult

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "token_ids", "chat", "omit_special_tokens", "sampling", "stopping", "constraint", "output", "cache", "context", "priority", "parse_special_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    OMIT_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PARSE_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    token_ids: _types_pb2.TokenIds
    chat: Chat
    omit_special_tokens: bool
    sampling: _types_pb2.SamplingParams
    stopping: StoppingCriteria
    constraint: DecodingConstraint
    output: OutputOptions
    cache: CacheOptions
    context: ContextPolicy
    priority: int
    parse_special_tokens: bool
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_types_pb2.TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., omit_special_tokens: bool = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[StoppingCriteria, _Mapping]] = ..., constraint: _Optional[_Union[DecodingConstraint, _Mapping]] = ..., output: _Optional[_Union[OutputOptions, _Mapping]] = ..., cache: _Optional[_Union[CacheOptions, _Mapping]] = ..., context: _Optional[_Union[ContextPolicy, _Mapping]] = ..., priority: _Optional[int] = ..., parse_special_tokens: bool = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "omit_generation_prompt")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    OMIT_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    omit_generation_prompt: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., omit_generation_prompt: bool = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class StoppingCriteria(_message.Message):
    __slots__ = ("max_new_tokens", "min_new_tokens", "stop_strings", "stop_token_ids", "include_stop_in_text", "ignore_eos", "time_limit")
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_IN_TEXT_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    min_new_tokens: int
    stop_strings: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_stop_in_text: bool
    ignore_eos: bool
    time_limit: _duration_pb2.Duration
    def __init__(self, max_new_tokens: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., stop_strings: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., include_stop_in_text: bool = ..., ignore_eos: bool = ..., time_limit: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DecodingConstraint(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "ebnf_grammar", "choices")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    EBNF_GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: JsonObject
    regex: str
    ebnf_grammar: str
    choices: Choices
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[_Union[JsonObject, _Mapping]] = ..., regex: _Optional[str] = ..., ebnf_grammar: _Optional[str] = ..., choices: _Optional[_Union[Choices, _Mapping]] = ...) -> None: ...

class JsonObject(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Choices(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, values: _Optional[_Iterable[str]] = ...) -> None: ...

class OutputOptions(_message.Message):
    __slots__ = ("omit_text", "omit_token_ids", "keep_special_tokens", "return_prompt_token_ids", "output_logprobs", "prompt_logprobs", "delivery_mode", "min_tokens_per_message")
    OMIT_TEXT_FIELD_NUMBER: _ClassVar[int]
    OMIT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KEEP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETURN_PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_MODE_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_PER_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    omit_text: bool
    omit_token_ids: bool
    keep_special_tokens: bool
    return_prompt_token_ids: bool
    output_logprobs: LogprobOptions
    prompt_logprobs: LogprobOptions
    delivery_mode: DeliveryMode
    min_tokens_per_message: int
    def __init__(self, omit_text: bool = ..., omit_token_ids: bool = ..., keep_special_tokens: bool = ..., return_prompt_token_ids: bool = ..., output_logprobs: _Optional[_Union[LogprobOptions, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[LogprobOptions, _Mapping]] = ..., delivery_mode: _Optional[_Union[DeliveryMode, str]] = ..., min_tokens_per_message: _Optional[int] = ...) -> None: ...

class LogprobOptions(_message.Message):
    __slots__ = ("top_count", "token_ids", "start_position")
    TOP_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    START_POSITION_FIELD_NUMBER: _ClassVar[int]
    top_count: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    start_position: int
    def __init__(self, top_count: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., start_position: _Optional[int] = ...) -> None: ...

class CacheOptions(_message.Message):
    __slots__ = ("bypass_read", "bypass_write", "salt")
    BYPASS_READ_FIELD_NUMBER: _ClassVar[int]
    BYPASS_WRITE_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    bypass_read: bool
    bypass_write: bool
    salt: str
    def __init__(self, bypass_read: bool = ..., bypass_write: bool = ..., salt: _Optional[str] = ...) -> None: ...

class ContextPolicy(_message.Message):
    __slots__ = ("overflow", "window_tokens", "sink_tokens", "hop_tokens")
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SINK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    overflow: ContextOverflow
    window_tokens: int
    sink_tokens: int
    hop_tokens: int
    def __init__(self, overflow: _Optional[_Union[ContextOverflow, str]] = ..., window_tokens: _Optional[int] = ..., sink_tokens: _Optional[int] = ..., hop_tokens: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("prompt", "outputs", "usage", "timings")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    prompt: PromptInfo
    outputs: _containers.RepeatedCompositeFieldContainer[OutputDelta]
    usage: Usage
    timings: Timings
    def __init__(self, prompt: _Optional[_Union[PromptInfo, _Mapping]] = ..., outputs: _Optional[_Iterable[_Union[OutputDelta, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ...) -> None: ...

class PromptInfo(_message.Message):
    __slots__ = ("request_id", "model", "prompt_token_count", "cached_token_count", "dropped_token_count", "token_ids", "logprobs", "effective_sampling", "effective_max_new_tokens", "effective_context", "effective_stopping")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_STOPPING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt_token_count: int
    cached_token_count: int
    dropped_token_count: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    effective_sampling: _types_pb2.SamplingParams
    effective_max_new_tokens: int
    effective_context: ContextPolicy
    effective_stopping: StoppingCriteria
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_token_count: _Optional[int] = ..., cached_token_count: _Optional[int] = ..., dropped_token_count: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., effective_sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., effective_max_new_tokens: _Optional[int] = ..., effective_context: _Optional[_Union[ContextPolicy, _Mapping]] = ..., effective_stopping: _Optional[_Union[StoppingCriteria, _Mapping]] = ...) -> None: ...

class OutputDelta(_message.Message):
    __slots__ = ("sequence_index", "text", "token_ids", "logprobs", "finish")
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    sequence_index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    finish: Finish
    def __init__(self, sequence_index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "token", "alternatives")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    token: bytes
    alternatives: _containers.RepeatedCompositeFieldContainer[TokenAlternative]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., token: _Optional[bytes] = ..., alternatives: _Optional[_Iterable[_Union[TokenAlternative, _Mapping]]] = ...) -> None: ...

class TokenAlternative(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "token")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    token: bytes
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., token: _Optional[bytes] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "matched_token_id", "matched_stop_string", "output_token_count")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    matched_token_id: int
    matched_stop_string: str
    output_token_count: int
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., matched_token_id: _Optional[int] = ..., matched_stop_string: _Optional[str] = ..., output_token_count: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_token_count", "cached_token_count", "output_token_count")
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    prompt_token_count: int
    cached_token_count: int
    output_token_count: int
    def __init__(self, prompt_token_count: _Optional[int] = ..., cached_token_count: _Optional[int] = ..., output_token_count: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_time", "prefill_time", "time_to_first_token", "decode_time", "total_time", "preemption_count", "window_move_count", "engine_recovery_count")
    QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TIME_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DECODE_TIME_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TIME_FIELD_NUMBER: _ClassVar[int]
    PREEMPTION_COUNT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_MOVE_COUNT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_RECOVERY_COUNT_FIELD_NUMBER: _ClassVar[int]
    queue_time: _duration_pb2.Duration
    prefill_time: _duration_pb2.Duration
    time_to_first_token: _duration_pb2.Duration
    decode_time: _duration_pb2.Duration
    total_time: _duration_pb2.Duration
    preemption_count: int
    window_move_count: int
    engine_recovery_count: int
    def __init__(self, queue_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prefill_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., time_to_first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., decode_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., total_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., preemption_count: _Optional[int] = ..., window_move_count: _Optional[int] = ..., engine_recovery_count: _Optional[int] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: CancelResult
    def __init__(self, result: _Optional[_Union[CancelResult, str]] = ...) -> None: ...
