"""Whether the device computes what it should: the kernel against its slow twin, whole models against float64 on the
CPU, recorded steps against plain ones, and the sampler's tokens against the CPU's.

In: a device. Out: one Check for each comparison, with how far it was off and how far it may be. A check that cannot run
has failed, and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pellucid_benchmark.gpu.shapes import SHAPES
from pellucid_benchmark.gpu.stack import Stack, prompt_of, random_decoder, request, stack
from pellucid_model.attention import ReferenceAttend
from pellucid_model.config import DecoderConfig
from pellucid_model.decoder import Decoder
from pellucid_model.kernels import TorchKernels, library
from pellucid_server.engine.cache import KVCache, learn_shapes
from pellucid_server.engine.messages import Sampling
from pellucid_server.engine.runner import ModelRunner
from pellucid_server.engine.sampler import Sampler, SamplerRow
from pellucid_server.engine.sampler_device import UNDECIDED, DeviceSampler, choose
from pellucid_server.engine.scheduler import Scheduler
from pellucid_server.engine.sequence import Sampled
from pellucid_server.engine.varlen import TWIN, Varlen, find_varlen, varlen_twin
from pellucid_server.kv.blocks import BlockPool
from pellucid_server.kv.window import FULL, ContextWindow

CPU = torch.device("cpu")
SMALL = replace(SHAPES["tiny"], vocab_size=500, heads=6, head_dim=64)
HALF_ERROR, FLOAT_ERROR = 0.05, 1e-3
"""Of the largest logit. bfloat16 keeps 8 bits; float32 on a GPU sums in another order."""
LENGTHS, NEW_TOKENS = (1, 37, 90, 130), 40


@dataclass(frozen=True)
class Check:
    name: str
    error: float
    """Relative to the largest value; for tokens, how many differ."""
    allowed: float
    note: str = ""

    @property
    def held(self) -> bool:
        return self.error <= self.allowed


def check_all(device: torch.device) -> Iterator[Check]:
    """One after the other."""
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    windows = replace(SMALL, windows=(None, 50))
    rolls = ContextWindow("roll", 2, 60)
    checks: tuple[tuple[str, Callable[[], Check]], ...] = (
        ("kernel and twin", lambda: _kernel(device)),
        ("model, recorded steps", lambda: _model(SMALL, device, half, graphs=True)),
        ("model, plain steps", lambda: _model(SMALL, device, half, graphs=False)),
        ("recorded and plain steps", lambda: _recorded(device, half)),
        ("layers with windows", lambda: _model(windows, device, half, graphs=True)),
        ("rolling windows", lambda: _rolling(SMALL, device, half, rolls)),
        ("rolling windows without sinks", lambda: _rolling(windows, device, half, ContextWindow("roll", 0, 60))),
        ("ALiBi, single operators", lambda: _model(replace(SMALL, position="alibi"), device, half, graphs=True)),
        ("float32, single operators", lambda: _model(SMALL, device, torch.float32, graphs=True)),
        ("sampler's tokens", lambda: _sampler(device)),
    )
    for name, check in checks:
        try:
            yield replace(check(), name=name)
        except Exception as error:  # whatever it is, the other checks still say something
            yield Check(name, float("inf"), 0.0, f"{type(error).__name__}: {str(error).splitlines()[0]}")


def _kernel(device: torch.device) -> Check:
    """Chunks of many lengths and single rows, through block tables, with and without a window."""
    found = find_varlen(device) if device.type == "cuda" else TWIN
    if not isinstance(found, Varlen):
        return Check("", float("inf"), 0.0, found)
    worst = 0.0
    for head_dim, kv_heads, window in ((64, 3, -1), (128, 2, -1), (64, 6, 99), (256, 1, -1)):
        for counts in ((1, 1, 1), (40, 1, 300)):
            arguments = _attention(device, head_dim, kv_heads, counts, window)
            ours = found.call(**(arguments if found.reads_pages else _end_to_end(arguments)))
            worst = max(worst, _error(ours.float(), varlen_twin(**arguments).float()))
    return Check("", worst, 0.02, "" if found.reads_pages else "this torch wants copies of keys and values")


def _attention(
    device: torch.device, head_dim: int, kv_heads: int, counts: tuple[int, ...], window: int
) -> dict[str, Any]:
    """Arguments of varlen_attn for sequences whose last `counts` rows are asked for."""
    generator = torch.Generator().manual_seed(head_dim + kv_heads)
    lengths = torch.tensor([7, 512, 700], dtype=torch.int32)
    lengths = torch.maximum(lengths, torch.tensor(counts, dtype=torch.int32))
    dtype = torch.bfloat16

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    rows = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    keys = torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)))
    decoding = max(counts) == 1
    return {
        "query": numbers(sum(counts), 6, head_dim),
        "key": numbers(10, kv_heads, 256, head_dim).transpose(1, 2),
        "value": numbers(10, kv_heads, 256, head_dim).transpose(1, 2),
        "cu_seq_q": rows.to(device),
        "cu_seq_k": keys.to(device),
        "max_q": max(counts),
        "max_k": int(lengths.max()),
        "scale": head_dim**-0.5,
        "window_size": (window, 0) if window >= 0 else (-1, -1) if decoding else (-1, 0),
        "seqused_k": lengths.to(device),
        "block_table": torch.tensor([[9, 0, 0], [3, 8, 0], [5, 1, 4]], dtype=torch.int32).to(device),
    }


def _end_to_end(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same for a kernel that does not read through block tables."""
    pages = {"seqused_k", "block_table"}
    packed = {name: value for name, value in arguments.items() if name not in pages}
    for name in ("key", "value"):
        sequences = zip(arguments["block_table"].long(), arguments["seqused_k"].tolist(), strict=True)
        packed[name] = torch.cat([arguments[name][blocks].flatten(0, 1)[:length] for blocks, length in sequences])
    return packed


