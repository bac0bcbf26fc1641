"""What a precision costs in accuracy: a checkpoint served in several formats, compared with itself in float32.

usage: accuracy.py CHECKPOINT [--formats bfloat16,int8,bfloat16+int8] [--shuffle] [--text FILE]… [--windows N]
                   [--length N]

A format is that of the weights, and behind a plus sign that of the KV cache where it has one of its own. The text is
cut into windows of `length` tokens, each run through the engine's own parts as a prompt. The table says for each:

    weights     bytes of the model
    KV cache    bytes of a token
    perplexity  exp of the mean negative log-probability of the text's next tokens, and its ratio to float32's
    same top    share of positions where the likeliest token is float32's
    KL          mean Kullback-Leibler divergence of the next-token distribution from float32's, in nats
    greedy      tokens generated from a window's first quarter before the first that is not float32's, mean

--shuffle first puts the model's hidden units into another order, which changes nothing of what it computes. Weights
that were quantized in groups before, as those of many GGUF files, then do not meet in the same groups again, and lose
as much as other weights would.

Without --text it reads this project's documents, which are younger than the models one has at hand.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor

from pellucid_benchmark.arguments import words
from pellucid_model.checkpoint import load_checkpoint, save_checkpoint
from pellucid_model.tokenizers import load_tokenizer
from pellucid_server.engine.loading import Loaded, load
from pellucid_server.engine.messages import Configure, Ready
from pellucid_server.verify.serving import serve_sequence

DOCUMENTS = Path(__file__).parents[1] / "docs"
REFERENCE = "float32"
FORMATS = [
    f"{weights}{cache}" for weights in (REFERENCE, "bfloat16", "int8", "int4") for cache in ("", "+bfloat16", "+int8")
]
"""WEIGHTS[+CACHE]"""
NEW_TOKENS = 64


@dataclass
class Measured:
    """Of one format, a value for each position or window."""

    losses: list[Tensor] = field(default_factory=list)
    same_top: list[Tensor] = field(default_factory=list)
    divergence: list[Tensor] = field(default_factory=list)
    agreed: list[int] = field(default_factory=list)

    def row(self, name: str, reference: Measured, ready: Ready) -> str:
        loss, base = (torch.cat(each.losses).mean().item() for each in (self, reference))
        same, divergence = torch.cat(self.same_top).mean().item(), torch.cat(self.divergence).mean().item()
        greedy = sum(self.agreed) / len(self.agreed)
        weights, _, cache = name.partition("+")
        token_bytes = ready.kv_bytes // (ready.kv_block_count * ready.kv_block_size)
        return (
            f"| {weights}{f' + {cache} cache' if cache else ''} | {ready.weight_bytes / 1e6:.0f} MB "
            f"| {token_bytes} | {math.exp(loss):.3f} | {math.exp(loss - base):.4f} "
            f"| {same:.1%} | {divergence:.5f} | {greedy:.1f} of {NEW_TOKENS} |"
        )


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    windows = _windows(options.checkpoint, options.text, options.windows, options.length)
    names = [REFERENCE, *(name for name in options.formats if name != REFERENCE)]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = _shuffled(options.checkpoint, Path(folder)) if options.shuffle else options.checkpoint
        served = {name: _load(checkpoint, name, options.length) for name in names}
    measured = {name: Measured() for name in names}
    for number, window in enumerate(windows):
        print(f"window {number + 1} of {len(windows)}", file=sys.stderr, flush=True)
        _measure(window, served, measured)
    print(f"{len(windows)} windows of {options.length} tokens, kernels {served[REFERENCE].ready.kernels}\n")
    print("| format | weights | KV cache | perplexity | ratio | same top | KL | greedy |\n" + "|---" * 8 + "|")
    for name in names:
        print(measured[name].row(name, measured[REFERENCE], served[name].ready))
    return 0


def _measure(window: list[int], served: dict[str, Loaded], measured: dict[str, Measured]) -> None:
    target = torch.tensor(window[1:])
    prompt = window[: len(window) // 4]
    logs = {name: _log_probabilities(loaded, window) for name, loaded in served.items()}
    texts = {name: serve_sequence(loaded, prompt, NEW_TOKENS).tokens[len(prompt) :] for name, loaded in served.items()}
    reference = logs[REFERENCE]
    for name, each in measured.items():
        each.losses.append(-logs[name].gather(1, target[:, None]).squeeze(1))
        each.same_top.append((logs[name].argmax(1) == reference.argmax(1)).float())
        each.divergence.append((reference.exp() * (reference - logs[name])).sum(1))
        each.agreed.append(_common(texts[name], texts[REFERENCE]))


def _log_probabilities(loaded: Loaded, window: list[int]) -> Tensor:
    """[len(window) - 1, V]: of the token behind each but the last."""
    logits = serve_sequence(loaded, window, 1).logits
    return torch.stack([logits[i] for i in range(len(window) - 1)]).log_softmax(dim=1)


def _common(first: list[int], second: list[int]) -> int:
    return next((i for i, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]), len(first))


def _load(checkpoint: Path, name: str, length: int) -> Loaded:
    """Weights are of a dtype, or integers beside what dtype "auto" is."""
    weights, _, cache = name.partition("+")
    quantized = weights in ("int8", "int4")
    return load(
        Configure(
            checkpoint=str(checkpoint),
            device="cpu",
            dtype="auto" if quantized else weights,
            quantize=cast('Literal["none", "int8", "int4"]', weights if quantized else "none"),
            kv_dtype=cast('Literal["auto", "float32", "bfloat16", "int8"]', cache or "auto"),
            kv_cache_memory=0,
            kv_block_size=0,
            max_context=0,
            max_running=1,
            max_step_tokens=length,
            threads=0,
            tokenizer_size=0,
            log_level="warning",
            log_format="text",
        )
    )


def _shuffled(checkpoint: Path, folder: Path) -> Path:
    """The same function with the dimensions between layers, and those inside feed-forwards, in another order."""
    loaded = load_checkpoint(checkpoint)
    generator = torch.Generator().manual_seed(0)
    between = torch.randperm(loaded.config.d_model, generator=generator)
    inside: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, weight in loaded.model.named_parameters():
            layer, _, kind = name.removesuffix(".weight").rpartition(".")
            own = inside.setdefault(layer, torch.randperm(loaded.config.d_ff, generator=generator))
            match kind:
                case "norm1" | "norm2" | "final_norm":
                    weight.copy_(weight[between])
                case "embedding" | "query" | "key" | "value" | "head":
                    weight.copy_(weight[:, between])
                case "output":
                    weight.copy_(weight[between])
                case "gate" | "up":
                    weight.copy_(weight[own][:, between])
                case "down":
                    weight.copy_(weight[between][:, own])
                case _:
                    raise SystemExit(f"--shuffle does not know what {name} is")
    save_checkpoint(folder, loaded.model, loaded.dtype)
    return folder


def _windows(checkpoint: Path, texts: list[Path], count: int, length: int) -> list[list[int]]:
    text = "\n".join(file.read_text(encoding="utf-8") for file in texts or sorted(DOCUMENTS.glob("*.md")))
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None:
        raise SystemExit(f"{checkpoint} has no tokenizer")
    tokens = tokenizer.encode(text, add_special_tokens=False)
    windows = [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]
    if not windows:
        raise SystemExit(f"the text has {len(tokens)} tokens, less than one window of {length}")
    return windows[:: max(1, len(windows) // count)][:count]


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="accuracy.py", description="What a precision costs in accuracy.")
    parser.add_argument("checkpoint", type=Path)
    formats = ["bfloat16", "bfloat16+int8", "int8", "int8+int8", "int4"]
    parser.add_argument("--formats", type=words(FORMATS), default=formats, help="WEIGHTS[+CACHE],…")
    parser.add_argument("--shuffle", action="store_true", help="put hidden units into another order first")
    parser.add_argument("--text", type=Path, action="append", default=[], help="default: this project's documents")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args(arguments)
    if not options.checkpoint.exists():
        parser.error(f"checkpoint: there is no {options.checkpoint}")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
