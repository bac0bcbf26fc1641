"""ModelService: what is served."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from pellucid.v1 import model_pb2
from pellucid_server.rpc.calls import Call, Calls
from pellucid_server.rpc.directory import Directory
from pellucid_server.rpc.messages import fill_scalars
from pellucid_server.rpc.validation import check_model_name
from pellucid_server.served import ServedModel

SERVICE = model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name


@dataclass(frozen=True)
class ModelService:
    """The handlers."""

    directory: Directory

    def handlers(self, calls: Calls) -> dict[str, grpc.RpcMethodHandler[bytes, bytes]]:
        return {
            "ListModels": calls.unary("ListModels", model_pb2.ListModelsRequest, self.list_models),
            "GetModel": calls.unary("GetModel", model_pb2.GetModelRequest, self.get_model),
        }

    async def list_models(self, message: model_pb2.ListModelsRequest, call: Call) -> model_pb2.ListModelsResponse:
        return model_pb2.ListModelsResponse(models=[_describe(self.directory.model())])

    async def get_model(self, message: model_pb2.GetModelRequest, call: Call) -> model_pb2.GetModelResponse:
        model = self.directory.model()
        check_model_name(message.name, model)
        return model_pb2.GetModelResponse(model=_describe(model))


def _describe(model: ServedModel) -> model_pb2.Model:
    described = model_pb2.Model(
        name=model.name,
        max_context_tokens=model.context_length,
        max_output_tokens=model.max_new_tokens_limit,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_ids,
        features=_features(model),
        tokenizer_sha256="" if model.tokenizer is None else model.tokenizer.sha256,
        max_top_logprobs=model.max_logprobs,
    )
    fill_scalars(described.default_sampling, model.sampling)
    return described


def _features(model: ServedModel) -> Iterator[model_pb2.Feature]:
    """Those that the checkpoint's files and the settings allow, in ascending order."""
    yield model_pb2.FEATURE_TYPICAL_P
    yield model_pb2.FEATURE_LOGIT_BIAS
    if model.max_sequences > 1:
        yield model_pb2.FEATURE_MULTIPLE_SEQUENCES
    yield model_pb2.FEATURE_OUTPUT_LOGPROBS
    yield model_pb2.FEATURE_PROMPT_LOGPROBS
    if model.tokenizer is not None:
        yield model_pb2.FEATURE_JSON_SCHEMA
        yield model_pb2.FEATURE_REGEX
        yield model_pb2.FEATURE_EBNF_GRAMMAR
        yield model_pb2.FEATURE_CHOICES
    yield model_pb2.FEATURE_PRIORITY
    if model.prefix_cache:
        yield model_pb2.FEATURE_PREFIX_CACHE
    if model.chat is not None:
        yield model_pb2.FEATURE_CHAT
    yield model_pb2.FEATURE_PENALTIES
