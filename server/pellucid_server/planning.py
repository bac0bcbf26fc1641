"""From a prompt's tokens and a request's wishes to the engine's orders: room, truncation, windows, lengths.

N is the trained context, C what the KV cache holds; a prompt has n tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pellucid_server.engine.messages import LogprobWish, Sampling
from pellucid_server.errors import InvalidRequest, PromptTooLong, RequestTooLarge, Violation
from pellucid_server.kv.window import FULL, ContextWindow
from pellucid_server.live_request import NO_OPTIONS, EngineOptions, Plan
from pellucid_server.served import ServedModel

ROLL_SINKS = 4
"""First tokens that ROLL keeps unless told otherwise."""
HOPS_PER_WINDOW = 4
"""REENCODE drops this share of its window at a time unless told otherwise."""
MAX_PROMPT_LOGPROBS = 2**18
"""Log-probabilities of a prompt's tokens and of their alternatives in one answer."""


@dataclass(frozen=True)
class ContextWish:
    """A context policy as asked for: "reject", "truncate", "roll" or "reencode"; None: the default of that number."""

    overflow: str
    window: int | None = None
    sinks: int | None = None
    hop: int | None = None

    @property
    def slides(self) -> bool:
        return self.overflow in ("roll", "reencode")


@dataclass(frozen=True)
class Wishes:
    """What a request asks of the engine, defaults resolved, before its prompt is known."""

    prompt_field: str
    """Name of the field the prompt came in, for messages."""
    sampling: Sampling
    max_new_tokens: int
    min_new_tokens: int
    stop_ids: tuple[int, ...]
    ignore_eos: bool
    context: ContextWish
    options: EngineOptions = NO_OPTIONS
    end_ids: tuple[int, ...] = ()
    """Ids that end this output like the model's end tokens."""


def make_plan(model: ServedModel, wishes: Wishes, prompt: list[int]) -> Plan:
    """Raises InvalidRequest for an empty prompt or window and for log-probabilities of tokens that are not there,
    PromptTooLong beyond N, RequestTooLarge beyond C."""
    if not prompt:
        raise InvalidRequest([Violation(wishes.prompt_field, "comes to 0 tokens; accepted: 1 token or more")])
    kept, context = prompt, context_window(model, wishes.context, prompt)
    if wishes.context.overflow == "truncate":
        kept = prompt[-kept_by_truncation(model.context_length, wishes.max_new_tokens) :]
    check_room(model, wishes, len(kept), context)
    longest = len(kept) + wishes.max_new_tokens if wishes.context.slides else model.context_length
    dropped = len(prompt) - len(kept)
    return Plan(
        prompt=kept,
        prompt_token_count=len(prompt),
        dropped_token_count=dropped + context.unseen(len(kept) - 1),
        sampling=wishes.sampling,
        max_new_tokens=wishes.max_new_tokens,
        min_new_tokens=wishes.min_new_tokens,
        eos_ids=[] if wishes.ignore_eos else sorted({*model.eos_ids, *wishes.end_ids}),
        stop_ids=list(wishes.stop_ids),
        max_length=longest if model.can_hold(context, longest) else min(longest, model.cache_tokens),
        overflow=wishes.context.overflow,
        context=context,
        options=replace(wishes.options, prompt_logprobs=_of_kept(wishes.options.prompt_logprobs, len(prompt), dropped)),
    )


def _of_kept(wish: LogprobWish | None, length: int, dropped: int) -> LogprobWish | None:
    """A wish about a prompt of `length` tokens, for what is left without the first `dropped`. Raises InvalidRequest."""
    if wish is None:
        return None
    if not wish.start < length:
        text = f"{wish.start} is not accepted; accepted: a whole number from 0 to {length - 1}"
        raise InvalidRequest([Violation("output.prompt_logprobs.start_position", text)])
    start = max(0, wish.start - dropped)
    entries = (length - dropped - start) * (1 + wish.top_count + len(wish.token_ids))
    if not entries <= MAX_PROMPT_LOGPROBS:
        text = f"comes to {entries} entries; accepted: at most {MAX_PROMPT_LOGPROBS}; raise start_position"
        raise InvalidRequest([Violation("output.prompt_logprobs", text)])
    return LogprobWish(wish.top_count, wish.token_ids, start)


def context_window(model: ServedModel, wish: ContextWish, prompt: list[int]) -> ContextWindow:
    """The policy with its numbers. Raises InvalidRequest where they do not fit together.

    Unset: S = 4 under ROLL, under REENCODE 1 where the prompt begins with BOS, else 0; W = N - S; hop = W / 4.
    """
    if not wish.slides:
        return FULL
    length = model.context_length
    sinks = wish.sinks
    if sinks is None:
        wanted = ROLL_SINKS if wish.overflow == "roll" else int(prompt[0] == model.bos_id)
        sinks = max(0, min(wanted, length - (wish.window or 1)))
    window = length - sinks if wish.window is None else wish.window
    if not (window >= 1 and sinks + window <= length):
        text = f"{window} with {sinks} sinks is not accepted; accepted: 1 or more, with the sinks at most {length}"
        raise InvalidRequest([Violation("context.window_tokens", text)])
    if wish.overflow == "roll":
        return ContextWindow("roll", sinks, window)
    hop = max(1, window // HOPS_PER_WINDOW) if wish.hop is None else wish.hop
    if not 1 <= hop <= window:
        text = f"{hop} is not accepted; accepted: 1 to the window, which is {window}"
        raise InvalidRequest([Violation("context.hop_tokens", text)])
    return ContextWindow("reencode", sinks, window, hop)


def check_text_size(model: ServedModel, wishes: Wishes, text: str) -> None:
    """Refuses, before any work, a text that comes to more than N tokens even if each were the longest there is."""
    if wishes.context.overflow == "reject" and model.longest_token > 0:
        least = -(-len(text.encode()) // model.longest_token)
        if least > model.context_length:
            description = f"has at least {least} tokens; the context is {model.context_length} tokens"
            raise PromptTooLong([Violation(wishes.prompt_field, description)])


def kept_by_truncation(context_length: int, max_new_tokens: int) -> int:
    """Tokens that TRUNCATE keeps of a prompt: max(ceil(N / 2), N - max_new_tokens)."""
    return max((context_length + 1) // 2, context_length - max_new_tokens)


def effective_max_new_tokens(plan: Plan) -> int:
    """Tokens that the request may make at the most, after the room left."""
    return min(plan.max_new_tokens, plan.max_length - len(plan.prompt))


def check_room(model: ServedModel, wishes: Wishes, prompt_tokens: int, context: ContextWindow = FULL) -> None:
    """A prompt must fit, or its window must, and leave room for one token unless none is asked for."""
    needed = prompt_tokens + (1 if wishes.max_new_tokens > 0 else 0)
    if context.kind == "full" and needed > model.context_length:
        text = f"has {prompt_tokens} tokens; the context is {model.context_length} tokens"
        if prompt_tokens == model.context_length:
            text += " and leaves no room for a new one; max_new_tokens = 0 is accepted"
        raise PromptTooLong([Violation(wishes.prompt_field, text)])
    if not model.can_hold(context, needed):
        blocks = context.blocks_needed(needed, model.block_size, model.native_window)
        window = f", nor does their window of {context.span}" if context.span else ""
        raise RequestTooLarge(
            f"{prompt_tokens} prompt tokens and {needed - prompt_tokens} new ones do not fit{window}: {blocks} blocks "
            f"of {model.block_size} tokens are needed, and the KV cache holds {model.block_count}, "
            f"{model.cache_tokens} tokens in all"
        )
