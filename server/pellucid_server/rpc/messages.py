"""The messages of a Generate stream, made from a request's state."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from pellucid.v1 import inference_pb2, types_pb2
from pellucid_server.delivery import Batch, Output
from pellucid_server.ends import End
from pellucid_server.engine.messages import Sampling, TokenLogprob
from pellucid_server.live_request import LiveRequest, Plan, window_moves
from pellucid_server.planning import effective_max_new_tokens
from pellucid_server.ranges import SAMPLING
from pellucid_server.rpc.validation import GenerateSpec
from pellucid_server.served import DefaultSampling, ServedModel

_FINISH_REASONS = {
    "eos": inference_pb2.FINISH_REASON_EOS,
    "stop_token": inference_pb2.FINISH_REASON_STOP_TOKEN,
    "stop_string": inference_pb2.FINISH_REASON_STOP_STRING,
    "max_new_tokens": inference_pb2.FINISH_REASON_MAX_NEW_TOKENS,
    "context_full": inference_pb2.FINISH_REASON_CONTEXT_FULL,
    "time_limit": inference_pb2.FINISH_REASON_TIME_LIMIT,
    "constraint_done": inference_pb2.FINISH_REASON_CONSTRAINT_DONE,
    "cancelled": inference_pb2.FINISH_REASON_CANCELLED,
    "no_token": inference_pb2.FINISH_REASON_NO_TOKEN,
}
_OVERFLOWS = {
    "reject": inference_pb2.CONTEXT_OVERFLOW_REJECT,
    "truncate": inference_pb2.CONTEXT_OVERFLOW_TRUNCATE,
    "roll": inference_pb2.CONTEXT_OVERFLOW_ROLL,
    "reencode": inference_pb2.CONTEXT_OVERFLOW_REENCODE,
}


def prompt_info(
    model: ServedModel, spec: GenerateSpec, request: LiveRequest, plan: Plan, prompt: list[int]
) -> inference_pb2.PromptInfo:
    """Every value in force; what is known only once the prompt has run is added then."""
    wishes = spec.wishes
    sampling = scalars(plan.sampling)
    sampling.seed = plan.sampling.seed
    sampling.logit_bias.update(plan.sampling.logit_bias)
    sampling.allowed_token_ids.extend(plan.sampling.allowed_ids)
    sampling.sequence_count = spec.sequence_count
    max_new_tokens = effective_max_new_tokens(plan)
    stopping = inference_pb2.StoppingCriteria(
        max_new_tokens=max_new_tokens,
        min_new_tokens=plan.min_new_tokens,
        stop_strings=spec.stop_strings,
        stop_token_ids=sorted({*plan.eos_ids, *plan.stop_ids}),
        include_stop_in_text=spec.include_stop_in_text,
        ignore_eos=wishes.ignore_eos,
    )
    if spec.time_limit is not None:
        stopping.time_limit.CopyFrom(duration(spec.time_limit))
    return inference_pb2.PromptInfo(
        request_id=request.request_id,
        model=model.name,
        prompt_token_count=plan.prompt_token_count,
        dropped_token_count=plan.dropped_token_count,
        token_ids=prompt if spec.return_prompt_token_ids else [],
        effective_sampling=sampling,
        effective_max_new_tokens=max_new_tokens,
        effective_context=context_policy(plan),
        effective_stopping=stopping,
    )


def context_policy(plan: Plan) -> inference_pb2.ContextPolicy:
    """The policy in force, with its numbers where it slides."""
    policy = inference_pb2.ContextPolicy(overflow=_OVERFLOWS[plan.overflow])
    if plan.context.kind != "full":
        policy.window_tokens, policy.sink_tokens = plan.context.window, plan.context.sinks
    if plan.context.kind == "reencode":
        policy.hop_tokens = plan.context.hop
    return policy


def scalars(sampling: Sampling | DefaultSampling) -> types_pb2.SamplingParams:
    """The values that requests, operators and checkpoints may set alike."""
    return types_pb2.SamplingParams(**{name: getattr(sampling, name) for name in SAMPLING})


def add_prompt_logprobs(info: inference_pb2.PromptInfo, request: LiveRequest, model: ServedModel) -> None:
    info.logprobs.extend(token_logprob(entry, model) for entry in request.prompt_logprobs)


def delta(batch: Batch, model: ServedModel) -> inference_pb2.GenerateResponse:
    """A message with new output."""
    outputs = batch.outputs
    if len(outputs) > 1:
        news = {index: output for index, output in outputs.items() if output.has_content or output.end is not None}
        outputs = dict(sorted((news or outputs).items()))
    response = inference_pb2.GenerateResponse()
    for index, output in outputs.items():
        _fill(response.outputs.add(), index, output, model)
    return response


def _fill(message: inference_pb2.OutputDelta, index: int, output: Output, model: ServedModel) -> None:
    message.sequence_index = index
    message.text = output.text
    message.token_ids.extend(output.token_ids)
    if output.logprobs:
        message.logprobs.extend(token_logprob(entry, model) for entry in output.logprobs)
    if output.end is not None:
        finish = message.finish
        finish.reason = _FINISH_REASONS[output.end.reason]
        finish.output_token_count = output.token_count
        if output.end.matched_token_id is not None:
            finish.matched_token_id = output.end.matched_token_id
        if output.end.matched_stop_string is not None:
            finish.matched_stop_string = output.end.matched_stop_string


def token_logprob(entry: TokenLogprob, model: ServedModel) -> inference_pb2.TokenLogprob:
    """With the bytes of its tokens, where there is a tokenizer."""
    spell = (lambda token_id: b"") if model.tokenizer is None else model.tokenizer.token_bytes
    return inference_pb2.TokenLogprob(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        token=spell(entry.token_id),
        alternatives=[
            inference_pb2.TokenAlternative(token_id=token_id, logprob=logprob, rank=rank, token=spell(token_id))
            for token_id, logprob, rank in entry.alternatives
        ],
    )


def complete(response: inference_pb2.GenerateResponse, request: LiveRequest, plan: Plan, end: End) -> None:
    """Makes a message the last one: usage, timings."""
    response.usage.prompt_token_count = plan.prompt_token_count
    response.usage.cached_token_count = request.cached_tokens
    response.usage.output_token_count = request.output_token_count
    response.timings.CopyFrom(timings(request, end))
    response.timings.window_move_count = window_moves(request, plan)


def timings(request: LiveRequest, end: End) -> inference_pb2.Timings:
    """Where the time went; phases that the request never reached are left unset."""
    result = inference_pb2.Timings(
        total_time=duration(end.at - request.admitted_at),
        preemption_count=request.preemptions,
        engine_recovery_count=request.recoveries,
    )
    if request.first_scheduled_at is None:
        result.queue_time.CopyFrom(duration(end.at - request.admitted_at))
        return result
    first_token_at = end.at if request.first_token_at is None else request.first_token_at
    result.queue_time.CopyFrom(duration(request.first_scheduled_at - request.admitted_at))
    result.prefill_time.CopyFrom(duration(first_token_at - request.first_scheduled_at))
    if request.first_token_at is not None and request.last_token_at is not None:
        result.time_to_first_token.CopyFrom(duration(request.first_token_at - request.admitted_at))
        result.decode_time.CopyFrom(duration(request.last_token_at - request.first_token_at))
    return result


def duration(seconds: float) -> Duration:
    """Seconds as a Duration; clock differences never make it negative."""
    result = Duration()
    result.FromNanoseconds(max(0, round(seconds * 1e9)))
    return result
