"""What `pellucid generate` says about an answer beside its text."""

from __future__ import annotations

from pellucid_client.results import Completion

CANCELLED = 3
"""Exit code where somebody else cancelled the request."""


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
    if completion.prompt.dropped_token_count:
        parts.insert(1, f"dropped {completion.prompt.dropped_token_count} tokens of it")
    return ", ".join(parts)


def _milliseconds(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds * 1000:.1f} ms"
