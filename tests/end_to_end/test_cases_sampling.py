"""Sampling that fails in other servers, on a model whose every probability is known, alone and in company."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import torch
import transformers

from pellucid.v1 import inference_pb2_grpc
from pellucid_testing.calls import collect, failure, generate, request
from pellucid_testing.known_models import bigram_checkpoint
from pellucid_testing.server import ServerProcess, serve

V = 64
CALM = V // 2
"""Rows from here on have small logits; those before have some of ±60,000 and more."""
RIVALS, FIRST, SECOND = V - 1, 11, 7
"""Behind RIVALS and each of the two, FIRST is a little likelier than SECOND, and all others are out of the question."""


def table() -> torch.Tensor:
    """Logits [V, V], all of a row different, and exact in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    ranks = torch.stack([torch.randperm(V, generator=generator) for _ in range(V)]).float()
    logits = torch.where(torch.arange(V)[:, None] < CALM, (ranks - V // 2) * 2048, ranks / 16)
    logits[[RIVALS, FIRST, SECOND]] = -20.0
    logits[[RIVALS, FIRST, SECOND], FIRST] = 3.0
    logits[[RIVALS, FIRST, SECOND], SECOND] = 2.9375
    return logits


TABLE = table()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = bigram_checkpoint(tmp_path_factory.mktemp("bigram"), TABLE)
    with serve(folder, "--dtype", request.param, "--threads", "1", "--max-running", "16") as running:
        yield running


@pytest.fixture
def channel(server: ServerProcess) -> grpc.Channel:
    return server.channel()


def chain(token: int, length: int) -> list[int]:
    """The likeliest successors, one after the other."""
    tokens = []
    for _ in range(length):
        token = int(TABLE[token].argmax())
        tokens.append(token)
    return tokens


def sampled(channel: grpc.Channel, prompt: list[int], new: int = 12, **sampling: Any) -> list[int]:
    return generate(channel, prompt, sampling=sampling, stopping={"max_new_tokens": new}).token_ids


def test_tiny_numbers_are_argmax(channel: grpc.Channel) -> None:
    """A temperature or top_p of 1e-4 makes infinite logits, then a crash or an empty answer."""
    tiny: list[dict[str, Any]] = [{"temperature": t} for t in (0, 1e-45, 1e-38, 1e-9, 1e-5, 1e-4)]
    tiny += [{"temperature": t, "top_p": p} for t in (1, 100) for p in (1e-45, 1e-9, 1e-4)]
    tiny.append({"temperature": 1e-9, "top_p": 1e-9, "min_p": 0.999, "top_k": V})
    for start in (0, 1, CALM - 1, CALM, V - 2):
        for number, sampling in enumerate(tiny):
            assert sampled(channel, [start], seed=number, **sampling) == chain(start, 12), sampling
    # At their upper ends they are off, and whatever comes is the same as without them.
    off = sampled(channel, [CALM], seed=1, temperature=100)
    assert sampled(channel, [CALM], seed=1, temperature=100, top_p=1, typical_p=1, min_p=0, top_k=0) == off
    assert len(set(off)) > 6
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    for name, value in (("top_p", 0.0), ("typical_p", 0.0), ("min_p", 1.0), ("temperature", 100.1)):
        found = failure(stub.Generate(request([1], sampling={name: value}), timeout=20))
        assert (found.code, list(found.violations)) == ("INVALID_ARGUMENT", [f"sampling.{name}"])


def test_repetition_counts_the_prompt_and_presence_and_frequency_the_output(channel: grpc.Channel) -> None:
    """repetition_penalty skips the prompt's tokens, or presence and frequency penalties count them."""
    prompt = [FIRST, RIVALS]
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.5)
    expected = list(prompt)
    for _ in range(4):
        expected.append(int(processor(torch.tensor([expected]), TABLE[expected[-1]][None].clone()).argmax()))
    assert expected[2] == SECOND
    assert sampled(channel, prompt, 4, temperature=0, repetition_penalty=1.5) == expected[2:]
    assert sampled(channel, prompt, 3, temperature=0) == [FIRST] * 3
    assert sampled(channel, prompt, 4, temperature=0, presence_penalty=2) == [FIRST, SECOND, FIRST, FIRST]
    assert sampled(channel, prompt, 4, temperature=0, frequency_penalty=2) == [FIRST, SECOND] * 2


def test_logprobs_are_the_tables_own(channel: grpc.Channel) -> None:
    """Of a filtered token the log-probability is -inf, or it is that of the filtered distribution."""
    rows = torch.log_softmax(TABLE.double(), -1)
    for sampling in ({"top_k": 1}, {"logit_bias": {FIRST: -100.0}}, {"temperature": 0}, {"temperature": 3, "seed": 1}):
        output: Any = {"output_logprobs": {"top_count": 5}, "prompt_logprobs": {"top_count": 2}}
        answer = generate(channel, [CALM, 3], sampling=sampling, stopping={"max_new_tokens": 9}, output=output)
        tokens = [CALM, 3, *answer.token_ids]
        entries = [*answer.prompt.logprobs, *(entry for delta in answer.deltas(0) for entry in delta.logprobs)]
        assert [entry.token_id for entry in entries] == tokens
        for place, entry in enumerate(entries[1:], start=1):
            row = rows[tokens[place - 1]]
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), rel=1e-6, abs=1e-5)
            for other in entry.alternatives:
                assert other.logprob == pytest.approx(float(row[other.token_id]), rel=1e-6, abs=1e-5)


