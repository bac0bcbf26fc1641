"""The phases in which served logits are held against the reference, and the report.

For each prompt: the whole prompt at once; every token as a prompt, in small chunks; every decode step; the sequence
under a window that moves several times, re-encoded and, where the model's positions allow it, rolling. Numbers are
relative to the largest |logit| of the prompt's reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid_server.engine.loading import Loaded
from pellucid_server.engine.runner import ModelRunner
from pellucid_server.kv.window import FULL, ContextWindow
from pellucid_server.verify.reference import Reference, view_of
from pellucid_server.verify.serving import ServedRun, serve_sequence
from pellucid_server.verify.watching import Parting, Trace, WatchedModel, first_parting, watched_modules

CHUNK = 5
"""Tokens of a prefill chunk in the phase that has small ones; no divisor of a block."""


@dataclass(frozen=True)
class Phase:
    """One way of running a sequence."""

    name: str
    prompt_length: int
    """Tokens that are prefilled; the others are decoded."""
    first: int
    """The first token whose logits count here."""
    last: int
    """The last one."""
    context: ContextWindow = FULL
    chunk: int = 4096


@dataclass(frozen=True)
class Difference:
    """The first position of a phase whose logits are not the reference's."""

    phase: Phase
    position: int
    token: int
    largest: float
    """|served - reference|, not relative."""
    relative: float
    served_top: int
    own_top: int
    parting: Parting | None


@dataclass(frozen=True)
class Outcome:
    """What one phase of one prompt came to."""

    phase: Phase
    positions: int
    largest: float
    """Largest difference, relative."""
    same_top: int
    """Positions at which the likeliest token is the same."""
    difference: Difference | None


class Verification:
    """Compares one loaded model with one reference."""

    def __init__(self, loaded: Loaded, reference: Reference, limit: float) -> None:
        self._loaded, self._reference, self._limit = loaded, reference, limit

    def prompt(self, prompt: list[int], new_tokens: int) -> Iterator[Outcome]:
        """All phases of one prompt, as they are done."""
        run = serve_sequence(self._loaded, prompt, new_tokens)
        tokens = run.tokens[: len(prompt) + new_tokens]
        whole, count = Phase("prefill", len(prompt), 0, len(prompt) - 1), len(tokens)
        own = self._reference.logits(tokens)
        yield self._compare(whole, tokens, run, own)
        small = Phase(f"prefill in chunks of {CHUNK}", count, 0, count - 2, chunk=CHUNK)
        yield self._compare(small, tokens, self._served(small, tokens), own)
        if new_tokens > 1:
            yield self._compare(Phase("decode", len(prompt), len(prompt), count - 2), tokens, run, own)
        for phase in self._windows(len(prompt), count):
            rolls = phase.context.kind == "roll"
            expected = self._reference.rolled(tokens, phase.context) if rolls else None
            if not rolls:
                expected = self._reference.reencoded(tokens, phase.context)
            if expected is not None:
                yield self._compare(phase, tokens, self._served(phase, tokens), expected)

    def _windows(self, prompt_length: int, count: int) -> list[Phase]:
        """Windows small enough that they move several times before the end; none for very short sequences."""
        span = min(self._loaded.ready.context_length, max(2, 2 * count // 3))
        if count <= span + 2:
            return []
        sinks = min(1, span - 1)
        window = span - sinks
        kinds = [ContextWindow("reencode", sinks, window, max(1, window // 4))]
        if self._loaded.ready.position_scheme != "absolute":
            kinds.append(ContextWindow("roll", sinks, window))
        length = min(prompt_length, span)
        return [
            Phase(f"{'rolling' if c.kind == 'roll' else 're-encoded'} window of {span}", length, 0, count - 2, c)
            for c in kinds
        ]

    def _served(self, phase: Phase, tokens: list[int]) -> ServedRun:
        return self._run(phase, phase.prompt_length, tokens, self._loaded.runner)

    def _run(self, phase: Phase, length: int, tokens: list[int], runner: ModelRunner) -> ServedRun:
        """The first `length` tokens as a prompt, then the others one by one."""
        return serve_sequence(
            self._loaded,
            tokens[:length],
            len(tokens) - length,
            forced=tokens[length:],
            context=phase.context,
            chunk=phase.chunk,
            runner=runner,
        )

    def _compare(self, phase: Phase, tokens: list[int], run: ServedRun, own: Tensor) -> Outcome:
        scale = float(own.abs().max())
        log_softmax = bool((own.logsumexp(-1).abs() < self._limit).all())  # what its forward ends in
        largest, same_top, first = 0.0, 0, None
        positions = range(phase.first, phase.last + 1)
        for t in positions:
            served, expected = run.logits[t].double(), own[t].double()
            served = served.log_softmax(-1) if log_softmax else served
            apart = float((served - expected).abs().max())
            relative = apart / scale if scale else apart
            largest = max(largest, relative) if relative == relative else float("inf")
            tops = int(torch.nan_to_num(served).argmax()), int(torch.nan_to_num(expected).argmax())
            same_top += tops[0] == tops[1]
            if first is None and not relative <= self._limit:
                parting = self._locate(phase, tokens, t)
                first = Difference(phase, t, tokens[t], apart, relative, *tops, parting)
        return Outcome(phase, len(positions), largest, same_top, first)

    def _locate(self, phase: Phase, tokens: list[int], t: int) -> Parting | None:
        """Run both again, so that the last forward is the one that computes token t, with all their parts watched."""
        module = self._reference.module
        if module is None:
            return None
        served, own = Trace(), Trace()
        runner = self._loaded.runner.around(lambda model: WatchedModel(model, served))
        self._run(phase, min(phase.prompt_length, t + 1), [*tokens, 0][: t + 2], runner)
        view = view_of(tokens, t, phase.context) if phase.context.kind == "reencode" else tokens[: t + 1]
        with watched_modules(module, own), self._reference.watched(own):
            if phase.context.kind == "roll":
                self._reference.rolled(view, phase.context)
            else:
                self._reference.logits(view)
        return first_parting(served, own, len(view), self._limit)
