"""The engine's own parts around a model that exists in memory only: what `--device cuda` runs, without its processes.

On the CPU, where there is nothing to measure, the slow twin stands in the kernel's place, and steps are called instead
of recorded, so that the check itself can be tried out anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pellucid_model.config import DecoderConfig
from pellucid_model.decoder import Decoder
from pellucid_model.kernels import TorchKernels, library
from pellucid_server.engine.cache import KVCache, learn_shapes, native_window
from pellucid_server.engine.choosing import Chooser
from pellucid_server.engine.constraint_states import Constraints
from pellucid_server.engine.execution import Executor
from pellucid_server.engine.flash_forward import DecodeShape
from pellucid_server.engine.forward import choose_forward, fused_forward
from pellucid_server.engine.graphs import call_plainly
from pellucid_server.engine.messages import Sampling, Submit
from pellucid_server.engine.runner import ModelRunner
from pellucid_server.engine.scheduler import Scheduler
from pellucid_server.engine.varlen import BLOCK_SIZE, TWIN
from pellucid_server.kv.blocks import BlockPool
from pellucid_server.kv.window import FULL, ContextWindow

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
CPU_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Stack:
    """A model ready to run."""

    runner: ModelRunner
    executor: Executor
    pool: BlockPool
    native_window: int
    vocab_size: int
    most_rows: int
    notices: list[str]

    def scheduler(self, step_tokens: int) -> Scheduler:
        budget = max(step_tokens, self.most_rows)
        return Scheduler(self.pool, self.most_rows, budget, self.native_window, prefix_cache=False)


def stack(
    model: Decoder,
    device: torch.device,
    dtype: torch.dtype,
    *,
    graphs: bool,
    most_rows: int,
    sequence_length: int,
    cache_tokens: int,
) -> Stack:
    """Of a model on its device in `dtype`: `most_rows` sequences at once, none longer than `sequence_length`."""
    kernels, notices = TorchKernels(), list[str]()
    block_size = BLOCK_SIZE if device.type == "cuda" else CPU_BLOCK_SIZE
    width = -(-sequence_length // block_size)
    blocks = -(-cache_tokens // block_size)
    shapes = learn_shapes(model, device)
    cache = KVCache(shapes, blocks + 1, block_size, dtype, device)
    decoding = DecodeShape(most_rows, width, spare_block=blocks)
    if device.type == "cuda":
        forward = choose_forward(
            model,
            model,
            kernels,
            cache,
            device,
            decoding,
            notices,
            vocab_size=model.config.vocab_size,
            context_length=sequence_length,
            graphs=graphs,
        )
    else:
        recorder = call_plainly if graphs else None
        forward = fused_forward(model, kernels, cache, device, TWIN, decoding, recorder, notices)
    vocab_size = model.config.vocab_size
    chooser = Chooser(vocab_size, Constraints(lambda: None, vocab_size), library.load_library(), library.threads())
    runner = ModelRunner(model, kernels, cache, device, forward)
    pool = BlockPool(blocks, block_size)
    return Stack(runner, Executor(runner, chooser), pool, native_window(shapes), vocab_size, most_rows, notices)


def random_decoder(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Made where it will run: 8 billion numbers would take minutes on a CPU."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with device:
            return Decoder(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def request(key: int, prompt: list[int], new_tokens: int, context: ContextWindow = FULL) -> Submit:
    """A greedy one that ends by its length."""
    room = 2**31 - 1 if context.kind != "full" else len(prompt) + new_tokens
    return Submit(key, prompt, GREEDY, new_tokens, 0, [], [], room, context)


def prompt_of(length: int, key: int, vocab_size: int) -> list[int]:
    """Different for every key."""
    return [(31 * key + 7 * place * place + 3 * place) % vocab_size for place in range(length)]