# ---- In company ----

LONG: dict[str, Any] = {"sampling": {"temperature": 0}, "stopping": {"max_new_tokens": 120}}
HOT: dict[str, Any] = {"sampling": {"temperature": 2, "seed": 7}, "stopping": {"max_new_tokens": 90}}
PENALISED: dict[str, Any] = {
    "sampling": {"temperature": 0.5, "seed": 9, "frequency_penalty": 1, "top_k": 9},
    "stopping": {"max_new_tokens": 60},
}
SEEDED: dict[str, Any] = {"sampling": {"temperature": 0.8, "seed": 42}, "stopping": {"max_new_tokens": 32}}


def test_settings_stay_with_their_request_as_others_come_and_go(server: ServerProcess, channel: grpc.Channel) -> None:
    """The sampler that was built for the first request governs all that join it, or the one that takes its place."""
    alone = [generate(channel, [CALM], **fields).token_ids for fields in (LONG, HOT, PENALISED)]
    assert len({tuple(tokens[:60]) for tokens in alone}) == 3
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    for first, second, third in ((LONG, HOT, PENALISED), (PENALISED, HOT, LONG)):
        with server.engine_stopped():
            begun = [stub.Generate(request([CALM], **fields), timeout=60) for fields in (first, second)]
            server.wait_for_queue(2)
        ended = collect(begun[0])
        joined = generate(channel, [CALM], **third)
        found = {id(first): ended, id(second): collect(begun[1]), id(third): joined}
        assert [found[id(fields)].token_ids for fields in (LONG, HOT, PENALISED)] == alone


def test_a_seed_does_not_depend_on_company(server: ServerProcess, channel: grpc.Channel) -> None:
    """A seeded request can be repeated only where every other one in its batch has a seed, too."""

    def steps() -> tuple[float, float]:
        return server.metric("pellucid_step_batch_size_count"), server.metric("pellucid_step_batch_size_sum")

    alone = generate(channel, [CALM], **SEEDED).token_ids
    for seed in ({}, {"seed": 3}):
        beside: dict[str, Any] = {"sampling": {"temperature": 1.5, **seed}, "stopping": {"max_new_tokens": 80}}
        count, rows = steps()
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with server.engine_stopped():
            others = [stub.Generate(request([CALM + i], **beside), timeout=60) for i in range(7)]
            seeded = stub.Generate(request([CALM], **SEEDED), timeout=60)
            server.wait_for_queue(8)
        assert collect(seeded).token_ids == alone
        assert [len(collect(other).token_ids) for other in others] == [80] * 7
        count, rows = (now - before for now, before in zip(steps(), (count, rows), strict=True))
        assert rows > 4 * count, "they hardly ran together"
