"""TokenizerService: the model's tokenizer, as Generate uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from pellucid.v1 import tokenizer_pb2, types_pb2
from pellucid_model.tokenizers import InvalidTextError, Tokenizer, UnknownCharacterError
from pellucid_server.errors import InvalidRequest, UnsupportedField, Violation
from pellucid_server.rpc.calls import Call, Calls
from pellucid_server.rpc.directory import Directory
from pellucid_server.rpc.validation import check_model_name
from pellucid_server.rpc.violations import Violations
from pellucid_server.served import ServedModel
from pellucid_server.text_pool import TextPool

SERVICE = tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"].full_name
MAX_ENTRIES = 1024


@dataclass(frozen=True)
class TokenizerService:
    """The handlers. They work while the engine is away."""

    directory: Directory
    pool: TextPool

    def handlers(self, calls: Calls) -> dict[str, grpc.RpcMethodHandler[bytes, bytes]]:
        return {
            "Tokenize": calls.unary("Tokenize", tokenizer_pb2.TokenizeRequest, self.tokenize),
            "Detokenize": calls.unary("Detokenize", tokenizer_pb2.DetokenizeRequest, self.detokenize),
        }

    async def tokenize(self, message: tokenizer_pb2.TokenizeRequest, call: Call) -> tokenizer_pb2.TokenizeResponse:
        tokenizer = self._tokenizer(message.model, "texts", len(message.texts))
        return await self.pool.run(lambda: _tokenize(tokenizer, message))

    async def detokenize(
        self, message: tokenizer_pb2.DetokenizeRequest, call: Call
    ) -> tokenizer_pb2.DetokenizeResponse:
        tokenizer = self._tokenizer(message.model, "sequences", len(message.sequences))
        model = self.directory.model()
        return await self.pool.run(lambda: _detokenize(tokenizer, model, message))

    def _tokenizer(self, name: str, field: str, entries: int) -> Tokenizer:
        model = self.directory.open_model()
        check_model_name(name, model)
        violations = Violations()
        violations.check_count(field, entries, MAX_ENTRIES)
        violations.raise_any()
        if model.tokenizer is None:
            raise UnsupportedField([Violation(field, f"model {model.name!r} has no tokenizer")])
        return model.tokenizer


def _tokenize(tokenizer: Tokenizer, message: tokenizer_pb2.TokenizeRequest) -> tokenizer_pb2.TokenizeResponse:
    response = tokenizer_pb2.TokenizeResponse()
    for index, text in enumerate(message.texts):
        try:
            ids = tokenizer.encode(
                text,
                add_special_tokens=not message.omit_special_tokens,
                parse_special_tokens=message.parse_special_tokens,
            )
        except (UnknownCharacterError, InvalidTextError) as error:
            raise InvalidRequest([Violation(f"texts[{index}]", str(error))]) from None
        pieces = [tokenizer.token_bytes(token_id) for token_id in ids] if message.return_tokens else []
        response.results.add(token_ids=ids, tokens=pieces)
    return response


def _detokenize(
    tokenizer: Tokenizer, model: ServedModel, message: tokenizer_pb2.DetokenizeRequest
) -> tokenizer_pb2.DetokenizeResponse:
    violations = Violations()
    sequences: Sequence[types_pb2.TokenIds] = message.sequences
    for index, sequence in enumerate(sequences):
        violations.check_ids(f"sequences[{index}].ids", sequence.ids, model.vocab_size)
    violations.raise_any()
    keep = message.keep_special_tokens
    texts = [tokenizer.decode(sequence.ids, keep_special_tokens=keep) for sequence in sequences]
    return tokenizer_pb2.DetokenizeResponse(texts=texts)
