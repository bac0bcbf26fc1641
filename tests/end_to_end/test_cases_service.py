"""What brings other servers down, or makes them lie, as seen from outside: weights, limits, much at once, leaks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.torch import load_file, save_file

from pellucid.v1 import inference_pb2, inference_pb2_grpc
from pellucid_model.checkpoint import load_checkpoint
from pellucid_testing.calls import Failure, collect, failure, generate, request
from pellucid_testing.checkpoints import CHARACTERS, tiny_checkpoint, tiny_config
from pellucid_testing.known_models import bigram_checkpoint
from pellucid_testing.server import ServerProcess, serve, start_server
from pellucid_testing.sick_models import Sound, sick_checkpoint

Stub = inference_pb2_grpc.InferenceServiceStub
SERVING = health_pb2.HealthCheckResponse.SERVING
QUICK = ("--dtype", "float32", "--threads", "1")


def status(channel: grpc.Channel) -> int:
    health: Any = health_pb2_grpc.HealthStub(channel)
    return int(health.Check(health_pb2.HealthCheckRequest(), timeout=10).status)


def refused(channel: grpc.Channel, *arguments: Any, **fields: Any) -> Failure:
    return failure(Stub(channel).Generate(request(*arguments, **fields), timeout=20))


# ---- Numbers that are none ----


def test_logits_that_are_not_finite_end_their_own_request(tmp_path: Path) -> None:
    """NaN logits of one request stop the engine, or everybody is told token 0 for ever."""
    bad, block = 20, 4
    folder, source = sick_checkpoint(tmp_path, Sound)
    weights = load_file(folder / "model.safetensors")
    weights["embedding.weight"][bad] = 3e38  # finite, and so accepted; every product with it is not
    save_file(weights, folder / "model.safetensors")
    fields: dict[str, Any] = {"sampling": {"seed": 1}, "stopping": {"max_new_tokens": 40, "ignore_eos": True}}
    # Token 20 is never sampled, and stands in the second block, at its edges and alone.
    fields["sampling"]["logit_bias"] = {bad: -100.0}
    good = [list(range(5, 5 + length)) for length in (1, 4, 9, 13)]
    spoilt = [[5, 6, 7, 8, bad, 9, 10], [5, 6, 7, bad], [5, 6, 7, 8, 9, 10, 11, 12, bad], [bad]]
    with serve(folder, *QUICK, "--module", source, "--kv-block-size", str(block)) as server:
        channel, engine = server.channel(), server.engine_pid()
        alone = [generate(channel, prompt, **fields).token_ids for prompt in good]
        for _ in range(2):
            calls = [Stub(channel).Generate(request(prompt, **fields), timeout=20) for prompt in good + spoilt]
            assert [collect(call).token_ids for call in calls[:4]] == alone
            for call in calls[4:]:
                found = failure(call)
                assert (found.code, found.reason) == ("INTERNAL", "NON_FINITE_LOGITS")
        assert server.metric("pellucid_non_finite_logits_total") == 2 * len(spoilt)
        assert (status(channel), server.engine_pid()) == (SERVING, engine)
        server.wait_for_metric("pellucid_kv_cache_blocks", 0, state="used")


# ---- Weights ----


def sharded(folder: Path, count: int = 3) -> list[Path]:
    """model.safetensors as shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = [folder / f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for i, file in enumerate(files):
        save_file({name: tensors[name] for name in names[i::count]}, file)
    where = {name: files[i].name for i in range(count) for name in names[i::count]}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {where}}}'.replace("'", '"'))
    return files


def test_shards_that_are_lost_or_cut_stop_the_start(tmp_path: Path) -> None:
    """A shard that the index names is absent or cut short, and the server starts with random weights."""
    whole = tmp_path / "whole"
    tiny_checkpoint(whole)
    sharded(whole)
    load_checkpoint(whole)  # nothing is wrong with it
    started: list[tuple[ServerProcess, str]] = []
    for kept in (0.0, 0.5, 1.0):
        folder = Path(shutil.copytree(whole, tmp_path / f"{kept}"))
        file = folder / "model-00002-of-00003.safetensors"
        data = file.read_bytes()
        file.write_bytes(data[: min(len(data) - 1, int(len(data) * kept))])
        if not kept:
            file.unlink()
        started.append((start_server(folder), file.name))
    for server, name in started:
        code = server.process.wait(100)
        server.close()
        assert code == 1, "neither a signal nor a success"
        assert name in server.other_lines[-1]
        assert "serving" not in [event["message"] for event in server.events]


