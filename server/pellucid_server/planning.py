"""From a prompt's tokens and a request's wishes to the engine's orders: room, truncation, lengths (design: long input).

N is the trained context, C what the KV cache holds, L = min(N, C); a prompt has n tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from pellucid_server.engine.messages import Sampling
from pellucid_server.errors import InvalidRequest, PromptTooLong, RequestTooLarge, Violation
from pellucid_server.live_request import Plan
from pellucid_server.served import ServedModel


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
    overflow: str


def make_plan(model: ServedModel, wishes: Wishes, prompt: list[int]) -> Plan:
    """Raises InvalidRequest for an empty prompt, PromptTooLong beyond N, RequestTooLarge beyond C."""
    if not prompt:
        raise InvalidRequest([Violation(wishes.prompt_field, "comes to 0 tokens; accepted: 1 token or more")])
    kept = prompt
    if wishes.overflow == "truncate":
        kept = prompt[-kept_by_truncation(model.context_length, wishes.max_new_tokens) :]
    check_room(model, wishes, len(kept))
    return Plan(
        prompt=kept,
        prompt_token_count=len(prompt),
        dropped_token_count=len(prompt) - len(kept),
        sampling=wishes.sampling,
        max_new_tokens=wishes.max_new_tokens,
        min_new_tokens=wishes.min_new_tokens,
        eos_ids=[] if wishes.ignore_eos else list(model.eos_ids),
        stop_ids=list(wishes.stop_ids),
        max_length=model.max_length,
    )


def check_text_size(model: ServedModel, wishes: Wishes, text: str) -> None:
    """Refuses, before any work, a text that comes to more than N tokens even if each were the longest there is."""
    if wishes.overflow == "reject" and model.longest_token > 0:
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


def check_room(model: ServedModel, wishes: Wishes, prompt_tokens: int) -> None:
    """A prompt must fit, and leave room for one token unless none is asked for."""
    needed = prompt_tokens + (1 if wishes.max_new_tokens > 0 else 0)
    if needed > model.context_length:
        text = f"has {prompt_tokens} tokens; the context is {model.context_length} tokens"
        if prompt_tokens == model.context_length:
            text += " and leaves no room for a new one; max_new_tokens = 0 is accepted"
        raise PromptTooLong([Violation(wishes.prompt_field, text)])
    if needed > model.cache_tokens:
        raise RequestTooLarge(
            f"{prompt_tokens} prompt tokens and {needed - prompt_tokens} new ones do not fit: the KV cache holds "
            f"{model.cache_tokens} tokens in all"
        )
