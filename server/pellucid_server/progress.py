"""What a report brings to one sequence of a live request: its tokens' way into the outbox, and how it ends by that.

In come the engine's Progress and the request; out go text and tokens to the outbox, and an Ending where the sequence
is to end, or with an error the whole request. `requests` then ends it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pellucid_server import errors
from pellucid_server.accounts import Accounts, reason_of
from pellucid_server.delivery import Outbox
from pellucid_server.ends import End
from pellucid_server.engine.messages import Finished, Progress
from pellucid_server.live_request import LiveRequest, LiveSequence


@dataclass(frozen=True)
class Ending:
    """A sequence is to end."""

    end: End
    engine_knows: bool
    """Whether the engine has ended it, and knows no more of it."""


def advance(
    request: LiveRequest, sequence: LiveSequence, progress: Progress, at: Sequence[float], accounts: Accounts
) -> Ending | None:
    """Take in a report's progress, of steps that ended `at` (StepDone.at); None: the sequence goes on."""
    sequence.preemptions = sequence.preemptions_before + progress.preemptions
    _note_prompt(request, progress, accounts)
    finished = progress.finished
    if progress.tokens:
        # The token that ends a sequence as an end or stop token has no text of its own.
        is_end_token = finished is not None and finished.kind in ("eos", "stop_token")
        text, matched, count = _text(sequence, progress.tokens, with_last=not is_end_token)
        tokens = progress.tokens[:count]
        times = at[:count] if len(at) > 1 else [at[0]] * count
        accounts.tokens(request, sequence, times)
        sequence.add(tokens, times)
        request.deaths = 0
        request.outbox.add(tokens, text, index=sequence.index, logprobs=progress.logprobs[:count])
        if matched is not None:
            end = End("stop_string", times[-1], matched_stop_string=matched)
            return Ending(end, engine_knows=finished is not None)
    if finished is not None:
        accounts.engine_finished(finished.kind)
        return Ending(_end_of(request, finished, at[-1]), engine_knows=True)
    error = _undeliverable(request.outbox)
    return None if error is None else Ending(End(reason_of(error), time.monotonic(), error), engine_knows=False)


def _note_prompt(request: LiveRequest, progress: Progress, accounts: Accounts) -> None:
    """What is known of the prompt once it has run: told once, by whichever sequence and engine ran it first."""
    if request.first_scheduled_at is None and progress.first_scheduled_at is not None:
        request.first_scheduled_at = progress.first_scheduled_at
        request.cached_tokens = progress.cached_tokens
        accounts.scheduled(request, progress.first_scheduled_at)
    if progress.prompt_logprobs and not request.prompt_logprobs:
        request.prompt_logprobs = progress.prompt_logprobs
        request.outbox.release()


def _text(sequence: LiveSequence, tokens: Sequence[int], *, with_last: bool) -> tuple[str, str | None, int]:
    """The tokens' text, the stop string that it completed, and how many tokens that took: all where there is none."""
    if sequence.text is None:
        return "", None, len(tokens)
    delta = sequence.text.push(tokens if with_last else tokens[:-1])
    return delta.text, delta.matched_stop, len(tokens) if delta.matched_stop is None else delta.token_count


def _end_of(request: LiveRequest, finished: Finished, at: float) -> End:
    """The engine has ended a sequence."""
    if finished.kind == "non_finite":
        message = f"the model's logits are not finite; request {request.request_id!r} cannot go on"
        return End("non_finite_logits", at, errors.NonFiniteLogits(message))
    if finished.kind == "deadline":
        return End("deadline", at, errors.DeadlineExceeded("the deadline passed before the request was done"))
    return End(finished.kind, at, matched_token_id=finished.matched_token_id)


def _undeliverable(outbox: Outbox) -> errors.ServeError | None:
    """Why the output cannot be handed over any more; None: it can. A write that hangs is cancelled."""
    if outbox.is_stalled(time.monotonic()):
        outbox.interrupt()
        return errors.SlowConsumer("the stream was not read for too long while output piled up")
    if outbox.is_overfull:
        return errors.RequestTooLarge(
            "the output does not fit into one message; ask for less, or for incremental delivery"
        )
    return None
