"""Ten thousand tokens through the bundled model, whose context is 256: bounded memory, equal to the references."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pellucid_client import Cancelled, Chunk, Client, Completion, PromptTooLong
from pellucid_model.checkpoint import load_checkpoint
from pellucid_model.windows import reencoded_logits, rolling_logits
from pellucid_server.kv.window import ContextWindow
from pellucid_testing.checkpoints import tiny_checkpoint, tiny_config
from pellucid_testing.server import ServerProcess, serve, start_server

CONTEXT, BLOCK, STEP = 256, 32, 512
LENGTH = 10_000
POLICIES: list[tuple[dict[str, Any], ContextWindow]] = [
    ({"context": "auto"}, ContextWindow("roll", 4, 252)),
    ({"context": "roll", "sink_tokens": 0, "window_tokens": 100}, ContextWindow("roll", 0, 100)),
    ({"context": "reencode"}, ContextWindow("reencode", 1, 255, 63)),
    (
        {"context": "reencode", "sink_tokens": 9, "window_tokens": 90, "hop_tokens": 90},
        ContextWindow("reencode", 9, 90, 90),
    ),
]
TEXT = "今天天气不错，适合出门散步。"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    flags = ("--dtype", "float32", "--threads", "1", "--kv-block-size", str(BLOCK), "--max-step-tokens", str(STEP))
    with serve(None, *flags) as running:
        yield running


@contextmanager
def watching_memory(client: Client) -> Iterator[list[int]]:
    """The most KV blocks in use at any look, while the block runs."""
    most, done = [0], threading.Event()

    def look() -> None:
        while not done.wait(0.02):
            most[0] = max(most[0], client.load().used_kv_block_count)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield most
    finally:
        done.set()
        watcher.join()


def check_report(answer: Completion, policy: ContextWindow) -> None:
    prompt = answer.prompt
    assert (prompt.context, prompt.window_tokens, prompt.sink_tokens) == (policy.kind, policy.window, policy.sinks)
    assert prompt.hop_tokens == (policy.hop if policy.kind == "reencode" else None)
    first = prompt.prompt_token_count - 1
    assert prompt.dropped_token_count == policy.unseen(first)
    last = first + answer.usage.output_token_count - 1
    assert answer.timings.window_move_count == policy.moves(first, last)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("options", "policy"), POLICIES, ids=[f"{p.kind}-{p.sinks}-{p.window}" for _, p in POLICIES])
def test_ten_thousand_tokens_in_and_out(server: ServerProcess, options: dict[str, Any], policy: ContextWindow) -> None:
    prompt = (TEXT * LENGTH)[: LENGTH - 1]
    metric = {"policy": policy.kind}
    with Client(server.address) as client:
        moves = server.metric("pellucid_window_moves_total", **metric)
        with watching_memory(client) as most:
            long_prompt = client.generate(prompt, temperature=0, max_new_tokens=5, **options).result()
            seeded: dict[str, Any] = {"temperature": 0.8, "seed": 3, "ignore_eos": True, "max_new_tokens": LENGTH}
            generated = client.generate(TEXT, **seeded, **options).result()
        # Besides the window a step holds the blocks of the tokens that it computes.
        assert 0 < most[0] <= policy.blocks_needed(LENGTH, BLOCK) + (STEP // BLOCK if policy.kind == "roll" else 0)
        assert long_prompt.prompt.prompt_token_count == LENGTH
        for answer in (long_prompt, generated):
            check_report(answer, policy)
        counted = server.metric("pellucid_window_moves_total", **metric) - moves
        assert counted == long_prompt.timings.window_move_count + generated.timings.window_move_count
        assert len(generated.token_ids) == LENGTH
        assert client.load().used_kv_block_count == 0

        # The last tokens, once more from a prompt of all that came before.
        whole = [*client.tokenize(TEXT).token_ids, *generated.token_ids]
        for length in (1500, LENGTH):
            again = client.generate(
                whole[:length], temperature=0, ignore_eos=True, max_new_tokens=20, **options
            ).result()
            expect_greedy(policy, whole[:length], list(again.token_ids))


def expect_greedy(policy: ContextWindow, prompt: list[int], output: list[int]) -> None:
    """The output is what the slow reference would choose. The rolling one needs all rows at once: not for long."""
    spec = find_spec("pellucid_model")
    assert spec is not None
    assert spec.origin is not None
    model = load_checkpoint(Path(spec.origin).parent / "demo").model.float()
    tokens = prompt + output[:-1]
    if policy.kind == "reencode":
        logits = reencoded_logits(model, tokens, policy.sinks, policy.window, policy.hop, len(prompt) - 1)
    elif len(tokens) < 2000:
        logits = rolling_logits(model, tokens, policy.sinks, policy.window)[len(prompt) - 1 :]
    else:
        return
    assert logits.argmax(-1).tolist() == output


def test_policies_that_do_not_slide(server: ServerProcess) -> None:
    with Client(server.address) as client:
        with pytest.raises(PromptTooLong, match=rf"{LENGTH} tokens.*{CONTEXT} tokens"):
            client.generate([5] * LENGTH, context="reject").result()
        full = client.generate([5] * (CONTEXT - 3), context="reject", ignore_eos=True, max_new_tokens=99).result()
        assert (full.finish.reason, full.usage.output_token_count) == ("context_full", 3)
        cut = client.generate([5] * LENGTH, context="truncate", ignore_eos=True, max_new_tokens=100).result()
        assert cut.prompt.dropped_token_count == LENGTH - (CONTEXT - 100)
        assert (cut.finish.reason, cut.usage.output_token_count) == ("max_new_tokens", 100)


def test_a_newcomer_does_not_wait_for_a_very_long_prompt(server: ServerProcess) -> None:
    with Client(server.address) as client, client.generate([5] * 2_000_000, context="roll", max_new_tokens=1) as long:
        reader = threading.Thread(target=lambda: [None for _ in _quietly(long)])
        reader.start()
        server.wait_for_metric("pellucid_requests_running", 1)
        client.generate(TEXT, max_new_tokens=3).result()
        assert long.prompt is None, "the long prompt was over before the short one"
        long.cancel()
        reader.join()


def _quietly(stream: Iterable[Chunk]) -> Iterator[Chunk]:
    """The chunks until the stream is cancelled."""
    with suppress(Cancelled):
        yield from stream


def test_a_default_policy_that_the_model_cannot_have_does_not_start(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, tiny_config(position="learned"))
    failed = start_server(folder, "--context-overflow", "roll")
    try:
        assert failed.process.wait(100) == 1
    finally:
        failed.close()
    assert "this model's positions are absolute" in failed.log()
