"""Hundreds of malformed requests: each refused by name, while a stream beside them goes on as if it were alone."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pellucid_model.tokenizers.character import CharacterTokenizer
from pellucid_model.tokenizers.simple import SPECIAL_TOKENS
from pellucid_testing.calls import GENERATE, Answer, Failure, failure, generate, request
from pellucid_testing.checkpoints import CHARACTERS, TINY, tiny_checkpoint, tiny_config
from pellucid_testing.malformed import Case, Limits, cases
from pellucid_testing.server import ServerProcess, serve

CONTEXT = 512
LIMITS = Limits(
    vocab_size=TINY.vocab_size,
    context=CONTEXT,
    max_new_tokens=600,
    default_max_new_tokens=200,
    unknown_character="龜",
)
STREAM: dict[str, Any] = {
    "sampling": {"temperature": 1.0, "seed": 11},
    "stopping": {"max_new_tokens": 400, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("malformed") / "tiny", tiny_config(context_length=CONTEXT))
    # Without a token for what it does not know, so that there is something it cannot take.
    special_tokens = {name: spelling for name, spelling in SPECIAL_TOKENS.items() if name != "unk"}
    CharacterTokenizer(sorted(set(CHARACTERS)), special_tokens).save(folder)
    limits = ["--max-new-tokens-limit", str(LIMITS.max_new_tokens)]
    limits += ["--default-max-new-tokens", str(LIMITS.default_max_new_tokens), "--context-overflow", "reject"]
    with serve(folder, "--dtype", "float32", "--threads", "1", *limits) as running:
        yield running


class Company:
    """The same stream over and over while the block lasts."""

    def __init__(self, server: ServerProcess) -> None:
        self.answers: list[Answer] = []
        self._channel = server.channel()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Company:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            self.answers.append(generate(self._channel, "abc", **STREAM))


def refusal(channel: grpc.Channel, case: Case) -> Failure:
    call: Any = channel.stream_stream(case.method)
    return failure(call(iter([case.raw]), metadata=case.metadata, timeout=20))


def check(case: Case, answer: Failure) -> None:
    assert (answer.code, answer.reason) == (case.code, case.reason), case
    if case.fields is None:
        assert answer.violations, case
    else:
        assert answer.violations.keys() == case.fields, case
    assert all(answer.violations.values())
    assert "Traceback" not in answer.message
    assert str(Path(__file__).parents[2]) not in answer.message
    assert len(answer.message) < 5000
    assert answer.retry_after is None
    assert answer.headers == {}


def test_malformed_requests_are_refused_by_name_and_disturb_nobody(server: ServerProcess) -> None:
    malformed = cases(LIMITS)
    assert len(malformed) >= 200
    alone = generate(server.channel(), "abc", **STREAM)
    before, engine = server.metrics(), server.engine_pid()
    channel = server.channel()
    with Company(server) as company:
        found = [refusal(channel, case) for case in malformed]
    for case, answer in zip(malformed, found, strict=True):
        check(case, answer)
    assert company.answers
    for stream in company.answers:
        assert (stream.token_ids, stream.text) == (alone.token_ids, alone.text)

    def gained(name: str) -> float:
        totals = [sum(v for k, v in of.items() if k.split("{")[0] == name) for of in (before, server.metrics())]
        return totals[1] - totals[0]

    own = Counter(case.method == GENERATE for case in malformed)
    assert gained("pellucid_request_rejections_total") == own[True]
    assert gained("pellucid_errors_total") == len(malformed)
    assert gained("pellucid_requests_finished_total") == len(company.answers)
    assert server.engine_pid() == engine
    assert [event for event in server.events if event["level"] == "error"] == []
    assert server.other_lines == []


def test_a_message_beyond_the_limit_leaves_the_channel_usable(server: ServerProcess) -> None:
    channel = server.channel()
    with Company(server) as company:
        for size in (16 * 2**20, 20 * 2**20):
            whole = request("a" * size).SerializeToString()
            found = refusal(channel, Case(whole, frozenset()))
            assert found.code == "RESOURCE_EXHAUSTED"
            assert "larger than max" in found.message
        below = request("a" * (16 * 2**20 - 100)).SerializeToString()
        found = refusal(channel, Case(below, frozenset()))
        assert (found.code, found.reason) == ("INVALID_ARGUMENT", "PROMPT_TOO_LONG")
    assert len({tuple(stream.token_ids) for stream in company.answers}) == 1
    assert generate(channel, "abc", stopping={"max_new_tokens": 1, "ignore_eos": True}).reason == "max_new_tokens"