def test_other_weights_under_the_same_name_have_a_cache_of_their_own(tmp_path: Path) -> None:
    """After the weights have changed under the same name, cached keys of the old ones are found, and answers mix two
    models. A new engine reads the checkpoint again: its weights and its cache are new together."""
    folder = tmp_path / "model"
    answers = []
    fields: dict[str, Any] = {"sampling": {"temperature": 0}, "stopping": {"max_new_tokens": 20, "ignore_eos": True}}
    prompt = [5 + i % 30 for i in range(40)]
    tiny_checkpoint(folder)
    with serve(folder, *QUICK, "--kv-block-size", "4") as server:
        for seed in (0, 1):
            cold = generate(server.channel(), prompt, **fields)
            warm = generate(server.channel(), prompt, **fields)
            assert (cold.usage.cached_token_count, warm.usage.cached_token_count) == (0, 39)
            assert warm.token_ids == cold.token_ids
            answers.append(cold.token_ids)
            if seed == 0:
                tiny_checkpoint(folder, seed=1)
                server.restart_engine()
        salted = generate(server.channel(), prompt, cache={"salt": "other"}, **fields)
        assert (salted.usage.cached_token_count, salted.token_ids) == (0, answers[1])
    assert answers[0] != answers[1]


# ---- A context of 32 tokens ----

