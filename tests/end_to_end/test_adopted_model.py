"""Modules that were never written for us, served over gRPC from the files their training scripts saved."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from pellucid_client import AsyncClient, Client, Completion
from pellucid_model.adopt import AdoptedModule
from pellucid_model.errors import ModelError
from pellucid_model.tokenizers.character import CharacterTokenizer
from pellucid_testing.checkpoints import CHARACTERS
from pellucid_testing.own_modules import CONTRACT, EXAMPLES, NANOGPT, TEXTBOOK, saved_checkpoint
from pellucid_testing.server import serve
from pellucid_testing.stepping import Stepper

STREAMS = 16


def greedy(module: AdoptedModule, tokens: list[int], count: int) -> list[int]:
    """What the user's own loop would generate: crop to the context, run the module, take the likeliest."""
    context = module.context_length or 0
    for _ in range(count):
        with torch.no_grad():
            out: Any = module.own_forward(torch.tensor(tokens[-context:]))
        logits = out[0] if isinstance(out, tuple) else out
        tokens = [*tokens, int(logits.flatten(0, -2)[-1].argmax())]
    return tokens[-count:]


async def test_the_textbook_module_in_sixteen_streams(tmp_path: Path) -> None:
    """Each stream is the user's own greedy loop, across the end of the context too."""
    path = saved_checkpoint(tmp_path / "textbook.pt", TEXTBOOK)
    module = cast("AdoptedModule", TEXTBOOK.module())
    prompts = [[(5 + 7 * i * (index + 1)) % 52 for i in range(1 + 3 * index)] for index in range(STREAMS)]
    arguments = ("--module", TEXTBOOK.source, "--threads", "1", "--dtype", "float32")
    with serve(path, *arguments) as server:
        async with AsyncClient(server.address) as client:

            async def run(prompt: list[int]) -> Completion:
                crop: dict[str, Any] = {"context": "reencode", "sink_tokens": 0, "hop_tokens": 1}
                return await client.generate(prompt, temperature=0, max_new_tokens=24, **crop).result()

            with server.engine_stopped():
                running = [asyncio.create_task(run(prompt)) for prompt in prompts]
                await asyncio.to_thread(server.wait_for_queue, STREAMS)
            answers = await asyncio.gather(*running)
        with Client(server.address) as sync:
            assert sync.server_info().batch_invariant
    for prompt, answer in zip(prompts, answers, strict=True):
        assert list(answer.token_ids) == greedy(module, prompt, 24)
    assert len({answer.token_ids for answer in answers}) > STREAMS // 2


def test_nanogpt_is_known_by_its_file(tmp_path: Path) -> None:
    path = saved_checkpoint(tmp_path / "ckpt.pt", NANOGPT)
    CharacterTokenizer([*"@$&_", *CHARACTERS], {}).save(tmp_path)
    module = cast("AdoptedModule", NANOGPT.module())
    with serve(path, "--threads", "1", "--dtype", "float32") as server, Client(server.address) as client:
        answer = client.generate("the 天", temperature=0, max_new_tokens=30).result()
        assert client.models()[0].name == "ckpt"
    tokenizer = CharacterTokenizer([*"@$&_", *CHARACTERS], {})
    want = greedy(module, tokenizer.encode("the 天"), 30)
    assert list(answer.token_ids) == want
    assert answer.text == tokenizer.decode(want)


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_score_matrix_of_its_own_is_announced(tmp_path: Path, quantize: str) -> None:
    """Torch's operators compute it, so nothing is promised of company, whatever one crowd or another comes to."""
    example = CONTRACT["talking heads"]
    ready = Stepper.of(example.checkpoint(tmp_path), module=example.source, quantize=quantize).loaded.ready
    assert any("layers 0, 1 gather all keys and values" in notice for notice in ready.notices)
    assert not ready.batch_invariant


SHORT = """
import sys
sys.path.insert(0, {folder!r})
import nanogpt
import torch
from nanogpt_adapter import Served

class Strange(torch.nn.Module):
    "A function that no plan has, so that forward itself runs in every step."
    def forward(self, x):
        return x + 0 * torch.special.bessel_j0(x)

class Short(Served):
    def build(self, config):
        self.context_length = config["block_size"]
        module = nanogpt.GPT(nanogpt.GPTConfig(**config))
        module.transformer.drop = Strange()
        return module
"""


def test_a_forward_that_lets_only_one_sequence_pass_is_refused_at_start(tmp_path: Path) -> None:
    """nanoGPT's own check of the length, left as it is: a step holds more tokens than a sequence."""
    path = saved_checkpoint(tmp_path / "w.pt", NANOGPT)
    (tmp_path / "short.py").write_text(SHORT.format(folder=str(EXAMPLES / "adopted")))
    with pytest.raises(ModelError, match=r"fails in steps of several sequences.* 64 tokens each: ValueError"):
        Stepper.of(path, module=f"{tmp_path / 'short.py'}:Short", max_step_tokens=128)
