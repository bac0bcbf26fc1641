"""Continues a few prompts greedily and looks whether the text goes round in circles."""

from __future__ import annotations

from collections.abc import Sequence

from pellucid_model.doctor.finding import Finding
from pellucid_model.doctor.subject import Subject
from pellucid_model.training.samples import continue_tokens

_PROMPTS = 4
_NEW_TOKENS = 48
_REPEATS = 3
_LOOP_TOKENS = 12
"""A loop is a stretch repeated at least _REPEATS times that takes up this many tokens at the end."""


def repetition(subject: Subject) -> Finding:
    stop = subject.tokenizer.eos_ids if subject.tokenizer is not None else ()
    loops: list[str] = []
    tried = 0
    for tokens in subject.sequences[:_PROMPTS]:
        prompt = tokens[: max(1, len(tokens) // 3)]
        room = min(_NEW_TOKENS, (subject.context_length or _NEW_TOKENS + len(prompt)) - len(prompt))
        if room < _LOOP_TOKENS:
            continue
        tried += 1
        period = loop_period(continued := continue_tokens(subject.module, prompt, room, stop=stop))
        if period is not None:
            loops.append(_shown(subject, continued[-period:]))
    if not tried:
        return Finding("repetition", "skipped", f"the context leaves no room for {_LOOP_TOKENS} new tokens")
    evidence = f"{len(loops)} of {tried} greedy continuations of up to {_NEW_TOKENS} tokens end in a loop"
    if 2 * len(loops) >= tried and loops:
        evidence += f", such as {loops[0]} again and again"
        advice = (
            "small and early models do that: train longer, serve with a temperature above 0 or a repetition penalty; "
            "a model that should know better may have learnt the token itself (see label shift)"
        )
        return Finding("repetition", "warning", evidence, advice)
    return Finding("repetition", "ok", evidence)


def loop_period(tokens: Sequence[int]) -> int | None:
    """The shortest stretch that the end of the tokens repeats often and long enough; None: there is none."""
    for period in range(1, len(tokens) // _REPEATS + 1):
        length = max(_REPEATS * period, _LOOP_TOKENS)
        tail = tokens[-length:]
        if len(tail) == length and all(a == b for a, b in zip(tail, tail[period:], strict=False)):
            return period
    return None


def _shown(subject: Subject, tokens: Sequence[int]) -> str:
    if subject.tokenizer is None:
        return f"tokens {list(tokens)}"
    return repr(subject.tokenizer.decode(tokens, keep_special_tokens=True))
