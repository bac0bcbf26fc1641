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


def fill_prompt_info(
    info: inference_pb2.PromptInfo,
    model: ServedModel,
    spec: GenerateSpec,
    request: LiveRequest,
    plan: Plan,
    prompt: list[int],
) -> None:
    """Every value in force; what is known only once the prompt has run is added then."""
    info.request_id = request.request_id
    info.model = model.name
    info.prompt_token_count = plan.prompt_token_count
    info.dropped_token_count = plan.dropped_token_count
    if spec.return_prompt_token_ids:
        info.token_ids.extend(prompt)
    info.effective_max_new_tokens = effective_max_new_tokens(plan)
    _fill_sampling(info.effective_sampling, spec, plan)
    fill_context(info.effective_context, plan)
    _fill_stopping(info.effective_stopping, spec, plan)


def _fill_sampling(sampling: types_pb2.SamplingParams, spec: GenerateSpec, plan: Plan) -> None:
    fill_scalars(sampling, plan.sampling)
    sampling.seed = plan.sampling.seed
    sampling.logit_bias.update(plan.sampling.logit_bias)
    sampling.allowed_token_ids.extend(plan.sampling.allowed_ids)
    sampling.sequence_count = spec.sequence_count


def _fill_stopping(stopping: inference_pb2.StoppingCriteria, spec: GenerateSpec, plan: Plan) -> None:
    stopping.max_new_tokens = effective_max_new_tokens(plan)
    stopping.min_new_tokens = plan.min_new_tokens
    stopping.stop_strings.extend(spec.stop_strings)
    stopping.stop_token_ids.extend(sorted({*plan.eos_ids, *plan.stop_ids}))
    stopping.include_stop_in_text = spec.include_stop_in_text
    stopping.ignore_eos = spec.wishes.ignore_eos
    if spec.time_limit is not None:
        fill_duration(stopping.time_limit, spec.time_limit)


def fill_context(policy: inference_pb2.ContextPolicy, plan: Plan) -> None:
    """The policy in force, with its numbers where it slides."""
    policy.overflow = _OVERFLOWS[plan.overflow]
    if plan.context.kind != "full":
        policy.window_tokens, policy.sink_tokens = plan.context.window, plan.context.sinks
    if plan.context.kind == "reencode":
        policy.hop_tokens = plan.context.hop


def fill_scalars(params: types_pb2.SamplingParams, sampling: Sampling | DefaultSampling) -> None:
    """The values that requests, operators and checkpoints may set alike."""
    for name in SAMPLING:
        setattr(params, name, getattr(sampling, name))


def add_prompt_logprobs(info: inference_pb2.PromptInfo, request: LiveRequest, model: ServedModel) -> None:
    info.logprobs.extend(token_logprob(entry, model) for entry in request.prompt_logprobs)


def fill_outputs(response: inference_pb2.GenerateResponse, batch: Batch, model: ServedModel) -> None:
    """New output."""
    outputs = batch.outputs
    if len(outputs) > 1:
        news = {index: output for index, output in outputs.items() if output.has_content or output.end is not None}
        outputs = dict(sorted((news or outputs).items()))
    for index, output in outputs.items():
        _fill_output(response.outputs.add(), index, output, model)


def _fill_output(message: inference_pb2.OutputDelta, index: int, output: Output, model: ServedModel) -> None:
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
    _fill_timings(response.timings, request, end)
    response.timings.window_move_count = window_moves(request, plan)


def _fill_timings(timings: inference_pb2.Timings, request: LiveRequest, end: End) -> None:
    """Where the time went; phases that the request never reached are left unset."""
    admitted_at, scheduled_at = request.admitted_at, request.first_scheduled_at
    first_token_at, last_token_at = request.first_token_at, request.last_token_at
    fill_duration(timings.total_time, end.at - admitted_at)
    timings.preemption_count = request.preemptions
    timings.engine_recovery_count = request.recoveries
    fill_duration(timings.queue_time, (end.at if scheduled_at is None else scheduled_at) - admitted_at)
    if scheduled_at is None:
        return
    fill_duration(timings.prefill_time, (end.at if first_token_at is None else first_token_at) - scheduled_at)
    if first_token_at is not None and last_token_at is not None:
        fill_duration(timings.time_to_first_token, first_token_at - admitted_at)
        fill_duration(timings.decode_time, last_token_at - first_token_at)


def fill_duration(duration: Duration, seconds: float) -> None:
    """Clock differences never make it negative; 0 counts as set."""
    duration.seconds, duration.nanos = divmod(max(0, round(seconds * 1e9)), 10**9)
