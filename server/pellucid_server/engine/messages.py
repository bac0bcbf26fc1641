"""What frontend and engine say to each other: typed msgpack messages over a private socket pair (`framing.py`).

Frontend to engine: first Configure, then Submit, Abort and Ping.  Engine to frontend: first Ready or StartFailed, then
one StepDone for every step, or for several.
Times are seconds of the system-wide monotonic clock (time.monotonic()), which both processes share.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import msgspec

from pellucid_server.kv.window import FULL, ContextWindow

FinishKind = Literal[
    "eos",
    "stop_token",
    "max_new_tokens",
    "context_full",
    "time_limit",
    "deadline",
    "non_finite",
    "constraint_done",
    "no_token",
]
"""Ends that the engine decides. Stop strings, cancels and disconnects are the frontend's, by Abort. "no_token": the
constraint, allowed_ids, stop ids and min_new_tokens together leave no token that may follow, before the constraint is
fulfilled; or the constraint takes too much work to follow."""


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """Resolved values, no "unset" left. temperature 0 is argmax; top_k 0, top_p 1, min_p 0, typical_p 1,
    repetition_penalty 1, presence_penalty 0 and frequency_penalty 0 are off."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), each id once."""
    allowed_ids: tuple[int, ...] = ()
    """The only ids that may be chosen; empty: all."""


class LogprobWish(msgspec.Struct, frozen=True, array_like=True):
    """Which log-probabilities to report beside each token: of the raw model distribution, before any setting."""

    top_count: int = 0
    """So many of the likeliest ids."""
    token_ids: tuple[int, ...] = ()
    """And these, wherever they rank."""
    start: int = 0
    """For prompts: tokens before this one are left out."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token's place in the model's distribution."""

    token_id: int
    logprob: float | None
    """None for the first prompt token, which nothing precedes."""
    rank: int
    """1 for the likeliest; 0: unknown."""
    alternatives: tuple[tuple[int, float, int], ...] = ()
    """(token id, logprob, rank): the likeliest in order, then those that were asked for by id."""


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """What the output must match as a whole."""

    kind: Literal["json_schema", "json_object", "regex", "ebnf", "choices"]
    text: str = ""
    """The schema, expression or grammar; "" for the other kinds."""
    choices: tuple[str, ...] = ()


