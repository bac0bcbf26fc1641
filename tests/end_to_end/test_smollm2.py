"""A real checkpoint that somebody else trained: SmolLM2-135M-Instruct, served and compared with transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pellucid_client import Client
from pellucid_testing.server import ServerProcess, serve
from pellucid_testing.smollm2 import Unavailable, smollm2_folder

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

NEW_TOKENS = 16
PROMPTS = [
    "The capital of Japan is",
    "Once upon a time, there was a",
    "def fibonacci(n):",
    "Water boils at",
    "The three primary colors are",
    "To be, or not to be,",
    "1, 2, 3, 4,",
    "The mitochondria is",
    "Dear Sir or Madam,\n",
    "import numpy as np\n\n",
    "The largest planet in our solar system",
    "Q: What is photosynthesis?\nA:",
    "In 1969, humans first",
    "La capitale de la France est",
    "中国的首都是",
    "    indented  text\twith tabs",
    "A recipe for pancakes:\n1.",
    "The opposite of hot is",
    "SELECT name FROM users WHERE",
    "She looked out of the window and saw",
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    try:
        folder = smollm2_folder()
    except Unavailable as reason:
        pytest.skip(str(reason))
    with serve(folder, "--dtype", "float32", "--max-context", "1024") as running:
        yield running


@pytest.fixture(scope="module")
def theirs() -> tuple[Any, Any]:
    folder = smollm2_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer


def test_greedy_text_equals_transformers(server: ServerProcess, theirs: tuple[Any, Any]) -> None:
    model, tokenizer = theirs
    with Client(server.address) as client:
        streams = [client.generate(prompt, temperature=0, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
        answers = [stream.result() for stream in streams]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=2)[0]
        new = out[inputs["input_ids"].shape[1] :].tolist()
        assert list(answer.token_ids) == new, prompt
        assert answer.text == tokenizer.decode(new, skip_special_tokens=True)
        assert answer.prompt.prompt_token_count == inputs["input_ids"].shape[1]


def test_it_knows_the_capital_of_france(server: ServerProcess) -> None:
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    with Client(server.address) as client:
        answer = client.generate(prompt, parse_special_tokens=True, temperature=0, max_new_tokens=32).result()
    assert "Paris" in answer.text
    assert answer.finish.reason == "eos"
