"""Checkpoints whose output a test chooses: attention and feed-forward are zero, and the head hands rows through.

`script_checkpoint`: the place in the sequence alone decides, so greedy output is any sequence of tokens. The scripts
lie one behind the other along the learned positions, and a prompt says by its length which one follows.
`bigram_checkpoint`: the last token alone decides, through a table of logits, so every probability is known.

Neither looks at its keys and values, so neither says anything about the cache.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from pellucid_model.checkpoint import save_checkpoint
from pellucid_model.config import DecoderConfig, Position
from pellucid_model.decoder import Decoder

GAP = 30.0
"""Between the logit of a script's token and all others, which are 0."""
FILLER = 0
"""Id of every token of the prompts."""


def script_checkpoint(
    folder: Path, scripts: Sequence[Sequence[int]], vocab_size: int, end_ids: Sequence[int] = ()
) -> list[list[int]]:
    """Write the checkpoint, greedy by its generation_config.json -> a prompt of token ids for each script."""
    timeline = list(itertools.chain.from_iterable(scripts))
    model = _passing(vocab_size, len(timeline) + 1, "learned")
    with torch.no_grad():
        model.get_parameter("position.weight")[torch.arange(len(timeline)), torch.tensor(timeline)] = GAP
    save_checkpoint(folder, model)
    generation = {"do_sample": False, "eos_token_id": list(end_ids)}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    begins = itertools.accumulate((len(script) for script in scripts[:-1]), initial=0)
    return [[FILLER] * (begin + 1) for begin in begins]


def bigram_checkpoint(folder: Path, table: torch.Tensor, context_length: int = 512) -> Path:
    """table [V, V]: row i are the logits behind token i."""
    model = _passing(len(table), context_length, "none")
    with torch.no_grad():
        model.embedding.weight.copy_(table)
    save_checkpoint(folder, model)
    return folder


def _passing(vocab_size: int, context_length: int, position: Position) -> Decoder:
    """A decoder of zeros whose logits are its input rows."""
    config = DecoderConfig(
        vocab_size=vocab_size,
        context_length=context_length,
        d_model=vocab_size,
        layers=1,
        heads=1,
        kv_heads=1,
        head_dim=2,
        d_ff=1,
        position=position,
        final_norm=False,
    )
    model = Decoder(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.head.weight.copy_(torch.eye(vocab_size))
    return model.eval()
