"""One Generate call's state, from admission to its end; `requests` and `progress` alone change it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pellucid_server.delivery import Outbox
from pellucid_server.ends import End
from pellucid_server.engine.messages import Constraint, LogprobWish, Sampling, Submit, TokenLogprob
from pellucid_server.kv.window import FULL, ContextWindow
from pellucid_server.text.stream import TextStream


@dataclass(frozen=True)
class EngineOptions:
    """What a request asks of the engine beside sampling and lengths; handed on as it is."""

    priority: int = 0
    output_logprobs: LogprobWish | None = None
    prompt_logprobs: LogprobWish | None = None
    constraint: Constraint | None = None
    cache_read: bool = True
    cache_write: bool = True
    cache_salt: str = ""


NO_OPTIONS = EngineOptions()


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
    options: EngineOptions = NO_OPTIONS


@dataclass(eq=False)
class LiveSequence:
    """One output of a request."""

    key: int
    """What the engine calls it."""
    index: int
    text: TextStream | None = None
    generated: list[int] = field(default_factory=list)
    first_token_at: float | None = None
    last_token_at: float | None = None
    preemptions: int = 0
    preemptions_before: int = 0
    """Those under engines that are gone."""
    end: End | None = None

    def add(self, tokens: Sequence[int], times: Sequence[float]) -> None:
        """Tokens, sampled at these moments."""
        self.generated += tokens
        self.last_token_at = times[-1]
        if self.first_token_at is None:
            self.first_token_at = times[0]


@dataclass(eq=False)
class LiveRequest:
    """One Generate call from admission to its end, and until its last message is written."""

    request_id: str
    admitted_at: float
    deadline: float | None
    time_limit: float | None
    outbox: Outbox
    sequences: Sequence[LiveSequence]
    caller: str = ""
    """Whose it is, where callers can be told apart."""
    plan: Plan | None = None
    first_scheduled_at: float | None = None
    cached_tokens: int = 0
    prompt_logprobs: Sequence[TokenLogprob] = ()
    watched_ids: list[int] | None = field(default_factory=list)
    """Ids that may complete a stop string, of which the engine is to tell at once; None: any may."""
    recoveries: int = 0
    deaths: int = 0
    end: End | None = None
    """How the last of its sequences ended, or all of them at once."""
    timer: asyncio.TimerHandle | None = None

    @property
    def key(self) -> int:
        """That of its first sequence."""
        return self.sequences[0].key

    @property
    def unfinished(self) -> list[LiveSequence]:
        return [sequence for sequence in self.sequences if sequence.end is None]

    @property
    def output_token_count(self) -> int:
        """Of all sequences."""
        return sum(len(sequence.generated) for sequence in self.sequences)

    @property
    def first_token_at(self) -> float | None:
        """When the first token of all came."""
        return min((at for s in self.sequences if (at := s.first_token_at) is not None), default=None)

    @property
    def last_token_at(self) -> float | None:
        """When the last token of all came."""
        return max((at for s in self.sequences if (at := s.last_token_at) is not None), default=None)

    @property
    def preemptions(self) -> int:
        return sum(sequence.preemptions for sequence in self.sequences)


def window_moves(request: LiveRequest, plan: Plan) -> int:
    """How often the context windows moved while the outputs were made."""
    first = len(plan.prompt) - 1
    return sum(plan.context.moves(first, first + max(0, len(s.generated) - 1)) for s in request.sequences)


def unseen_tokens(request: LiveRequest, plan: Plan) -> int:
    """Tokens of prompt and output that the model does not see any more, or never saw, when each sequence ends."""
    last = len(plan.prompt) - 1
    cut = plan.prompt_token_count - len(plan.prompt)
    return sum(cut + plan.context.unseen(last + max(0, len(s.generated) - 1)) for s in request.sequences)


def submit_messages(request: LiveRequest, plan: Plan) -> Iterator[Submit]:
    """The request as an engine needs it: every sequence that has not ended, with what was made before.

    The first of them leads the others, and alone reports on the prompt where that has not been done.
    """
    options, unfinished = plan.options, request.unfinished
    # What an engine has died of may come again: then as little as possible is to be lost.
    at_once = request.outbox.is_eager or request.watched_ids is None or request.recoveries > 0
    for sequence in unfinished:
        leads = sequence is unfinished[0]
        yield Submit(
            key=sequence.key,
            prompt=plan.prompt,
            sampling=plan.sampling,
            max_new_tokens=plan.max_new_tokens,
            min_new_tokens=plan.min_new_tokens,
            eos_ids=plan.eos_ids,
            stop_ids=plan.stop_ids,
            max_length=plan.max_length,
            context=plan.context,
            generated=list(sequence.generated),
            deadline=request.deadline,
            time_limit_at=None if request.time_limit is None else request.admitted_at + request.time_limit,
            sequence_index=sequence.index,
            group=unfinished[0].key if len(unfinished) > 1 else None,
            priority=options.priority,
            output_logprobs=options.output_logprobs,
            prompt_logprobs=options.prompt_logprobs if leads and not request.prompt_logprobs else None,
            constraint=options.constraint,
            cache_read=options.cache_read,
            cache_write=options.cache_write,
            cache_salt=options.cache_salt,
            at_once=at_once,
            watched_ids=request.watched_ids or [],
            is_stream=leads and request.outbox.is_paced,
        )