class Configure(msgspec.Struct, frozen=True, tag=True):
    """What to load and how; the first message to a new engine. 0 and "auto" leave the choice to the engine."""

    checkpoint: str
    device: str
    dtype: str
    kv_cache_memory: int
    """Bytes; 0: a share of the memory that is free (cgroup limits respected)."""
    kv_block_size: int
    """Tokens, a power of two; 0: the largest power of two <= min(128, context / 4); on CUDA 256."""
    max_context: int
    """Tokens; 0: the trained context. Needed only where the checkpoint does not say."""
    max_running: int
    max_step_tokens: int
    threads: int
    """0: the cores this process may use."""
    tokenizer_size: int
    """Ids from here on belong to no token and are never sampled; 0: there is no tokenizer."""
    log_level: str
    log_format: str
    module: str = ""
    """ "FILE.py:CLASS" of the user's own module; "": what config.json names."""
    quantize: Literal["none", "int8", "int4"] = "none"
    """Whole numbers for the weights of linear layers."""
    prefix_cache: bool = True
    """Whether computed blocks are kept for later requests that begin alike."""
    speculative_tokens: int = 0
    """How many tokens of a sequence a step may guess, so that it brings more than one; 0: none."""
    kv_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """Of the KV cache; "auto": as `dtype`."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """Whether steps that decode are recorded as CUDA graphs where the model runs on CUDA."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Run one sequence. `generated` holds tokens made before an engine restart; they are computed, not sampled."""

    key: int
    prompt: list[int]
    sampling: Sampling
    max_new_tokens: int
    min_new_tokens: int
    eos_ids: list[int]
    stop_ids: list[int]
    max_length: int
    """Prompt + output may not pass this many tokens; the sequence then ends as context_full."""
    context: ContextWindow = FULL
    generated: list[int] = []
    deadline: float | None = None
    """The caller's deadline: ends as "deadline"."""
    time_limit_at: float | None = None
    """Soft limit: ends as "time_limit"."""
    sequence_index: int = 0
    """Which output of its request this is."""
    group: int | None = None
    """Key of the first of several sequences of one prompt; the others share what it computed. None: it is alone."""
    priority: int = 0
    """Higher runs sooner: a level is worth scheduler.AGEING_SECONDS of waiting."""
    output_logprobs: LogprobWish | None = None
    prompt_logprobs: LogprobWish | None = None
    constraint: Constraint | None = None
    cache_read: bool = True
    """Whether computed blocks of earlier requests may stand in for this prompt's."""
    cache_write: bool = True
    """Whether later requests may use this one's blocks."""
    cache_salt: str = ""
    """Blocks are shared between requests of the same salt only."""
    watched_ids: list[int] = []
    """A step that samples one of these is told at once: the output may end with it for a reason that only the frontend
    knows."""
    is_stream: bool = False
    """Whether somebody reads the tokens as they come, in messages that keep a gap: of several sequences the first."""
    at_once: bool = False
    """Whether each token is told as soon as it is there; else it may wait for the next ones (pace.py)."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Forget a sequence, whatever its state. Unknown keys are ignored; nothing is sent back for it."""

    key: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Are you there? An engine without work answers with a StepDone; one at work says enough by its steps."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and has run a warm-up step."""

    vocab_size: int
    parameters: int
    context_length: int
    kv_block_size: int
    kv_block_count: int
    kv_bytes: int
    max_step_tokens: int
    weight_bytes: int
    device: str
    dtype: str
    kernels: str
    batch_invariant: bool
    architecture: str
    notices: list[str] = []
    position_scheme: str = "absolute"
    """How the model treats positions; with "absolute" no window can roll."""
    native_window: int = 0
    """The widest window of a model all of whose layers have one; else 0."""
    widest_window: int = 0
    """The widest window that any layer has; else 0."""
    warm_up_seconds: float = 0.0
    """The longest step of the warm-up, which is as large as a step gets."""


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start and has said why in one line meant for the operator."""

    message: str


class Finished(msgspec.Struct, frozen=True, array_like=True, gc=False):
    kind: FinishKind
    matched_token_id: int | None = None


class Progress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a report brings for one sequence: new tokens, and perhaps the end."""

    key: int
    tokens: list[int]
    """At most one for each step, or several of one step where a draft came true."""
    finished: Finished | None
    first_scheduled_at: float | None
    """When the first step that worked on the sequence began; None where there was none."""
    preemptions: int
    logprobs: list[TokenLogprob] = []
    """Of each of `tokens`, where the request asked for them."""
    prompt_logprobs: list[TokenLogprob] = []
    """Of the prompt tokens from `prompt_logprobs.start` on, all at once, not later than the first token."""
    cached_tokens: int = 0
    """Prompt tokens that were found in the cache when the sequence first ran."""


class Stats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Engine state after a step; the totals count from the engine's start and only grow."""

    running: int
    waiting: int
    running_tokens: int
    waiting_tokens: int
    free_blocks: int
    """Blocks that hold nothing of use; used, cached and free ones are all there are."""
    used_blocks: int
    """Blocks of sequences that run."""
    prefill_tokens_total: int
    """Prompt (and recomputed) tokens run through the model."""
    preemptions_total: int
    step_sequences: int
    """Sequences in this step; 0 when idle."""
    step_tokens: int
    step_seconds: float
    """Of the first step that is reported."""
    step_phase: Literal["prefill", "decode", "mixed", "idle"]
    gpu_allocated_bytes: int = 0
    """What torch holds for tensors; 0 on the CPU."""
    gpu_reserved_bytes: int = 0
    """What torch has taken from the GPU."""
    cached_blocks: int = 0
    """Blocks that nobody runs on, kept for requests that begin alike; they are given away where blocks are needed."""
    prefix_queried_tokens_total: int = 0
    """Prompt tokens that were looked up in the cache when their sequence first ran."""
    prefix_hit_tokens_total: int = 0
    """Those of them that were found."""
    drafted_tokens_total: int = 0
    """Tokens that were guessed and run through the model."""
    accepted_tokens_total: int = 0
    """Those of them that were sampled indeed."""


class StepDone(msgspec.Struct, frozen=True, tag=True, gc=False):
    """One for every step or several in a row, and one while idle after an abort or a ping.

    Those of quick steps may come together (pace.py).
    """

    progress: list[Progress]
    stats: Stats
    at: list[float]
    """When the tokens of each step were sampled. Where there are several, they were alike, each followed the one before
    at once, and each brought one token for every sequence in `progress`."""

    @property
    def step_seconds(self) -> list[float]:
        """Of each step."""
        return [self.stats.step_seconds, *(end - begin for begin, end in pairwise(self.at))]


ToEngine = Configure | Submit | Abort | Ping
FromEngine = Ready | StartFailed | StepDone

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