def _model(config: DecoderConfig, device: torch.device, dtype: torch.dtype, *, graphs: bool) -> Check:
    """A crowd of prompts in chunks, decoded together, against whole sequences in float64."""
    model, served = _models(config, device, dtype)
    runs = _logits(_stack(served, device, dtype, graphs=graphs))
    worst = 0.0
    for key, have in runs.items():
        tokens = _tokens(key, config.vocab_size)
        positions = torch.arange(len(tokens))
        with torch.no_grad():
            hidden = model(torch.tensor(tokens), positions, ReferenceAttend([len(tokens)], positions))
            want = model.logits(hidden)[LENGTHS[key] - 1 : -1]
        worst = max(worst, _error(have.double(), want))
    return Check("", worst, HALF_ERROR if dtype != torch.float32 else FLOAT_ERROR)


def _recorded(device: torch.device, dtype: torch.dtype) -> Check:
    """The same crowd with and without recorded steps. Libraries may take another kernel for another number of rows."""
    _, model = _models(SMALL, device, dtype)
    made = [_stack(model, device, dtype, graphs=on) for on in (True, False)]
    recorded, plain = (_logits(each) for each in made)
    notes = "; ".join(made[0].notices)
    return Check("", max(_error(recorded[key], plain[key]) for key in plain), 0.0 if notes else HALF_ERROR, notes)


def _rolling(config: DecoderConfig, device: torch.device, dtype: torch.dtype, window: ContextWindow) -> Check:
    """Sequences that outgrow their window, against torch's operators in float32 on the CPU."""
    model, served = _models(config, device, dtype)
    model = model.float()
    kernels, shapes = TorchKernels(), learn_shapes(model, CPU)
    cache = KVCache(shapes, 64, 16, torch.float32, CPU)
    runner, pool = ModelRunner(model, kernels, cache, CPU), BlockPool(64, 16)
    slow = replace(_stack(model, CPU, torch.float32, graphs=False), runner=runner, pool=pool)
    fast = _stack(served, device, dtype, graphs=True)
    want, have = (_logits(each, window) for each in (slow, fast))
    return Check("", max(_error(have[key], want[key]) for key in want), HALF_ERROR)


def _stack(model: Decoder, device: torch.device, dtype: torch.dtype, *, graphs: bool) -> Stack:
    return stack(
        model,
        device,
        dtype,
        graphs=graphs,
        most_rows=len(LENGTHS),
        sequence_length=256,
        cache_tokens=len(LENGTHS) * 256,
    )


def _models(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> tuple[Decoder, Decoder]:
    """The same weights in float64 on the CPU and in `dtype` on the device, spread so that logits are."""
    served = random_decoder(config, device, dtype)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in served.named_parameters():
        center = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15 + center)
    exact = Decoder(config).eval().requires_grad_(False).double()
    exact.load_state_dict({name: value.double().cpu() for name, value in served.state_dict().items()})
    return exact, served


def _tokens(key: int, vocab_size: int) -> list[int]:
    return prompt_of(LENGTHS[key] + NEW_TOKENS, key, vocab_size)


def _logits(made: Stack, context: ContextWindow = FULL) -> dict[int, Tensor]:
    """By sequence: logits [NEW_TOKENS, V] behind its prompt and each of the tokens that are put in its mouth."""
    scheduler: Scheduler = made.scheduler(step_tokens=64)
    for key, length in enumerate(LENGTHS):
        scheduler.submit(request(key, _tokens(key, made.vocab_size)[:length], NEW_TOKENS, context))
    rows: dict[int, list[Tensor]] = {key: [] for key in range(len(LENGTHS))}
    while not scheduler.idle:
        step = scheduler.schedule(0.0)
        logits = made.runner.run(step).cpu()
        sampled = []
        for sequence, row in zip((chunk.sequence for chunk in step.chunks if chunk.samples), logits, strict=True):
            key = sequence.request.key
            sampled.append([Sampled(_tokens(key, made.vocab_size)[len(sequence.tokens)])])
            rows[key].append(row.clone())
        scheduler.complete(step, sampled)
    return {key: torch.stack(each) for key, each in rows.items()}


def _sampler(device: torch.device) -> Check:
    """Tokens of the device and of the CPU, for many settings; and that few rows had to ask the CPU."""
    vocab_size, settings = 50_000, list[Sampling]()
    for seed in range(64):
        top_k, top_p, min_p = ((0, 1.0, 0.0), (40, 1.0, 0.0), (50, 0.9, 0.0), (0, 0.3, 0.0), (40, 1.0, 0.1))[seed % 5]
        settings.append(Sampling(0.0 if seed % 6 == 5 else 0.8, top_k, top_p, min_p, seed))
    rows = [SamplerRow(setting, (), output_index=seed) for seed, setting in enumerate(settings)]
    logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(5)).bfloat16().float() * 4
    on_cpu = Sampler(vocab_size, library.load_library())
    want = on_cpu.sample(logits, rows)
    have = DeviceSampler(vocab_size, on_cpu).sample(logits.to(device), rows)
    asked = int((choose(logits.to(device), rows) == UNDECIDED).sum())
    wrong = sum(a != b for a, b in zip(have, want, strict=True))
    return Check("", wrong, 0, f"{asked} of {len(rows)} rows asked the CPU")


def _error(have: Tensor, want: Tensor) -> float:
    """The largest difference, relative to the largest value; infinite where something is not finite."""
    difference = (have.cpu().double() - want.cpu().double()).abs().max() / want.abs().max().cpu().double()
    return float(difference) if bool(torch.isfinite(difference)) else float("inf")
