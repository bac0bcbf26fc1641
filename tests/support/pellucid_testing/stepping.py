"""An engine without its process: scheduler, runner and sampler stepped by hand, every logits row kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pellucid_model.attention import ReferenceAttend
from pellucid_model.decoder import Decoder
from pellucid_model.kernels import library
from pellucid_server.engine.loading import Loaded, load
from pellucid_server.engine.messages import Configure, Sampling, Submit
from pellucid_server.engine.sampler import Sampler, SamplerRow
from pellucid_server.engine.scheduler import Scheduler
from pellucid_server.kv.blocks import BlockPool

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
    """Runs submissions to their end and remembers what the model said."""

    loaded: Loaded
    max_running: int = 8
    max_step_tokens: int = 64
    logits: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    batch_sizes: list[int] = field(default_factory=list)
    preemptions: int = 0

    @staticmethod
    def of(checkpoint: Path, **changes: Any) -> Stepper:
        wanted = configure(checkpoint, **changes)
        return Stepper(load(wanted), wanted.max_running, wanted.max_step_tokens)

    def run(self, *requests: Submit, max_step_tokens: int = 0, blocks: int = 0, gap: int = 0) -> Stepper:
        """Run to the end; a request joins every `gap` steps (0: all at once), within `blocks` blocks (0: all)."""
        pool = self.loaded.pool
        if blocks:
            pool = BlockPool(blocks, pool.block_size)
        window = self.loaded.ready.native_window
        scheduler = Scheduler(pool, self.max_running, max_step_tokens or self.max_step_tokens, window)
        sampler = Sampler(self.loaded.ready.vocab_size, library.load_library())
        self.logits, self.tokens, self.ends, self.batch_sizes = {}, {}, {}, []
        coming, steps = list(requests), 0
        while coming or not scheduler.idle:
            while coming and (gap == 0 or steps >= gap * (len(requests) - len(coming)) or scheduler.idle):
                scheduler.submit(coming.pop(0))
            step = scheduler.schedule(0.0)
            steps += 1
            self.batch_sizes.append(len(step.chunks))
            logits = self.loaded.runner.run(step)
            sampling = [chunk.sequence for chunk in step.chunks if chunk.samples]
            rows = [SamplerRow(s.request.sampling, tuple(s.banned_ids), s.output_count) for s in sampling]
            for sequence, row in zip(sampling, logits, strict=True):
                self.logits.setdefault(sequence.request.key, []).append(row.clone())
            for progress in scheduler.complete(step, sampler.sample(logits, rows) if rows else []):
                if progress.token is not None:
                    self.tokens.setdefault(progress.key, []).append(progress.token)
                if progress.finished is not None:
                    self.ends[progress.key] = progress.finished.kind
            scheduler.check_integrity()
        self.preemptions = scheduler.preemptions
        return self


def reference_logits(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """The float64 textbook: logits [n, V] at every position of one whole sequence."""
    positions = torch.arange(len(tokens))
    with torch.no_grad():
        hidden = model(torch.tensor(tokens), positions, ReferenceAttend([len(tokens)], positions))
        return model.logits(hidden)
