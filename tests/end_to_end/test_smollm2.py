"""A real checkpoint that somebody else trained: SmolLM2-135M-Instruct, served from its GGUF file and
compared with transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pellucid_client import Client
from pellucid_model.attention import ReferenceAttend
from pellucid_model.gguf.loading import load_gguf
from pellucid_model.tokenizers import load_chat_template, load_tokenizer
from pellucid_testing.server import ServerProcess, serve
from pellucid_testing.smollm2 import Unavailable, by_transformers, smollm2_gguf
from pellucid_testing.tokenizers import HARD_TEXTS

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
def path() -> Path:
    try:
        return smollm2_gguf()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[ServerProcess]:
    with serve(path, "--dtype", "float32", "--max-context", "1024") as running:
        yield running


@pytest.fixture(scope="module")
def theirs(path: Path) -> tuple[Any, Any]:
    return by_transformers()


def test_greedy_text_equals_transformers(server: ServerProcess, theirs: tuple[Any, Any]) -> None:
    model, tokenizer = theirs
    prompts = PROMPTS[::2]
    with Client(server.address) as client:
        streams = [client.generate(prompt, temperature=0, max_new_tokens=NEW_TOKENS) for prompt in prompts]
        answers = [stream.result() for stream in streams]
    for prompt, answer in zip(prompts, answers, strict=True):
        prompt_ids, new = tokenizer.encode(prompt).ids, list(answer.token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([prompt_ids + new])).logits[0]
        # Each token is the most likely one after those before it: what greedy decoding would have chosen.
        assert logits[len(prompt_ids) - 1 : -1].argmax(-1).tolist() == new, prompt
        assert len(new) == NEW_TOKENS or answer.finish.reason == "eos"
        assert answer.text == tokenizer.decode(new)
        assert answer.prompt.prompt_token_count == len(prompt_ids)


def test_logits_equal_transformers_on_the_dequantized_weights(path: Path, theirs: tuple[Any, Any]) -> None:
    model, tokenizer = theirs
    loaded = load_gguf(path)
    assert (loaded.architecture, loaded.notices) == ("llama", ())
    tokens = torch.tensor(tokenizer.encode(" ".join(PROMPTS)).ids[:40])
    positions = torch.arange(len(tokens))
    with torch.no_grad():
        want = model(tokens[None]).logits[0]
        have = loaded.model.logits(loaded.model(tokens, positions, ReferenceAttend([len(tokens)], positions)))
    assert len(tokens) == 40
    assert (have - want).abs().max() <= 1e-4 * want.abs().max()


def test_the_file_s_tokenizer_is_its_maker_s(path: Path, theirs: tuple[Any, Any]) -> None:
    """B69: the same vocabulary under other rules splits digits, Chinese and spaces in other ways."""
    ours = load_tokenizer(path)
    assert ours is not None
    for text in (*PROMPTS, *HARD_TEXTS):
        ids = ours.encode(text)
        assert ids == theirs[1].encode(text).ids
        assert ours.decode(ids) == text
    template = load_chat_template(path)
    assert template is not None
    assert (template.bos_token, template.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert "add_generation_prompt" in template.source


def test_it_knows_the_capital_of_france(server: ServerProcess) -> None:
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    with Client(server.address) as client:
        answer = client.generate(prompt, parse_special_tokens=True, temperature=0, max_new_tokens=32).result()
    assert "Paris" in answer.text
    assert answer.finish.reason == "eos"
