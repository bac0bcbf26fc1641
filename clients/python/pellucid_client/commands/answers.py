"""What `pellucid generate` says about an answer beside its text."""

from __future__ import annotations

from dataclasses import asdict

from pellucid_client.results import Completion, Output, TokenAlternative, TokenLogprob

CANCELLED = 3
"""Exit code where somebody else cancelled the request."""


def record(completion: Completion) -> dict[str, object]:
    """As JSON has it: the one output beside the rest, or several as a list. Log-probabilities where there are some."""
    outputs = [_output_record(output) for output in completion.outputs]
    shown = outputs[0] if len(outputs) == 1 else {"outputs": outputs}
    prompt = asdict(completion.prompt)
    prompt["logprobs"] = [_logprob_record(each) for each in completion.prompt.logprobs]
    if not prompt["logprobs"]:
        del prompt["logprobs"]
    return {**shown, "prompt": prompt, "usage": completion.usage, "timings": completion.timings}


def _output_record(output: Output) -> dict[str, object]:
    known: dict[str, object] = {"text": output.text, "token_ids": output.token_ids, "finish": output.finish}
    return {**known, "logprobs": [_logprob_record(each) for each in output.logprobs]} if output.logprobs else known


def _logprob_record(entry: TokenLogprob | TokenAlternative) -> dict[str, object]:
    """With what the token adds as text too, where it is whole characters by itself."""
    fields = {"token_id": entry.token_id, "token": entry.token, "text": entry.token.decode("utf-8", "replace")}
    fields |= {"logprob": entry.logprob, "rank": entry.rank}
    if isinstance(entry, TokenLogprob):
        fields["alternatives"] = [_logprob_record(each) for each in entry.alternatives]
    return fields


def cancelled_note(completion: Completion) -> str:
    return f"request {completion.prompt.request_id} was cancelled from elsewhere; its text ends early"


def usage_line(completion: Completion) -> str:
    finish, timings = completion.finish, completion.timings
    matched = "" if finish.matched is None else f" {finish.matched!r}"
    parts = [
        f"prompt {completion.usage.prompt_token_count} tokens",
        f"output {completion.usage.output_token_count} tokens",
        f"finish {finish.reason}{matched}",
        f"first token {_milliseconds(timings.time_to_first_token)}",
        f"total {_milliseconds(timings.total_time)}",
        f"seed {completion.prompt.sampling.seed}",
        f"request {completion.prompt.request_id}",
    ]
    if completion.usage.cached_token_count:
        parts[0] += f" ({completion.usage.cached_token_count} cached)"
    if completion.prompt.dropped_token_count:
        parts.insert(1, f"dropped {completion.prompt.dropped_token_count} tokens of it")
    return ", ".join(parts)


def _milliseconds(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds * 1000:.1f} ms"
