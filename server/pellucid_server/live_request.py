"""One Generate call's state, from admission to its end; `requests` alone changes it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pellucid_server.delivery import Outbox
from pellucid_server.engine.messages import Sampling, Submit
from pellucid_server.errors import ServeError
from pellucid_server.kv.window import FULL, ContextWindow
from pellucid_server.text.stream import TextStream


@dataclass(frozen=True)
class Plan:
    """What a request comes to once its prompt is tokens: the engine's orders."""

    prompt: list[int]
    """As the model sees it, after truncation."""
    prompt_token_count: int
    """As it was sent."""
    dropped_token_count: int
    sampling: Sampling
    max_new_tokens: int
    """As wished for; the room may end the request sooner."""
    min_new_tokens: int
    eos_ids: list[int]
    stop_ids: list[int]
    max_length: int
    overflow: str = "reject"
    """The policy in force: "reject", "truncate", "roll" or "reencode"."""
    context: ContextWindow = FULL


@dataclass(frozen=True)
class End:
    """How a request ended: `error` where the call does not end OK."""

    reason: str
    at: float
    error: ServeError | None = None
    matched_token_id: int | None = None
    matched_stop_string: str | None = None


@dataclass(eq=False)
class LiveRequest:
    """One Generate call from admission to its end, and until its last message is written."""

    key: int
    request_id: str
    admitted_at: float
    deadline: float | None
    time_limit: float | None
    outbox: Outbox
    caller: str = ""
    """Whose it is, where callers can be told apart."""
    plan: Plan | None = None
    text: TextStream | None = None
    generated: list[int] = field(default_factory=list)
    first_scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    preemptions: int = 0
    recoveries: int = 0
    deaths: int = 0
    end: End | None = None
    preemptions_before: int = 0
    """Those under engines that are gone."""
    timer: asyncio.TimerHandle | None = None


def window_moves(request: LiveRequest, plan: Plan) -> int:
    """How often the context window moved while the output was made."""
    first = len(plan.prompt) - 1
    return plan.context.moves(first, first + max(0, len(request.generated) - 1))


def unseen_tokens(request: LiveRequest, plan: Plan) -> int:
    """Tokens of prompt and output that the model does not see any more, or never saw, in the end."""
    last = len(plan.prompt) - 1 + max(0, len(request.generated) - 1)
    return plan.prompt_token_count - len(plan.prompt) + plan.context.unseen(last)


def submit_message(request: LiveRequest, plan: Plan) -> Submit:
    """The request as an engine needs it: whole, with what was made before."""
    return Submit(
        key=request.key,
        prompt=plan.prompt,
        sampling=plan.sampling,
        max_new_tokens=plan.max_new_tokens,
        min_new_tokens=plan.min_new_tokens,
        eos_ids=plan.eos_ids,
        stop_ids=plan.stop_ids,
        max_length=plan.max_length,
        context=plan.context,
        generated=list(request.generated),
        deadline=request.deadline,
        time_limit_at=None if request.time_limit is None else request.admitted_at + request.time_limit,
    )
