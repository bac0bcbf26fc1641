"""Both clients and the command line against a real server with a tiny random checkpoint."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pellucid_client import (
    AsyncClient,
    Cancelled,
    Client,
    Completion,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    PromptTooLong,
    RequestIdInUse,
)
from pellucid_testing.checkpoints import tiny_checkpoint, tiny_config
from pellucid_testing.server import ROOT, ServerProcess, serve

from .test_cli import COMMAND, environment, pellucid

CONTEXT = 4096
LONG: dict[str, Any] = {"ignore_eos": True, "max_new_tokens": 100}
ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_new_tokens": 1_000_000}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", tiny_config(context_length=CONTEXT))
    limit = ("--max-new-tokens-limit", str(ENDLESS["max_new_tokens"]))
    with serve(folder, "--kv-cache-memory", "16MiB", "--threads", "1", *limit) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.address) as connected:
        yield connected


def same_answer(one: Completion, other: Completion) -> bool:
    return (one.text, one.token_ids, one.finish) == (other.text, other.token_ids, other.finish)


def test_a_stream_is_the_sum_of_its_chunks(client: Client) -> None:
    stream = client.generate("天地玄黄", seed=0, temperature=0.9, max_new_tokens=30, ignore_eos=True)
    chunks = list(stream)
    answer = stream.result()
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == answer.token_ids
    assert len(answer.token_ids) == answer.usage.output_token_count == answer.finish.output_token_count == 30
    assert answer.finish.reason == "max_new_tokens"
    assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (answer.prompt.model, answer.prompt.sampling.seed) == ("tiny", 0)
    assert answer.timings.total_time is not None
    assert answer.timings.total_time > 0


def test_values_in_force_come_back(client: Client) -> None:
    stream = client.generate("天地", temperature=0, top_k=0, max_new_tokens=1, stop="黄", return_prompt_token_ids=True)
    prompt = stream.result().prompt
    assert prompt.sampling.temperature == 0
    assert (prompt.sampling.top_k, prompt.sampling.top_p, prompt.sampling.min_p) == (0, 1.0, 0.0)
    assert prompt.sampling.seed is not None
    assert prompt.stopping.stop == ("黄",)
    assert prompt.stopping.max_new_tokens == 1
    assert (prompt.context, prompt.window_tokens, prompt.sink_tokens) == ("roll", CONTEXT - 4, 4)
    assert prompt.hop_tokens is None
    assert prompt.token_ids == client.tokenize("天地").token_ids
    assert prompt.prompt_token_count == len(prompt.token_ids)


def test_unset_is_drawn_and_zero_is_a_seed(client: Client) -> None:
    unset = {client.generate("天", **LONG).result().text for _ in range(3)}
    zero = {client.generate("天", seed=0, **LONG).result().text for _ in range(3)}
    assert len(unset) == 3
    assert len(zero) == 1


async def test_both_clients_get_the_same_answers(server: ServerProcess, client: Client) -> None:
    async with AsyncClient(server.address) as other:
        streams = [other.generate("日月", seed=seed, max_new_tokens=20) for seed in range(8)]
        crowded = await asyncio.gather(*(stream.result() for stream in streams))
    alone = [client.generate("日月", seed=seed, max_new_tokens=20).result() for seed in range(8)]
    assert all(same_answer(one, other) for one, other in zip(alone, crowded, strict=True))
    assert len({answer.text for answer in alone}) > 1


def test_delivery(client: Client) -> None:
    one = list(client.generate("天", seed=1, delivery="final", **LONG))
    assert len(one) == 1
    with client.generate("天", seed=1, min_tokens_per_message=10, **ENDLESS) as many:
        chunks = [next(many)]
        while len(chunks) < 5 or len(many.token_ids) < 100:
            chunks.append(next(many))
    assert all(len(chunk.token_ids) >= 10 for chunk in chunks[1:])
    assert many.token_ids[:100] == one[0].token_ids
    assert many.text.startswith(one[0].text)
    bare = client.generate("天", seed=1, omit_text=True, omit_token_ids=True, **LONG).result()
    assert (bare.text, bare.token_ids, bare.usage.output_token_count) == ("", (), 100)


def test_tokens_there_and_back(client: Client) -> None:
    text = "天地玄黄, hello!"
    ids = client.tokenize(text, omit_special_tokens=True, return_tokens=True)
    assert b"".join(ids.tokens).decode() == text
    assert client.detokenize(ids.token_ids) == text
    assert client.detokenize_batch([ids.token_ids, []]) == [text, ""]


def test_what_is_served(server: ServerProcess, client: Client) -> None:
    assert client.is_ready()
    client.wait_until_ready(5)
    (model,) = client.models()
    assert model == client.model() == client.model("tiny")
    assert (model.max_context_tokens, model.default_sampling.temperature) == (CONTEXT, 1.0)
    info = client.server_info()
    assert info.kv_block_count > 0
    assert info.device == "cpu"
    assert client.load().kv_block_count == info.kv_block_count


def test_refusals(client: Client) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.generate("天", temperature=200, top_p=0, max_new_tokens=1).result()
    assert {each.field for each in caught.value.violations} == {"sampling.temperature", "sampling.top_p"}
    assert caught.value.reason == "INVALID_FIELD"
    with pytest.raises(ModelNotFound):
        client.generate("天", model="other").result()
    with pytest.raises(PromptTooLong, match=str(CONTEXT)):
        client.generate("天" * 5000, context="reject").result()
    assert client.generate("天" * 5000, context="truncate", max_new_tokens=4).result().prompt.dropped_token_count > 0


def test_one_request_id_at_a_time(server: ServerProcess, client: Client) -> None:
    with client.generate("天", request_id="mine", **ENDLESS) as first:
        next(first)
        with pytest.raises(RequestIdInUse):
            client.generate("天", request_id="mine").result()
    server.wait_for_metric("pellucid_requests_running", 0)
    assert client.generate("天", request_id="mine", max_new_tokens=1).result().prompt.request_id == "mine"


def test_a_deadline_and_a_soft_limit(client: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        client.generate("天", timeout=1e-4, **ENDLESS).result()
    answer = client.generate("天", time_limit=1e-3, **ENDLESS).result()
    assert answer.finish.reason == "time_limit"


def test_cancel_from_both_sides(server: ServerProcess, client: Client) -> None:
    stream = client.generate("天", **ENDLESS)
    next(stream)
    stream.cancel()
    with pytest.raises(Cancelled):
        stream.result()
    server.wait_for_metric("pellucid_requests_running", 0)

    stream = client.generate("天", request_id="one", **ENDLESS)
    next(stream)
    assert client.cancel("one")
    answer = stream.result()
    assert answer.finish.reason == "cancelled"
    assert len(answer.token_ids) == answer.usage.output_token_count < ENDLESS["max_new_tokens"]
    assert not client.cancel("one")
    server.wait_for_metric("pellucid_requests_running", 0)


async def test_an_abandoned_task_ends_its_request(server: ServerProcess) -> None:
    async with AsyncClient(server.address) as other:
        stream = other.generate("天", **ENDLESS)
        await anext(stream)
        task = asyncio.create_task(stream.result())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(server.wait_for_metric, "pellucid_requests_running", 0)


def test_the_command_line(server: ServerProcess, client: Client) -> None:
    answer = client.generate("天地", temperature=0, max_new_tokens=20).result()
    done = pellucid("generate", "天地", "--temperature", "0", "--max-new-tokens", "20", server=server.address)
    assert (done.returncode, done.stdout.decode()) == (0, answer.text + "\n")

    flags = ["--temperature", "0", "--max-new-tokens", "20", "--json"]
    done = pellucid("generate", "--file", "-", *flags, stdin="天地\n日月\n".encode(), server=server.address)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0]["text"] == answer.text
    assert tuple(lines[0]["token_ids"]) == answer.token_ids
    assert [line["line"] for line in lines] == [1, 2]

    ids = pellucid("tokenize", "天地", server=server.address).stdout.decode().strip()
    assert tuple(map(int, ids.split(","))) == client.tokenize("天地").token_ids
    assert pellucid("detokenize", ids, server=server.address).stdout.decode() == "天地\n"
    assert pellucid("health", server=server.address).stdout == b"ready\n"
    assert "tiny" in pellucid("info", server=server.address).stdout.decode()
    done = pellucid("generate", "天", "--temperature", "200", "--top-p", "0", server=server.address)
    assert done.returncode == 1
    assert done.stderr.startswith(b"pellucid: sampling.temperature: ")
    assert b"; sampling.top_p: " in done.stderr


def test_ctrl_c_frees_the_place(server: ServerProcess, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("天\n" * 300, encoding="utf-8")
    process = subprocess.Popen(
        [
            *COMMAND,
            "generate",
            "--file",
            str(prompts),
            "--ignore-eos",
            "--max-new-tokens",
            "500",
            "--server",
            server.address,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, b"")
    server.wait_for_metric("pellucid_requests_running", 0)
    server.wait_for_metric("pellucid_requests_waiting", 0)


@pytest.fixture(scope="module")
def demo() -> Iterator[ServerProcess]:
    with serve(None, "--kv-cache-memory", "16MiB", "--threads", "1") as running:
        yield running


def test_the_first_thing_that_a_reader_tries(demo: ServerProcess) -> None:
    done = pellucid("generate", "今天天气", "--temperature", "0", server=demo.address)
    assert done.returncode == 0
    assert "不错" in done.stdout.decode()


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_readmes_example_runs(demo: ServerProcess, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "127.0.0.1:50051" in example
    exec(compile(example.replace("127.0.0.1:50051", demo.address), name, "exec"), {})
    assert "不错" in capsys.readouterr().out
