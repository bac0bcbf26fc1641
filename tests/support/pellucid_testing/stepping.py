"""An engine without its process: scheduler, runner and sampler stepped by hand, every logits row kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pellucid_model.attention import ReferenceAttend
from pellucid_model.decoder import Decoder
from pellucid_model.kernels import library
from pellucid_model.tokenizers import load_tokenizer
from pellucid_server.engine.choosing import Chooser
from pellucid_server.engine.constraint_states import Constraints
from pellucid_server.engine.loading import Loaded, load
from pellucid_server.engine.messages import Configure, Sampling, Submit, TokenLogprob
from pellucid_server.engine.multi_step import Interruption
from pellucid_server.engine.scheduler import Scheduler
from pellucid_server.engine.sequence import Chunk, Sampled, Step
from pellucid_server.kv.blocks import BlockPool
from pellucid_server.kv.prefix import BlockContent

UNINTERRUPTED = Interruption(math.inf)
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def configure(checkpoint: Path, **changes: Any) -> Configure:
    """What a frontend would send, small and on one thread."""
    values: dict[str, Any] = {
        "checkpoint": str(checkpoint),
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_memory": 0,
        "kv_block_size": 8,
        "max_context": 0,
        "max_running": 8,
        "max_step_tokens": 64,
        "threads": 1,
        "log_level": "warning",
        "log_format": "text",
        "module": "",
        "tokenizer_size": 0,
    }
    return Configure(**(values | changes))


def submission(key: int, prompt: list[int], new: int, **changes: Any) -> Submit:
    """A greedy request that ends by its length alone."""
    values: dict[str, Any] = {
        "sampling": GREEDY,
        "min_new_tokens": 0,
        "eos_ids": [],
        "stop_ids": [],
        "max_length": len(prompt) + new,
    }
    return Submit(key=key, prompt=prompt, max_new_tokens=new, **(values | changes))


@dataclass
class Stepper:
    """Runs submissions to their end and remembers what the model said. By default every run meets an empty cache."""

    loaded: Loaded
    chooser: Chooser
    max_running: int = 8
    max_step_tokens: int = 64
    logits: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """By key: the row behind each token that was sampled, and the last one where it was not finite. Of steps in a row,
    the last one's alone."""
    prompt_logits: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    """By key and prompt token: the row that foretold it, where prompt_logprobs were asked for."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    """By key: one for each token, where output_logprobs were asked for."""
    ends: dict[int, str] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    """By key: prompt tokens that were found in the cache."""
    steps: list[Step] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    """Of each step: how often it was run in a row."""
    scheduler: Scheduler | None = None
    """The last run's."""

    @staticmethod
    def of(checkpoint: Path, **changes: Any) -> Stepper:
        wanted = configure(checkpoint, **changes)
        loaded = load(wanted)
        vocab_size = wanted.tokenizer_size or loaded.ready.vocab_size
        constraints = Constraints(lambda: load_tokenizer(checkpoint), vocab_size)
        chooser = Chooser(vocab_size, constraints, library.load_library())
        return Stepper(loaded, chooser, wanted.max_running, wanted.max_step_tokens)

    @property
    def preemptions(self) -> int:
        return self.scheduler.preemptions if self.scheduler is not None else 0

    @property
    def batch_sizes(self) -> list[int]:
        return [len(step.chunks) for step in self.steps]

    @property
    def accepted(self) -> int:
        """Tokens of drafts that came true."""
        return self.scheduler.speculation.accepted if self.scheduler is not None else 0

    def run(
        self,
        *requests: Submit,
        max_step_tokens: int = 0,
        blocks: int = 0,
        gap: int = 0,
        warm: bool = False,
        abort_after: int = -1,
        prefix_cache: bool = True,
        draft_tokens: int = 0,
        most_repeats: int = 1,
        interruption: Interruption = UNINTERRUPTED,
    ) -> Stepper:
        """Run to the end.

        gap          a request joins every so many steps; 0: all at once
        blocks       size of the pool; 0: the engine's
        warm         go on with the cache, pool and scheduler of the last run
        abort_after  abort everything after so many steps; -1: never
        most_repeats how often a step may be run in a row, until the `interruption`
        """
        if not warm or self.scheduler is None:
            pool = BlockPool(blocks or self.loaded.pool.count, self.loaded.pool.block_size)
            ready, budget = self.loaded.ready, max_step_tokens or self.max_step_tokens
            self.scheduler = Scheduler(
                pool,
                self.max_running,
                budget,
                ready.native_window,
                ready.widest_window,
                prefix_cache=prefix_cache,
                draft_tokens=draft_tokens,
            )
            self.scheduler.tables._namespace = b""  # the same in every run, so that their blocks can be compared
        self._forget()
        coming = list(requests)
        while coming or not self.scheduler.idle:
            steps = sum(self.times)
            while coming and (gap == 0 or steps >= gap * (len(requests) - len(coming)) or self.scheduler.idle):
                self.scheduler.submit(coming.pop(0))
            if 0 <= abort_after <= steps:
                for request in requests:
                    self.scheduler.abort(request.key)
                self.scheduler.check_integrity()
                break
            self._step(self.scheduler, most_repeats, interruption)
        return self

    def published(self) -> dict[BlockContent, bytes]:
        """Keys and values of all layers in every block that can be found by its content."""
        if self.scheduler is None:
            return {}
        (memory,) = self.loaded.runner._cache._stores
        return {content: memory[block].numpy().tobytes() for block, content in self.scheduler.pool._content.items()}

    def _forget(self) -> None:
        self.logits, self.prompt_logits, self.tokens, self.logprobs = {}, {}, {}, {}
        self.ends, self.cached, self.steps, self.times = {}, {}, [], []

    def _step(self, scheduler: Scheduler, most_repeats: int, interruption: Interruption) -> None:
        step = scheduler.schedule(0.0, most_repeats)
        sampling = [chunk for chunk in step.chunks if chunk.samples]
        self.chooser.begin(sampling)
        in_a_row = self.chooser.repeatable(step.repeats, interruption) if step.repeats > 1 else None
        sampled: list[list[Sampled]]
        if in_a_row is not None:
            ids, ended, logits, _ = self.loaded.runner.run_steps(step, in_a_row)
            sampled = self.chooser.chosen(ids, logits)
            self.times.append(len(ended))
        else:
            logits = self.loaded.runner.run(step, self._keep_prompt_logits)
            sampled = self.chooser.choose(sampling, logits)
            self.times.append(1)
        self.steps.append(step)
        rows = logits.split([chunk.sampled_rows for chunk in sampling])
        for chunk, own, tokens in zip(sampling, rows, sampled, strict=True):
            self.logits.setdefault(chunk.sequence.request.key, []).extend(own[: len(tokens)].clone())
        for progress in scheduler.complete(step, sampled):
            self.cached[progress.key] = progress.cached_tokens
            if progress.tokens:
                self.tokens.setdefault(progress.key, []).extend(progress.tokens)
            if progress.logprobs:
                self.logprobs.setdefault(progress.key, []).extend(progress.logprobs)
            if progress.finished is not None:
                self.ends[progress.key] = progress.finished.kind
        scheduler.check_integrity()

    def _keep_prompt_logits(self, chunk: Chunk, first: int, logits: torch.Tensor) -> None:
        rows = self.prompt_logits.setdefault(chunk.sequence.request.key, {})
        for target, row in enumerate(logits, start=first):
            assert target not in rows, "scored twice"
            rows[target] = row.clone()


