"""InferenceService: Generate and Cancel.

A Generate call goes: parse, validate, admit (bounded, before any heavy work); in threads render, tokenize, check the
constraint; plan, start; then the outbox is written to the stream until the request has ended. However the call ends,
the request ends in the table.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc

from pellucid.v1 import inference_pb2
from pellucid_model.tokenizers import InvalidTextError, Tokenizer, UnknownCharacterError
from pellucid_server.chat import ChatError
from pellucid_server.engine import constraint_check
from pellucid_server.engine.messages import Constraint
from pellucid_server.errors import InternalError, InvalidRequest, ServeError, SlowConsumer, Violation
from pellucid_server.live_request import LiveRequest
from pellucid_server.planning import check_text_size, make_plan
from pellucid_server.requests import RequestTable
from pellucid_server.rpc import messages
from pellucid_server.rpc.calls import Call, Calls
from pellucid_server.rpc.directory import Directory
from pellucid_server.rpc.validation import GenerateSpec, validate_generate
from pellucid_server.rpc.validation_options import CONSTRAINT_FIELDS
from pellucid_server.rpc.wire import parse
from pellucid_server.served import ServedModel
from pellucid_server.text.stream import TextStream
from pellucid_server.text_pool import TextPool

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name


SHORT_TEXT = 256
"""Characters of a prompt that is tokenized on the spot, which takes about 0.1 ms at the most."""


@dataclass(frozen=True)
class InferenceService:
    """The handlers. `directory` knows the model once it is loaded."""

    directory: Directory
    table: RequestTable
    pool: TextPool
    checks: TextPool
    """For what may take seconds, so that texts need not wait for it."""

    def handlers(self, calls: Calls) -> dict[str, grpc.RpcMethodHandler[bytes, bytes]]:
        return {
            "Generate": calls.stream("Generate", self.generate),
            "Cancel": calls.unary("Cancel", inference_pb2.CancelRequest, self.cancel),
        }

    async def generate(self, raw: bytes, call: Call) -> None:
        try:
            model, spec, request = self._admit(raw, call)
        except ServeError as error:
            self.table.refuse(error)
            raise
        try:
            await self._serve(model, spec, request, call)
        except asyncio.CancelledError:
            self.table.abandon(request)
            raise
        except ServeError as error:
            self.table.fail(request, error)
            raise
        except Exception:
            self.table.fail(request, InternalError(f"an error in the server ended request {request.request_id!r}"))
            raise
        finally:
            self.table.release(request)

    async def cancel(self, message: inference_pb2.CancelRequest, call: Call) -> inference_pb2.CancelResponse:
        if not message.request_id:
            raise InvalidRequest([Violation("request_id", "is missing; the id of a request in flight is required")])
        found = self.table.cancel(message.request_id, call.caller)
        result = inference_pb2.CANCEL_RESULT_CANCELLED if found else inference_pb2.CANCEL_RESULT_NOT_FOUND
        return inference_pb2.CancelResponse(result=result)

    def _admit(self, raw: bytes, call: Call) -> tuple[ServedModel, GenerateSpec, LiveRequest]:
        """Everything that may refuse the call before it has a place. Nothing here waits."""
        header_id = call.request_id
        call.assign_request_id()
        message = parse(raw, inference_pb2.GenerateRequest)
        request_id = call.assign_request_id(message.request_id)
        model = self.directory.ready_model()
        spec = validate_generate(message, model, header_id)
        request = self.table.admit(
            request_id,
            spec.rules,
            deadline=call.deadline,
            time_limit=spec.time_limit,
            caller=call.caller,
            sequences=spec.sequence_count,
        )
        return model, spec, request

    async def _serve(self, model: ServedModel, spec: GenerateSpec, request: LiveRequest, call: Call) -> None:
        prompt = await tokenized(model, spec, self.pool)
        if spec.stop_strings and (stop_ids := model.stop_ids) is not None:
            request.watched_ids = await self.pool.run(lambda: stop_ids.of(spec.stop_strings))
        plan = make_plan(model, spec.wishes, prompt)
        constraint = spec.wishes.options.constraint
        if constraint is not None:
            await self.checks.run(lambda: check_constraint(constraint))
        self.table.start(request, plan, lambda: _text_stream(model, spec))
        response = inference_pb2.GenerateResponse()
        messages.fill_prompt_info(response.prompt, model, spec, request, plan, prompt)
        del prompt
        first = True
        while True:
            await request.outbox.wait()
            end = request.end
            if end is not None and end.error is not None:
                raise end.error
            messages.fill_outputs(response, request.outbox.take(), model)
            if first:
                response.prompt.cached_token_count = request.cached_tokens
                if request.prompt_logprobs:
                    await asyncio.to_thread(messages.add_prompt_logprobs, response.prompt, request, model)
                first = False
            last = None if request.outbox.has_more else end
            if last is not None:
                messages.complete(response, request, plan, last)
            await _write(call, response, request)
            if last is not None:
                return
            response = inference_pb2.GenerateResponse()


async def _write(call: Call, response: inference_pb2.GenerateResponse, request: LiveRequest) -> None:
    """Raises the request's own error where the table gave up waiting for the reader."""
    try:
        await call.send(response)
    except asyncio.CancelledError:
        if request.end is not None and isinstance(request.end.error, SlowConsumer):
            raise request.end.error from None
        raise
    request.outbox.written()


