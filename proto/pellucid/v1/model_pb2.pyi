from pellucid.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Feature(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FEATURE_UNSPECIFIED: _ClassVar[Feature]
    FEATURE_TYPICAL_P: _ClassVar[Feature]
    FEATURE_LOGIT_BIAS: _ClassVar[Feature]
    FEATURE_MULTIPLE_SEQUENCES: _ClassVar[Feature]
    FEATURE_OUTPUT_LOGPROBS: _ClassVar[Feature]
    FEATURE_PROMPT_LOGPROBS: _ClassVar[Feature]
    FEATURE_JSON_SCHEMA: _ClassVar[Feature]
    FEATURE_REGEX: _ClassVar[Feature]
    FEATURE_EBNF_GRAMMAR: _ClassVar[Feature]
    FEATURE_CHOICES: _ClassVar[Feature]
    FEATURE_PRIORITY: _ClassVar[Feature]
    FEATURE_PREFIX_CACHE: _ClassVar[Feature]
    FEATURE_CHAT: _ClassVar[Feature]
    FEATURE_PENALTIES: _ClassVar[Feature]
FEATURE_UNSPECIFIED: Feature
FEATURE_TYPICAL_P: Feature
FEATURE_LOGIT_BIAS: Feature
FEATURE_MULTIPLE_SEQUENCES: Feature
FEATURE_OUTPUT_LOGPROBS: Feature
FEATURE_PROMPT_LOGPROBS: Feature
FEATURE_JSON_SCHEMA: Feature
FEATURE_REGEX: Feature
FEATURE_EBNF_GRAMMAR: Feature
FEATURE_CHOICES: Feature
FEATURE_PRIORITY: Feature
FEATURE_PREFIX_CACHE: Feature
FEATURE_CHAT: Feature
FEATURE_PENALTIES: Feature

class Model(_message.Message):
    __slots__ = ("name", "max_context_tokens", "max_output_tokens", "vocab_size", "eos_token_ids", "default_sampling", "features", "tokenizer_sha256", "max_top_logprobs")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    MAX_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_context_tokens: int
    max_output_tokens: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    default_sampling: _types_pb2.SamplingParams
    features: _containers.RepeatedScalarFieldContainer[Feature]
    tokenizer_sha256: str
    max_top_logprobs: int
    def __init__(self, name: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., max_output_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., default_sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., features: _Optional[_Iterable[_Union[Feature, str]]] = ..., tokenizer_sha256: _Optional[str] = ..., max_top_logprobs: _Optional[int] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...
