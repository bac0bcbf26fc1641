"""What a module of one's own costs: tokens per second of a file against those of the built-in decoder it equals.

usage: own_module.py [CHECKPOINT] [--module FILE.py:CLASS] [--streams 16] [--rounds 7] [--tokens 64] [--layers …]

Two servers of the same folder, one of them with --module, take turns at the same requests; only one works at a time.
Printed are each one's median over all rounds and the ratio of the two, with the spread of the rounds' own ratios.
Without a folder a random one is made (--layers, --d-model), of the shape that examples/custom_model/llama.py has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pellucid_client import AsyncClient
from pellucid_loadtest.own_server import StartError, leave_in_order_on_sigterm, own_server

EXAMPLE = Path(__file__).parents[1] / "examples" / "custom_model" / "llama.py"
PROMPT_TOKENS = 32


@dataclass(frozen=True)
class Load:
    """What each server is asked, in every round."""

    streams: int
    tokens: int
    vocab_size: int


def main(arguments: Sequence[str]) -> int:
    leave_in_order_on_sigterm()
    options = _options(arguments)
    with tempfile.TemporaryDirectory() as made:
        folder = options.checkpoint or _random_checkpoint(Path(made), options.layers, options.d_model)
        config = json.loads((folder / "config.json").read_text())
        load = Load(options.streams, options.tokens, config["vocab_size"])
        serve = [str(folder), "--prefix-cache", "off", *options.extra]
        try:
            with own_server(serve) as built_in, own_server([*serve, "--module", options.module]) as own:
                rates = asyncio.run(_rounds((built_in.address, own.address), load, options.rounds))
        except StartError as error:
            sys.exit(f"own_module.py: the server did not start: {error}")
    medians = [statistics.median(each) for each in rates]
    ratios = [own / built_in for built_in, own in zip(*rates, strict=True)]
    print(f"built-in {medians[0]:8.0f} tokens/s, median of {options.rounds} rounds of {load.streams} streams")
    print(f"own file {medians[1]:8.0f} tokens/s")
    print(f"ratio {statistics.median(ratios):.3f}, of the rounds {min(ratios):.3f} to {max(ratios):.3f}")
    return 0


async def _rounds(addresses: tuple[str, str], load: Load, rounds: int) -> tuple[list[float], list[float]]:
    """Tokens per second of the two, round by round; which one begins alternates, and a first round is thrown away."""
    rates: tuple[list[float], list[float]] = ([], [])
    async with AsyncClient(addresses[0]) as first, AsyncClient(addresses[1]) as second:
        clients = (first, second)
        for number in range(-1, rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                rate = await _rate(clients[which], load)
                if number >= 0:
                    rates[which].append(rate)
    return rates


async def _rate(client: AsyncClient, load: Load) -> float:
    async def stream(index: int) -> int:
        prompt = [(7 * i + 11 * index) % load.vocab_size for i in range(PROMPT_TOKENS)]
        result = await client.generate(prompt, max_new_tokens=load.tokens, ignore_eos=True, temperature=0).result()
        return len(result.token_ids)

    began = time.perf_counter()
    counts = await asyncio.gather(*map(stream, range(load.streams)))
    return sum(counts) / (time.perf_counter() - began)


def _random_checkpoint(folder: Path, layers: int, d_model: int) -> Path:
    import torch

    from pellucid_model.checkpoint import save_checkpoint
    from pellucid_model.config import DecoderConfig
    from pellucid_model.decoder import Decoder

    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=4096,
        context_length=1024,
        d_model=d_model,
        layers=layers,
        heads=d_model // 32,
        kv_heads=1,
        head_dim=32,
        d_ff=3 * d_model,
        position="rotary",
        norm="rmsnorm",
        activation="swiglu",
        attention_bias=False,
        mlp_bias=False,
        tied_head=True,
    )
    model = Decoder(config)
    model.initialize()
    save_checkpoint(folder, model)
    return folder


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="own_module.py", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "checkpoint", nargs="?", type=Path, help="a folder that the built-in decoder and the file serve"
    )
    parser.add_argument("--module", default=f"{EXAMPLE}:Llama", metavar="FILE.py:CLASS")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each stream")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="further arguments of both servers")
    options = parser.parse_args(arguments)
    if options.checkpoint and not (options.checkpoint / "config.json").exists():
        parser.error(f"checkpoint: {options.checkpoint} is no folder with a config.json")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
