"""The same shapes in transformers, with random weights, by its own generate and its default attention."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers

from pellucid_benchmark.gpu.clock import now
from pellucid_benchmark.gpu.shapes import SHAPES
from pellucid_benchmark.gpu.speed import Plan
from pellucid_benchmark.gpu.stack import prompt_of

ROUNDS = 3


def measure_peer(name: str, device: torch.device, plan: Plan) -> Iterator[dict[str, Any]]:
    """The findings of speed.measure_speed."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = _model(name, device, dtype)
    yield {"version": transformers.__version__}
    for streams in plan.streams:
        prompts = [prompt_of(plan.prompt, key, SHAPES[name].vocab_size) for key in range(streams)]
        tokens = torch.tensor(prompts, device=device)
        long, short = (_seconds(device, partial(_generate, model, tokens, new)) for new in (plan.steps, 1))
        step = (long - short) / (plan.steps - 1)
        yield {"streams": streams, "step_ms": 1000 * step, "tokens_s": streams / step}
    for length in plan.prefills:
        tokens = torch.tensor([prompt_of(length, 1, SHAPES[name].vocab_size)], device=device)
        yield {"prefill": length, "tokens_s": length / _seconds(device, partial(_generate, model, tokens, 1))}


def _model(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    shape = SHAPES[name]
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.d_model,
        intermediate_size=shape.d_ff,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context_length,
        tie_word_embeddings=shape.tied_head,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    kind: Any = transformers.AutoModelForCausalLM
    with device:
        return kind.from_config(config, dtype=dtype).eval()


def _generate(model: Any, tokens: torch.Tensor, new: int) -> None:
    made = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        use_cache=True,
    )
    if made.shape[1] != tokens.shape[1] + new:
        raise RuntimeError(f"generate made {made.shape[1] - tokens.shape[1]} tokens, not {new}")


def _seconds(device: torch.device, function: Callable[[], None]) -> float:
    """The median of some runs after one that is not counted."""
    seconds = []
    for _ in range(1 + ROUNDS):
        began = now(device)
        function()
        seconds.append(now(device) - began)
    return statistics.median(seconds[1:])
