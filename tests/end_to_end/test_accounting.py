"""Requests of every outcome at once: each is counted exactly once, and tokens are counted as clients got them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pellucid.v1 import inference_pb2, inference_pb2_grpc
from pellucid_testing.calls import Answer, collect, failure, request
from pellucid_testing.checkpoints import tiny_checkpoint, tiny_config
from pellucid_testing.server import ServerProcess, serve

CONTEXT = 128
ROUNDS = 12
DEADLINES = 4
"""Rounds with a request that runs into its deadline, which takes its time."""
HELD = 5
REJECT = inference_pb2.ContextPolicy(overflow=inference_pb2.CONTEXT_OVERFLOW_REJECT)
FOREVER = {"max_new_tokens": 1_000_000, "ignore_eos": True}

Stub = inference_pb2_grpc.InferenceServiceStub
Outcome = tuple[str, Answer | None]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("accounting") / "tiny", tiny_config(context_length=CONTEXT))
    with serve(folder, "--dtype", "float32", "--threads", "1", "--max-new-tokens-limit", "1000000") as running:
        yield running


def answered(stub: Stub, seed: int, **stopping: Any) -> Outcome:
    sampling = {"temperature": 1.0, "seed": seed}
    answer = collect(stub.Generate(request("abc", sampling=sampling, stopping=stopping, context=REJECT), timeout=60))
    return answer.reason, answer


def refused(stub: Stub, seed: int, message: inference_pb2.GenerateRequest) -> Outcome:
    return failure(stub.Generate(message, timeout=60)).reason.lower(), None


def cancelled_by_name(stub: Stub, seed: int) -> Outcome:
    call = stub.Generate(request("ab", request_id=f"named{seed}", stopping=FOREVER), timeout=60)
    first = next(call)
    stub.Cancel(inference_pb2.CancelRequest(request_id=f"named{seed}"))
    answer = collect([first, *call])
    return answer.reason, answer


def cancelled_by_its_client(stub: Stub, seed: int) -> Outcome:
    call = stub.Generate(request("ab", stopping=FOREVER), timeout=60)
    next(call)
    call.cancel()
    return "client_cancelled", None


def out_of_time(stub: Stub, seed: int) -> Outcome:
    assert failure(stub.Generate(request("ab", stopping=FOREVER), timeout=2)).code == "DEADLINE_EXCEEDED"
    return "deadline", None


KINDS: dict[str, Callable[[Stub, int], Outcome]] = {
    "length": lambda stub, seed: answered(stub, seed, max_new_tokens=20, ignore_eos=True),
    "none": lambda stub, seed: answered(stub, seed, max_new_tokens=0),
    "eos": lambda stub, seed: answered(stub, seed, max_new_tokens=100),
    "stop string": lambda stub, seed: answered(
        stub, seed, max_new_tokens=100, ignore_eos=True, stop_strings=["a", "e"]
    ),
    "stop token": lambda stub, seed: answered(stub, seed, max_new_tokens=100, stop_token_ids=list(range(20))),
    "context": lambda stub, seed: answered(stub, seed, max_new_tokens=500, ignore_eos=True),
    "time": lambda stub, seed: answered(stub, seed, **FOREVER, time_limit={"nanos": 1_000_000}),
    "named": cancelled_by_name,
    "client": cancelled_by_its_client,
    "deadline": out_of_time,
    "invalid": lambda stub, seed: refused(stub, seed, request("ab", sampling={"top_p": 0.0})),
    "unsupported": lambda stub, seed: refused(stub, seed, request("ab", output={"delivery_mode": 9})),
    "too long": lambda stub, seed: refused(stub, seed, request("ab" * CONTEXT, context=REJECT)),
    "model": lambda stub, seed: refused(stub, seed, request("ab", model=f"nobody{seed}")),
    "id": lambda stub, seed: refused(stub, seed, request("ab", request_id="held0")),
}
REFUSALS = {"invalid_field", "unsupported_field", "prompt_too_long", "model_not_found", "request_id_in_use"}


class Account:
    """What the server's metrics have gained since the first look."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._before = server.metrics()

    def by(self, name: str, label: str) -> Counter[str]:
        found: Counter[str] = Counter()
        for sample, value in self._server.metrics().items():
            if sample.startswith(name + "{") and value != self._before.get(sample, 0):
                found[sample.split(f'{label}="')[1].split('"')[0]] += int(value - self._before.get(sample, 0))
        return found

    def total(self, name: str) -> float:
        samples = self._server.metrics()
        return sum(v - self._before.get(k, 0) for k, v in samples.items() if k.split("{")[0] == name)


