"""Request sequences: functions of seed and number, within what the model takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from pellucid_loadtest.options import LoadOptions
from pellucid_loadtest.sending import generate_request
from pellucid_loadtest.workloads import ModelShape, Workload

MakeOptions = Callable[..., LoadOptions]
WORKLOADS = ["random", "chat", "shared-prefix", "long-input"]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_same_seed_gives_the_same_requests_in_any_order(
    make_options: MakeOptions, model: ModelShape, workload: str
) -> None:
    options = make_options(workload=workload, seed="5")
    forwards = [Workload(options, model).request(index) for index in range(30)]
    backwards = Workload(options, model)
    assert [backwards.request(index) for index in reversed(range(30))][::-1] == forwards
    other = Workload(make_options(workload=workload, seed="6"), model)
    assert [other.request(index) for index in range(30)] != forwards
    assert len({request.prompt for request in forwards}) == 30


@pytest.mark.parametrize("workload", WORKLOADS)
def test_requests_fit_the_model(make_options: MakeOptions, model: ModelShape, workload: str) -> None:
    source = Workload(make_options(workload=workload), model)
    requests = [source.request(index) for index in range(300)]
    tokens = {token for request in requests for token in request.prompt}
    assert tokens == set(range(model.vocab_size)) - set(model.eos_token_ids)
    assert all(request.max_new_tokens >= 1 for request in requests)
    sizes = [len(request.prompt) + request.max_new_tokens for request in requests]
    if workload == "long-input":
        assert all(len(request.prompt) >= model.context for request in requests)
        assert max(len(request.prompt) for request in requests) > 2.5 * model.context
    else:
        assert max(sizes) <= model.context
        assert any(request.clipped for request in requests) == (workload != "random")


def test_lengths_follow_the_flags(make_options: MakeOptions, model: ModelShape) -> None:
    options = make_options(prompt_length="fixed:11", output_length="uniform:2:4")
    requests = [Workload(options, model).request(index) for index in range(100)]
    assert {len(request.prompt) for request in requests} == {11}
    assert {request.max_new_tokens for request in requests} == {2, 3, 4}
    assert not any(request.clipped for request in requests)


def test_the_servers_output_limit_is_kept_and_told(make_options: MakeOptions, model: ModelShape) -> None:
    options = make_options(prompt_length="fixed:4", output_length="fixed:20")
    request = Workload(options, replace(model, max_output=8)).request(0)
    assert (request.max_new_tokens, request.clipped) == (8, True)


def test_shared_prefixes_are_shared_evenly(make_options: MakeOptions, model: ModelShape) -> None:
    options = make_options(
        workload="shared-prefix",
        prefix_length="40",
        prefix_count="4",
        prompt_length="uniform:8:16",
        output_length="fixed:8",
    )
    source = Workload(options, model)
    requests = [source.request(index) for index in range(400)]
    beginnings = Counter(request.prompt[:40] for request in requests)
    assert len(beginnings) == 4
    assert min(beginnings.values()) > 60
    assert len({request.prompt[40:] for request in requests}) > 390


def test_the_message_holds_the_request(make_options: MakeOptions, model: ModelShape) -> None:
    options = make_options(context="truncate", temperature="0")
    request = Workload(options, model).request(0)
    message = generate_request(request, "tiny", options)
    assert tuple(message.token_ids.ids) == request.prompt
    assert message.stopping.max_new_tokens == request.max_new_tokens
    assert message.stopping.ignore_eos
    assert message.sampling.HasField("temperature")
    assert message.sampling.seed == request.sampling_seed
    assert message.context.overflow != 0
    plain = generate_request(request, "tiny", make_options(ignore_eos="no"))
    assert not plain.HasField("context")
    assert not plain.sampling.HasField("temperature")
    assert not plain.stopping.ignore_eos
