"""ModelService: what is served."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from pellucid.v1 import model_pb2, types_pb2
from pellucid_server.rpc.calls import Call, Calls
from pellucid_server.rpc.directory import Directory
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
    return model_pb2.Model(
        name=model.name,
        max_context_tokens=model.context_length,
        max_output_tokens=model.max_new_tokens_limit,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_ids,
        default_sampling=types_pb2.SamplingParams(
            temperature=model.sampling.temperature,
            top_k=model.sampling.top_k,
            top_p=model.sampling.top_p,
            min_p=model.sampling.min_p,
        ),
        tokenizer_sha256="" if model.tokenizer is None else model.tokenizer.sha256,
    )