CONTEXT = 32


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Learned positions, whose table ends with the context, and prompts that do not fit are refused."""
    folder = tmp_path_factory.mktemp("small") / "tiny"
    tiny_checkpoint(folder, tiny_config(position="learned", context_length=CONTEXT))
    with serve(folder, *QUICK, "--kv-block-size", "4", "--context-overflow", "reject") as server:
        yield server


def test_prompts_around_the_context(small: ServerProcess) -> None:
    """A prompt too long crashes the engine, one that just fits is refused, or half of it is dropped in silence."""
    channel = small.channel()
    beside: dict[str, Any] = {"sampling": {"seed": 3}, "stopping": {"max_new_tokens": 31, "ignore_eos": True}}
    alone = generate(channel, [7], **beside).token_ids
    assert len(alone) == CONTEXT - 1
    for length in (30, 31, 32, 33, 64, 10_000):
        for new in (0, 1, 2, 100):
            stream = Stub(channel).Generate(request([7], **beside), timeout=20)
            fields: dict[str, Any] = {"stopping": {"max_new_tokens": new, "ignore_eos": True}}
            if length + min(new, 1) <= CONTEXT:
                answer = generate(channel, [9] * length, **fields)
                assert len(answer.token_ids) == min(new, CONTEXT - length)
                assert answer.prompt.effective_max_new_tokens == min(new, CONTEXT - length)
                assert answer.reason == ("max_new_tokens" if new == len(answer.token_ids) else "context_full")
            else:
                found = refused(channel, [9] * length, **fields)
                assert (found.code, found.reason) == ("INVALID_ARGUMENT", "PROMPT_TOO_LONG")
                assert f"has {length} tokens; the context is {CONTEXT} tokens" in found.violations["token_ids.ids"]
            assert collect(stream).token_ids == alone


@pytest.mark.parametrize("overflow", ["TRUNCATE", "REENCODE"])
def test_what_is_dropped_of_a_prompt_is_told(small: ServerProcess, overflow: str) -> None:
    """The front of a long prompt is dropped, and the answer does not say so."""
    context = {"overflow": f"CONTEXT_OVERFLOW_{overflow}"}
    for length in (31, 32, 33, 64, 10_000):
        answer = generate(small.channel(), [9] * length, context=context, stopping={"max_new_tokens": 1})
        assert answer.usage.prompt_token_count == answer.prompt.prompt_token_count == length
        dropped = answer.prompt.dropped_token_count
        assert length - CONTEXT <= dropped
        assert (dropped == 0) == (length <= (CONTEXT - 1 if overflow == "TRUNCATE" else CONTEXT))
        assert inference_pb2.ContextOverflow.Name(answer.prompt.effective_context.overflow).endswith(overflow)


def test_a_long_text_holds_nobody_up(small: ServerProcess) -> None:
    """Tokenizing a huge prompt blocks the event loop: health checks and all other streams stand still."""
    channel, text = small.channel(), CHARACTERS[:26] * 2**18
    fields: dict[str, Any] = {
        "context": {"overflow": "CONTEXT_OVERFLOW_REENCODE"},
        "stopping": {"max_new_tokens": 1},
        "output": {"delivery_mode": inference_pb2.DELIVERY_MODE_FINAL},
    }
    for _ in range(10):  # in case that this process stands still for as long as it takes
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(collect, Stub(channel).Generate(request(text, **fields), timeout=60))
            checks, streams = 0, 0
            while not done.done():
                assert status(channel) == SERVING
                checks += not done.done()
                streams += bool(generate(channel, "ab", stopping={"max_new_tokens": 3}).token_ids) and not done.done()
            assert done.result().prompt.prompt_token_count == len(text) + 1
        if checks >= 2 and streams >= 2:
            return
    raise AssertionError("everybody waited for the long text")


# ---- Much at once ----


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = bigram_checkpoint(tmp_path_factory.mktemp("wide"), torch.randn(64, 64), context_length=512)
    flags = ("--max-logprobs", "60", "--max-running", "64", "--max-queue", "64")
    with serve(folder, *QUICK, *flags, "--context-overflow", "reject") as server:
        yield server


def everything(new: int, sequences: int) -> dict[str, Any]:
    output = {"delivery_mode": inference_pb2.DELIVERY_MODE_FINAL, "output_logprobs": {"top_count": 60}}
    stopping = {"max_new_tokens": new}
    return {"sampling": {"sequence_count": sequences, "seed": 1}, "stopping": stopping, "output": output}


def test_answers_larger_than_grpc_s_own_limit(wide: ServerProcess) -> None:
    """An answer of more than 4 MB fails although the client has raised its limit, and the channel is of no use then."""
    default, raised = wide.channel(), wide.channel([("grpc.max_receive_message_length", 16 * 2**20)])
    answer = generate(raised, [5], **everything(100, 64))
    assert 4 * 2**20 < answer.messages[0].ByteSize() < 16 * 2**20
    found = failure(Stub(default).Generate(request([5], **everything(100, 64)), timeout=20))
    assert (found.code, found.reason) == ("RESOURCE_EXHAUSTED", "")  # the client's own refusal
    for channel in (default, raised):
        assert len(generate(channel, [5], stopping={"max_new_tokens": 2}).token_ids) == 2


def test_a_reader_that_pauses_gets_everything_however_much_it_is(wide: ServerProcess) -> None:
    """What has gathered for a slow reader is more than a message may hold, and the stream fails; or it is cut short."""
    fields = everything(400, 64)
    del fields["output"]["delivery_mode"]
    # A small, fixed window, so that little is on its way to the reader.
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    channel = wide.channel([("grpc.max_receive_message_length", 16 * 2**20), *narrow])
    stream = Stub(channel).Generate(request([5], **fields), timeout=60)
    first = next(stream)
    wide.wait_for_metric("pellucid_requests_running", 0)
    answer = collect([first, *stream])
    assert sum(message.ByteSize() for message in answer.messages) > 16 * 2**20
    assert max(message.ByteSize() for message in answer.messages) > 2**20
    del fields["output"]["output_logprobs"]
    plain = generate(channel, [5], **fields)
    for index in range(64):
        assert answer.sequence(index) == plain.sequence(index)
        scored = [entry.token_id for delta in answer.deltas(index) for entry in delta.logprobs]
        assert scored == answer.sequence(index)[1]


def test_the_largest_batch_that_may_be_asked_for(wide: ServerProcess) -> None:
    """Memory for logits, log-probabilities and the sampler was not thought of at the start, and the engine dies."""
    engine = wide.engine_pid()
    channel = wide.channel([("grpc.max_receive_message_length", 16 * 2**20)])
    fields = everything(16, 1)
    fields["output"] |= {"prompt_logprobs": {"top_count": 60}}
    prompts = [[(i * key) % 64 for i in range(240)] for key in range(1, 65)]
    calls = [Stub(channel).Generate(request(prompt, **fields), timeout=60) for prompt in prompts]
    for prompt, call in zip(prompts, calls, strict=True):
        answer = collect(call)
        assert (len(answer.token_ids), len(answer.prompt.logprobs)) == (16, len(prompt))
        assert {len(entry.alternatives) for entry in answer.prompt.logprobs[1:]} == {60}
    assert wide.engine_pid() == engine


def test_nothing_gathers_over_hundreds_of_requests(wide: ServerProcess) -> None:
    """State of requests that were cancelled or refused is kept, and the server's memory, files or series grow."""
    channel = wide.channel()

    def traffic(count: int) -> tuple[list[int], dict[str, float]]:
        """Files and threads of both processes, and all metrics, after so many requests."""
        for index in range(count):
            fields: dict[str, Any] = {"request_id": f"{count} {index}", "stopping": {"max_new_tokens": 500}}
            match index % 10:
                case 0:
                    assert refused(channel, [64 + index], **fields).code == "INVALID_ARGUMENT"
                case 1 | 2:
                    slowly = {"min_tokens_per_message": 1}
                    call = Stub(channel).Generate(request([index % 64], **fields, output=slowly), timeout=20)
                    if index % 4:
                        next(call)
                    call.cancel()
                case _:
                    generate(
                        channel,
                        [index % 64, count % 64],
                        request_id=fields["request_id"],
                        stopping={"max_new_tokens": 3},
                    )
        for name in ("running", "waiting"):
            wide.wait_for_metric(f"pellucid_requests_{name}", 0)
        wide.wait_for_metric("pellucid_kv_cache_blocks", 0, state="used")
        pids = (wide.process.pid, wide.engine_pid())
        entries = [len(os.listdir(f"/proc/{pid}/{kind}")) for pid in pids for kind in ("fd", "task")]
        return entries, wide.metrics()

    entries, metrics = traffic(100)
    more, later = traffic(500)
    # The last connection of the metrics' reader may or may not be closed yet.
    assert all(now <= before + 3 for before, now in zip(entries, more, strict=True))
    assert set(later) == set(metrics)
    for name in ("process_resident_memory_bytes", "pellucid_engine_process_resident_memory_bytes"):
        assert later[name] < 1.1 * metrics[name]
    assert wide.metric("pellucid_requests_finished_total", reason="client_cancelled") > 60
