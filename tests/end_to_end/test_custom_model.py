"""The custom model of examples/, served from its file."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pellucid_client import AsyncClient, Client, Completion, InvalidRequest
from pellucid_model.attention import ReferenceAttend
from pellucid_server.kv.window import ContextWindow
from pellucid_testing.checkpoints import CHARACTERS, tiny_checkpoint, tiny_config
from pellucid_testing.custom_model import EXAMPLE, custom_checkpoint, custom_model
from pellucid_testing.own_modules import EXAMPLES
from pellucid_testing.server import serve
from pellucid_testing.stepping import Stepper, submission

STREAMS = 16


def reference(view: list[int]) -> torch.Tensor:
    """The module itself, in float64, over one whole view of a sequence -> logits of its last token."""
    model, positions = custom_model().double(), torch.arange(len(view))
    with torch.no_grad():
        hidden = model.forward(torch.tensor(view), positions, ReferenceAttend([len(view)], positions))
        last: torch.Tensor = model.logits(hidden[-1:])[0]
    return last


def test_served_logits_are_the_modules_own(tmp_path: Path) -> None:
    stepper = Stepper.of(custom_checkpoint(tmp_path), module=EXAMPLE)
    assert stepper.loaded.ready.batch_invariant
    prompt = list(range(4, 40))
    for window in (ContextWindow(), ContextWindow("reencode", 1, 50, 20)):
        stepper.run(submission(1, prompt, 60, max_length=160, context=window), max_step_tokens=11)
        tokens = prompt + stepper.tokens[1]
        for made in (0, 1, 14, 15, 16, 30, 59):
            t = len(prompt) + made - 1
            offset = window.offset(t)
            want = reference(tokens[: window.sinks] + tokens[window.sinks + offset : t + 1])
            assert (stepper.logits[1][made] - want).abs().max() <= 2e-5 * want.abs().max()


def test_the_built_in_decoder_s_twin_gives_the_same_bits(tmp_path: Path) -> None:
    """So loadtest/own_module.py compares two ways to the same result."""
    config = tiny_config(norm="rmsnorm", activation="swiglu", attention_bias=False, mlp_bias=False, tied_head=True)
    folder = tiny_checkpoint(tmp_path, config)
    rows = []
    for module in ("", f"{EXAMPLES / 'custom_model' / 'llama.py'}:Llama"):
        stepper = Stepper.of(folder, module=module, dtype="bfloat16")
        stepper.run(submission(1, [5, 6, 7, 8, 9], 30, context=ContextWindow("roll", 2, 20)))
        rows.append(torch.stack(stepper.logits[1]))
    assert torch.equal(*rows)
    assert len((EXAMPLES / "custom_model" / "llama.py").read_text().splitlines()) < 100


async def test_sixteen_streams_equal_their_lone_runs(tmp_path: Path) -> None:
    with serve(custom_checkpoint(tmp_path), "--module", EXAMPLE, "--threads", "1", "--dtype", "float32") as server:
        async with AsyncClient(server.address) as client:

            async def run(index: int) -> Completion:
                settings: dict[str, Any] = {"seed": index, "temperature": 0.4 * (index % 4), "ignore_eos": True}
                prompt = (CHARACTERS * 4)[index : 2 + 9 * index]
                return await client.generate(prompt, max_new_tokens=20 + 9 * index, **settings).result()

            alone = [await run(index) for index in range(STREAMS)]
            with server.engine_stopped():
                running = [asyncio.create_task(run(index)) for index in range(STREAMS)]
                await asyncio.to_thread(server.wait_for_queue, STREAMS)
            crowd = await asyncio.gather(*running)
        assert [one.token_ids for one in alone] == [other.token_ids for other in crowd]
        assert len({one.token_ids for one in alone}) == STREAMS
        assert {one.prompt.context for one in alone} == {"reencode"}
        with Client(server.address) as sync:
            assert sync.server_info().batch_invariant
            with pytest.raises(InvalidRequest, match="ROLL needs rotary"):
                sync.generate("天", context="roll").result()


FUNCTIONAL = """
import torch
from torch import nn
import torch.nn.functional as F
from my_model import MyTransformer

class Functional(MyTransformer):
    def logits(self, hidden):
        return F.linear(hidden, self.head.weight.float() if hasattr(self.head, "weight") else self.extra)

    def __init__(self, config):
        super().__init__(config)
        self.extra = nn.Parameter(torch.zeros(config["vocab_size"], config["d_model"]))
"""


def test_nothing_is_promised_of_torch_s_own_operators(tmp_path: Path) -> None:
    """Its output layer is F.linear, which takes another path for another number of rows."""
    folder = custom_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"extra": tensors["head.weight"].clone()}, folder / "model.safetensors")
    (tmp_path / "my_model.py").write_text(Path(EXAMPLE.rpartition(":")[0]).read_text())
    (tmp_path / "functional.py").write_text(FUNCTIONAL)
    stepper = Stepper.of(folder, module=f"{tmp_path / 'functional.py'}:Functional")
    assert not stepper.loaded.ready.batch_invariant


def test_the_command_line_names_file_and_folder(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pellucid_client.cli",
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--metrics-listen",
        "off",
    ]
    command += ["nowhere.py:Model", str(custom_checkpoint(tmp_path))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "there is no file" in ended.stderr.splitlines()[-1]
