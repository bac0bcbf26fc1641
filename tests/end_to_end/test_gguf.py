"""`pellucid serve model.gguf`: a tiny Llama with grouped queries, its tokenizer inside the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pellucid_client import Client
from pellucid_model.tokenizers import load_tokenizer
from pellucid_testing.families import VOCABULARY, build, logits_of
from pellucid_testing.gguf_files import add_value, write_model
from pellucid_testing.server import ServerProcess, serve, start_server

TOKENS = [
    "<s>",
    "</s>",
    "<|eot|>",
    *"abcdefghijklmnopqrstuvwxyzĠ.,!?",
    "Ġt",
    "he",
    "Ġthe",
    *(chr(0xA1 + i) for i in range(12)),
]
PADDED = [f"[PAD{index}]" for index in range(len(TOKENS), VOCABULARY)]
TOKENIZER: dict[str, Any] = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": TOKENS + PADDED,
    "token_type": [3] * 3 + [1] * (len(TOKENS) - 3) + [5] * len(PADDED),
    "merges": ["Ġ t", "h e", "Ġt he"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "eot_token_id": 2,
    "add_bos_token": True,
}


def write(path: Path, tokenizer: dict[str, Any]) -> Any:
    """The file, and transformers' model of the same weights. The padded ids have by far the largest logits."""
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight[len(TOKENS) :] *= 20.0

    def add(writer: Any) -> None:
        for key, value in tokenizer.items():
            add_value(writer, f"tokenizer.ggml.{key}", value)

    write_model(path, model, add)
    return model


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path, Any]]:
    path = tmp_path_factory.mktemp("gguf") / "tiny-llama.gguf"
    model = write(path, TOKENIZER)
    with serve(path, "--dtype", "float32") as server:
        yield server, path, model


def test_what_it_says_is_what_transformers_says(served: tuple[ServerProcess, Path, Any]) -> None:
    server, path, model = served
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    with Client(server.address) as client:
        answer = client.generate("the cat, the hat", temperature=0, max_new_tokens=40, ignore_eos=True).result()
    prompt, new = tokenizer.encode("the cat, the hat"), list(answer.token_ids)
    logits = logits_of(model, torch.tensor(prompt + new))
    assert int(logits[-1].argmax()) >= len(TOKENS)  # the padding would win
    assert logits[len(prompt) - 1 : -1, : len(TOKENS)].argmax(-1).tolist() == new
    assert answer.prompt.prompt_token_count == len(prompt)
    assert prompt[0] == 0


def test_padded_ids_are_never_sampled(served: tuple[ServerProcess, Path, Any]) -> None:
    """B70: an id that pads the vocabulary is sampled, and decoding or the next step fails."""
    server, _, _ = served
    with Client(server.address) as client:
        streams = [
            client.generate("the", temperature=temperature, max_new_tokens=60, seed=seed, ignore_eos=True)
            for temperature in (0.0, 5.0)
            for seed in range(3)
        ]
        answers = [stream.result() for stream in streams]
    ids = {token for answer in answers for token in answer.token_ids}
    assert max(ids) < len(TOKENS)
    assert len(ids) > 20


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[: len(data) // 2], "cut short?"),
        (lambda data: b"GGML" + data[4:], "begins with b'GGML', not b'GGUF'"),
        (lambda data: data.replace(b"output_norm.weight", b"output_nxrm.weight"), "are missing: output_norm.weight"),
    ],
    ids=["cut", "magic", "tensor"],
)
def test_a_file_that_cannot_be_served(tmp_path: Path, damage: Any, says: str) -> None:
    """B66: a broken file loads anyway, with wrong weights or a crash."""
    path = tmp_path / "broken.gguf"
    write(path, TOKENIZER)
    path.write_bytes(damage(path.read_bytes()))
    server = start_server(path)
    code = server.process.wait(100)
    server.close()
    assert code == 1
    line = server.other_lines[-1]
    assert says in line
    assert "broken.gguf" in line


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    more = [f"x{index}" for index in range(9)]
    kinds = [*TOKENIZER["token_type"], *[1] * 9]
    write(path, TOKENIZER | {"tokens": [*TOKENIZER["tokens"], *more], "token_type": kinds})
    server = start_server(path)
    code = server.process.wait(100)
    server.close()
    assert code == 1
    assert f"its tokenizer has {VOCABULARY + 9} tokens, but the model only {VOCABULARY}" in server.other_lines[-1]
