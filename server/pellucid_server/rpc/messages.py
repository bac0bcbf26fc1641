"""The messages of a Generate stream, made from a request's state."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from pellucid.v1 import inference_pb2, types_pb2
from pellucid_server.delivery import Batch
from pellucid_server.live_request import End, LiveRequest, Plan, window_moves
from pellucid_server.planning import effective_max_new_tokens
from pellucid_server.rpc.validation import GenerateSpec
from pellucid_server.served import ServedModel

_FINISH_REASONS = {
    "eos": inference_pb2.FINISH_REASON_EOS,
    "stop_token": inference_pb2.FINISH_REASON_STOP_TOKEN,
    "stop_string": inference_pb2.FINISH_REASON_STOP_STRING,
    "max_new_tokens": inference_pb2.FINISH_REASON_MAX_NEW_TOKENS,
    "context_full": inference_pb2.FINISH_REASON_CONTEXT_FULL,
    "time_limit": inference_pb2.FINISH_REASON_TIME_LIMIT,
    "cancelled": inference_pb2.FINISH_REASON_CANCELLED,
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
    """Every value in force."""
    wishes, sampling = spec.wishes, plan.sampling
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
        effective_sampling=types_pb2.SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
        ),
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


def delta(batch: Batch) -> inference_pb2.GenerateResponse:
    """A message with new output."""
    output = inference_pb2.OutputDelta(text="".join(batch.texts), token_ids=batch.token_ids)
    return inference_pb2.GenerateResponse(outputs=[output])


def complete(response: inference_pb2.GenerateResponse, request: LiveRequest, plan: Plan, end: End) -> None:
    """Makes a message the last one: finish, usage, timings."""
    finish = response.outputs[0].finish
    finish.reason = _FINISH_REASONS[end.reason]
    finish.output_token_count = len(request.generated)
    if end.matched_token_id is not None:
        finish.matched_token_id = end.matched_token_id
    if end.matched_stop_string is not None:
        finish.matched_stop_string = end.matched_stop_string
    response.usage.prompt_token_count = plan.prompt_token_count
    response.usage.output_token_count = len(request.generated)
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