def same_in_company(stepper: Stepper) -> bool:
    """Whether a sequence's logits are the same alone, beside all others that may run, and with its prompt in pieces."""
    ready, most = stepper.loaded.ready, stepper.max_running
    lengths = [2 + (ready.context_length - 6) * key // (most - 1) for key in range(most)]
    crowd = [
        submission(key, [(7 * i + 3 * key) % ready.vocab_size for i in range(length)], 4)
        for key, length in enumerate(lengths)
    ]

    def last(requests: list[Submit], step_tokens: int) -> torch.Tensor:
        return torch.stack(stepper.run(*requests, max_step_tokens=step_tokens).logits[most - 1])

    whole = sum(lengths)
    ways = ((crowd, whole), (crowd, most + 1), (crowd[-1:], most))
    return all(torch.equal(last(crowd[-1:], whole), last(*way)) for way in ways)


def reference_logits(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """The float64 textbook: logits [n, V] at every position of one whole sequence."""
    positions = torch.arange(len(tokens))
    with torch.no_grad():
        hidden = model(torch.tensor(tokens), positions, ReferenceAttend([len(tokens)], positions))
        return model.logits(hidden)


def poison(stepper: Stepper, token: int) -> None:
    """Make the token's embedding NaN. Weights are looked through when they are loaded, so it is done afterwards."""
    table = stepper.loaded.runner._model.embedding.table  # type: ignore[attr-defined]
    if table.format != "float32":
        raise ValueError(f"a table in {table.format} cannot be poisoned")
    table.weight.view(torch.float32).view(table.count, table.width)[token] = float("nan")