def test_every_request_is_counted_once_whatever_becomes_of_it(server: ServerProcess) -> None:
    account = Account(server)
    stub = Stub(server.channel())
    held = [
        stub.Generate(request("ab", request_id=f"held{index}", stopping=FOREVER), timeout=120) for index in range(HELD)
    ]
    firsts = [next(call) for call in held]
    work = [
        (kind, seed) for seed in range(ROUNDS) for name, kind in KINDS.items() if name != "deadline" or seed < DEADLINES
    ]
    assert len(work) >= 100
    channels = [server.channel() for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda each: each[0](Stub(channels[each[1] % 4]), each[1]), work))
    expected = Counter(reason for reason, _ in outcomes)
    assert {"eos", "stop_token", "stop_string", "max_new_tokens", "context_full", "time_limit"} <= set(expected)

    # Those that are held live on; every other one has ended once.
    server.wait_for_metric("pellucid_requests_running", HELD)
    server.wait_for_metric("pellucid_requests_waiting", 0)
    finished = account.by("pellucid_requests_finished_total", "reason")
    rejected = account.by("pellucid_request_rejections_total", "reason")
    assert finished == Counter({r: n for r, n in expected.items() if r not in REFUSALS})
    assert rejected == Counter({r: n for r, n in expected.items() if r in REFUSALS})
    accepted = HELD + len(work) - rejected.total()
    assert finished.total() + HELD == accepted

    for call in held:
        call.cancel()
    server.wait_for_metric("pellucid_requests_running", 0)
    server.wait_for_metric("pellucid_requests_waiting", 0)
    finished = account.by("pellucid_requests_finished_total", "reason")
    assert finished["client_cancelled"] == ROUNDS + HELD
    assert finished.total() == account.total("pellucid_e2e_request_latency_seconds_count") == accepted
    # A call is counted when its handler is done, which may be after its client has gone.
    end, calls = time.monotonic() + 30, HELD + len(work) + finished["cancelled"]
    while (codes := account.by("pellucid_requests_total", "grpc_code")).total() < calls and time.monotonic() < end:
        time.sleep(0.02)
    assert codes.total() == calls
    assert codes["CANCELLED"] == ROUNDS + HELD
    assert codes["DEADLINE_EXCEEDED"] == DEADLINES
    assert account.total("pellucid_errors_total") == rejected.total() + DEADLINES
    causes = {"client": 2 * ROUNDS + HELD, "deadline": DEADLINES}
    assert account.by("pellucid_request_cancellations_total", "cause") == causes
    assert account.total("pellucid_generated_tokens_total") == account.total("pellucid_request_generated_tokens_sum")
    assert len(firsts) == HELD


def test_tokens_are_counted_as_clients_got_them(server: ServerProcess) -> None:
    account = Account(server)
    kinds = [KINDS[name] for name in ("length", "none", "eos", "stop string", "stop token", "context", "named")]
    channels = [server.channel() for _ in range(4)]
    work = [(kind, seed) for seed in range(ROUNDS) for kind in kinds]
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda each: each[0](Stub(channels[each[1] % 4]), 100 + each[1]), work))
    answers = [answer for _, answer in outcomes if answer is not None]
    assert len(answers) == len(work)
    tokens = [len(answer.token_ids) for answer in answers]
    assert account.total("pellucid_generated_tokens_total") == sum(tokens)
    assert account.total("pellucid_request_generated_tokens_sum") == sum(tokens)
    prompts = sum(answer.prompt.prompt_token_count for answer in answers)
    assert (
        account.total("pellucid_prompt_tokens_total") == account.total("pellucid_request_prompt_tokens_sum") == prompts
    )
    assert account.total("pellucid_time_to_first_token_seconds_count") == sum(count > 0 for count in tokens)
    assert account.total("pellucid_inter_token_latency_seconds_count") == sum(max(0, count - 1) for count in tokens)
    assert account.total("pellucid_request_time_per_output_token_seconds_count") == sum(count > 1 for count in tokens)
    samples = server.metrics()
    for name, value in samples.items():
        if 'le="+Inf"' in name:
            assert samples[name.replace("_bucket{", "_count{").replace('le="+Inf",', "")] == value


def test_times_are_those_that_clients_are_told(server: ServerProcess) -> None:
    account = Account(server)
    stub = Stub(server.channel())
    told: Counter[str] = Counter()
    for seed in range(20):
        _, answer = answered(stub, seed, max_new_tokens=20, ignore_eos=True)
        assert answer is not None
        for phase in ("time_to_first_token", "queue_time", "prefill_time", "decode_time", "total_time"):
            told[phase] += getattr(answer.timings, phase).ToNanoseconds()
    for phase, name in (
        ("time_to_first_token", "time_to_first_token_seconds"),
        ("queue_time", "request_queue_time_seconds"),
        ("prefill_time", "request_prefill_time_seconds"),
        ("decode_time", "request_decode_time_seconds"),
        ("decode_time", "inter_token_latency_seconds"),
        ("total_time", "e2e_request_latency_seconds"),
    ):
        assert account.total(f"pellucid_{name}_sum") == pytest.approx(told[phase] / 1e9, rel=1e-6), name