async def tokenized(model: ServedModel, spec: GenerateSpec, pool: TextPool) -> list[int]:
    """As prompt_tokens, in a thread where that takes longer than the way there and back."""
    if spec.token_ids is not None or (spec.text is not None and len(spec.text) <= SHORT_TEXT):
        return prompt_tokens(model, spec)
    return await pool.run(lambda: prompt_tokens(model, spec))


def prompt_tokens(model: ServedModel, spec: GenerateSpec) -> list[int]:
    """The prompt as token ids. Raises InvalidRequest for what template or tokenizer cannot take."""
    if spec.token_ids is not None or model.tokenizer is None:
        return spec.token_ids or []
    try:
        tokens = _chat_tokens(model, spec) if spec.chat is not None else _text_tokens(model, model.tokenizer, spec)
    except (UnknownCharacterError, InvalidTextError) as error:
        raise InvalidRequest([Violation(spec.wishes.prompt_field, str(error))]) from None
    if tokens and not max(tokens) < model.vocab_size:
        description = f"comes to token {max(tokens)}; the model knows tokens 0 to {model.vocab_size - 1}"
        raise InvalidRequest([Violation(spec.wishes.prompt_field, description)])
    return tokens


def _text_tokens(model: ServedModel, tokenizer: Tokenizer, spec: GenerateSpec) -> list[int]:
    text = spec.text or ""
    check_text_size(model, spec.wishes, text)
    return tokenizer.encode(
        text, add_special_tokens=spec.add_special_tokens, parse_special_tokens=spec.parse_special_tokens
    )


def _chat_tokens(model: ServedModel, spec: GenerateSpec) -> list[int]:
    if model.chat is None or spec.chat is None:
        return []
    try:
        pieces = model.chat.render(spec.chat, open_answer=spec.open_answer)
    except ChatError as error:
        field = "chat.messages" if error.index is None else f"chat.messages[{error.index}]"
        raise InvalidRequest([Violation(field, str(error))]) from None
    check_text_size(model, spec.wishes, "".join(text for text, _ in pieces))
    return model.chat.encode(pieces)


def check_constraint(constraint: Constraint) -> None:
    """Raises InvalidRequest for one that no output can follow, or that takes too much to follow."""
    try:
        constraint_check.check(constraint)
    except ValueError as error:
        raise InvalidRequest([Violation(f"constraint.{CONSTRAINT_FIELDS[constraint.kind]}", str(error))]) from None


def _text_stream(model: ServedModel, spec: GenerateSpec) -> TextStream | None:
    if model.tokenizer is None:
        return None
    return TextStream(
        model.tokenizer,
        spec.stop_strings,
        spec.include_stop_in_text,
        spec.keep_special_tokens,
        spec.wishes.min_new_tokens,
    )
