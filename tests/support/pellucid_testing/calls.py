"""Short ways to call a Pellucid server and to read its errors, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from pellucid.v1 import inference_pb2, inference_pb2_grpc, types_pb2

GENERATE = "/pellucid.v1.InferenceService/Generate"


@dataclass(frozen=True)
class Failure:
    """A status with its google.rpc details."""

    code: str
    message: str
    reason: str
    violations: dict[str, str]
    retry_after: float | None
    trailers: dict[str, Any]
    headers: dict[str, Any]


@dataclass
class Answer:
    """A whole stream, summed."""

    messages: list[inference_pb2.GenerateResponse] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(output.text for message in self.messages for output in message.outputs)

    @property
    def token_ids(self) -> list[int]:
        return [token for message in self.messages for output in message.outputs for token in output.token_ids]

    def deltas(self, index: int) -> list[inference_pb2.OutputDelta]:
        """Those of one sequence, in their order."""
        return [output for message in self.messages for output in message.outputs if output.sequence_index == index]

    def sequence(self, index: int) -> tuple[str, list[int], str]:
        """Text, token ids and finish reason of one sequence."""
        deltas = self.deltas(index)
        ids = [token for delta in deltas for token in delta.token_ids]
        return "".join(delta.text for delta in deltas), ids, _reason(deltas[-1].finish)

    @property
    def prompt(self) -> inference_pb2.PromptInfo:
        return self.messages[0].prompt

    @property
    def finish(self) -> inference_pb2.Finish:
        """Of the sequence that ended last."""
        return self.messages[-1].outputs[-1].finish

    @property
    def reason(self) -> str:
        return _reason(self.finish)

    @property
    def usage(self) -> inference_pb2.Usage:
        return self.messages[-1].usage

    @property
    def timings(self) -> inference_pb2.Timings:
        return self.messages[-1].timings


def _reason(finish: inference_pb2.Finish) -> str:
    return inference_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()


def request(
    prompt: str | Sequence[int] = "hello",
    *,
    sampling: dict[str, Any] | None = None,
    stopping: dict[str, Any] | None = None,
    output: dict[str, Any] | None = None,
    **fields: Any,
) -> inference_pb2.GenerateRequest:
    """A GenerateRequest in few words; what is not given is unset."""
    prompts: dict[str, Any] = (
        {"text": prompt} if isinstance(prompt, str) else {"token_ids": types_pb2.TokenIds(ids=prompt)}
    )
    if sampling is not None:
        fields["sampling"] = types_pb2.SamplingParams(**sampling)
    if stopping is not None:
        fields["stopping"] = inference_pb2.StoppingCriteria(**stopping)
    if output is not None:
        fields["output"] = inference_pb2.OutputOptions(**output)
    return inference_pb2.GenerateRequest(**prompts, **fields)


def generate(channel: grpc.Channel, *arguments: Any, timeout: float | None = 20, **fields: Any) -> Answer:
    """Runs `request(...)` to its end."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    return collect(stub.Generate(request(*arguments, **fields), timeout=timeout))


def collect(stream: Iterable[inference_pb2.GenerateResponse]) -> Answer:
    """All messages of a stream; the sums and ends are checked against the rules of the API."""
    answer = Answer(list(stream))
    assert [message.HasField("prompt") for message in answer.messages] == [i == 0 for i in range(len(answer.messages))]
    ends = [i == len(answer.messages) - 1 for i in range(len(answer.messages))]
    for present in ("usage", "timings"):
        assert [message.HasField(present) for message in answer.messages] == ends
    count = max(output.sequence_index for message in answer.messages for output in message.outputs) + 1
    finishes = []
    for index in range(count):
        deltas = answer.deltas(index)
        assert [delta.HasField("finish") for delta in deltas] == [i == len(deltas) - 1 for i in range(len(deltas))]
        finishes.append(deltas[-1].finish)
    assert count == answer.prompt.effective_sampling.sequence_count
    assert answer.usage.output_token_count == sum(finish.output_token_count for finish in finishes)
    for message in answer.messages:
        indices = [output.sequence_index for output in message.outputs]
        assert indices == sorted(set(indices)) != []
    return answer


def cut_off(start: Callable[[float], Any]) -> None:
    """Runs a stream into its deadline after its first message. `start` begins one that has so many seconds.

    A busy machine may need longer for the first message; then there is another try with more time.
    """
    for seconds in (0.3, 3.0, 30.0):
        stream, count = start(seconds), 0
        with contextlib.suppress(grpc.RpcError):
            for _ in stream:
                count += 1
        assert stream.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if count:
            return
    raise AssertionError("no message came before a deadline")


def failure(call: Any) -> Failure:
    """The status of a call that must fail: an error that was raised, or a stream that is run to its end."""
    error: Any = call if isinstance(call, grpc.RpcError) and not hasattr(call, "__next__") else _error_of(call)
    trailers = dict(iter(error.trailing_metadata() or ()))
    status = status_pb2.Status.FromString(trailers.get("grpc-status-details-bin", b""))
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    has_retry = False
    for detail in status.details:
        detail.Unpack(info) or detail.Unpack(bad)
        has_retry = detail.Unpack(retry) or has_retry
    if status.details:
        assert info.domain == "pellucid"
    return Failure(
        code=error.code().name,
        message=error.details(),
        reason=info.reason,
        violations={violation.field: violation.description for violation in bad.field_violations},
        retry_after=retry.retry_delay.ToMilliseconds() / 1000 if has_retry else None,
        trailers=trailers,
        headers=dict(iter(error.initial_metadata() or ())),
    )


def _error_of(stream: Any) -> Any:
    try:
        list(stream)
    except grpc.RpcError as error:
        return error
    raise AssertionError("the call ended OK")
