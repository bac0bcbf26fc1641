"""The engine as a process of its own, spoken to over its socket as the frontend does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from pellucid_model.errors import ModelError
from pellucid_server.engine import engine as engine_module
from pellucid_server.engine.framing import LENGTH, frame
from pellucid_server.engine.loading import choose_step_tokens, load
from pellucid_server.engine.messages import (
    Abort,
    Constraint,
    FromEngine,
    LogprobWish,
    Ready,
    StartFailed,
    StepDone,
    ToEngine,
    decode_from_engine,
)
from pellucid_testing.checkpoints import tiny_checkpoint, tiny_config
from pellucid_testing.custom_model import EXAMPLE, custom_checkpoint
from pellucid_testing.stepping import Stepper, configure, submission

LONG = 32_768


class Engine:
    """The frontend's side of the conversation, without its frontend."""

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.connection = connection
        self.process = process
        connection.settimeout(60)

    def send(self, *messages: ToEngine) -> None:
        self.connection.sendall(b"".join(frame(message) for message in messages))

    def receive(self) -> FromEngine:
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        return decode_from_engine(self._exactly(length))

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.connection.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def collect(self, wanted: set[int]) -> tuple[dict[int, list[int]], list[StepDone]]:
        """Tokens by key until all wanted keys have finished."""
        tokens: dict[int, list[int]] = {key: [] for key in wanted}
        steps = []
        while wanted:
            step = self.receive()
            assert isinstance(step, StepDone)
            steps.append(step)
            for progress in step.progress:
                tokens[progress.key] += progress.tokens
                if progress.finished is not None:
                    wanted = wanted - {progress.key}
        return tokens, steps


@contextmanager
def engine(checkpoint: Path, **changes: Any) -> Iterator[Engine]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "pellucid_server.engine", str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        try:
            one = Engine(ours, process)
            one.send(configure(checkpoint, **changes))
            yield one
        finally:
            process.kill()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), tiny_config(context_length=4096))


@pytest.fixture(scope="module")
def long_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has room for requests that last for seconds."""
    return tiny_checkpoint(tmp_path_factory.mktemp("long"), tiny_config(context_length=LONG))


def test_a_life_from_ready_to_the_end_of_its_frontend(checkpoint: Path) -> None:
    requests = [submission(key, list(range(4, 9 + key)), 10 + key) for key in range(6)]
    stepper = Stepper.of(checkpoint)
    stepper.run(*requests)
    with engine(checkpoint) as one:
        ready = one.receive()
        assert isinstance(ready, Ready)
        assert ready.vocab_size == tiny_config().vocab_size
        assert ready.kv_block_count * ready.kv_block_size == 8 * 4096
        one.send(*requests)
        tokens, steps = one.collect({request.key for request in requests})
        assert tokens == stepper.tokens
        assert max(step.stats.step_sequences for step in steps) > 1
        last = steps[-1].stats
        assert (last.running, last.waiting, last.used_blocks) == (0, 0, 0)
        one.send(*(structs.replace(request, key=10 + request.key) for request in requests))
        again, steps = one.collect({10 + request.key for request in requests})
        assert again == {10 + key: made for key, made in tokens.items()}
        stats, (most,) = steps[-1].stats, {p.cached_tokens for s in steps for p in s.progress if p.key == 15}
        assert stats.used_blocks + stats.cached_blocks + stats.free_blocks == ready.kv_block_count
        assert stats.prefix_hit_tokens_total >= most == 8
        assert stats.prefix_queried_tokens_total == 2 * sum(len(request.prompt) for request in requests)
        # Terminals send interrupts to the whole group; only the end of the frontend ends the engine.
        one.process.send_signal(signal.SIGINT)
        one.send(submission(9, [5], 3))
        assert len(one.collect({9})[0][9]) == 3
        one.connection.close()
        assert one.process.wait(timeout=60) == 0


def test_several_sequences_with_log_probabilities(checkpoint: Path) -> None:
    prompt, wish = list(range(4, 24)), LogprobWish(top_count=2)
    one = submission(1, prompt, 6, group=1, prompt_logprobs=wish, output_logprobs=wish)
    sampling = structs.replace(one.sampling, temperature=1.5, seed=5)
    with engine(checkpoint) as process:
        assert isinstance(process.receive(), Ready)
        requests = [
            structs.replace(
                one, key=key, sampling=sampling, sequence_index=key, prompt_logprobs=wish if key == 1 else None
            )
            for key in (1, 2, 3)
        ]
        process.send(*requests)
        tokens, steps = process.collect({1, 2, 3})
        progress = [entry for step in steps for entry in step.progress]
        for key, made in tokens.items():
            assert [entry.token_id for p in progress if p.key == key for entry in p.logprobs] == made
            assert len(made) == 6
        assert len({tuple(made) for made in tokens.values()}) == 3, "sequences draw differently"
        assert steps[-1].stats.prefill_tokens_total < 2 * len(prompt), "the prompt is computed once"
        (scores,) = (entry.prompt_logprobs for entry in progress if entry.prompt_logprobs)
        assert [score.token_id for score in scores] == prompt
        assert scores[0].logprob is None
        assert all(score.logprob is not None and len(score.alternatives) >= 2 for score in scores[1:])
        process.send(structs.replace(requests[0], key=9))
        _, steps = process.collect({9})
        (again,) = (entry.prompt_logprobs for step in steps for entry in step.progress if entry.prompt_logprobs)
        assert again == scores, "the same with a warm cache"


def test_constraints_are_prepared_beside_the_steps(checkpoint: Path) -> None:
    """Of requests with constraints, one has a fault, one is aborted while it is prepared, and others run meanwhile."""
    plain = submission(1, [5, 6], 40)
    word = structs.replace(submission(2, [5, 6], 40), constraint=Constraint("regex", "[a-z]{5,9}\\."))
    stepper = Stepper.of(checkpoint).run(plain, word)
    with engine(checkpoint) as one:
        assert isinstance(one.receive(), Ready)
        faulty = structs.replace(word, key=3, constraint=Constraint("regex", "("))
        one.send(plain, word, faulty, structs.replace(word, key=4), Abort(4))
        tokens, steps = one.collect({1, 2, 3})
        assert tokens == stepper.tokens | {3: []}
        ends = {p.key: p.finished.kind for step in steps for p in step.progress if p.finished}
        assert ends == {**stepper.ends, 3: "no_token"}
        assert not any(p.key == 4 for step in steps for p in step.progress)
        # With nothing else to do, the engine waits for the constraint.
        again = structs.replace(word, key=5, constraint=Constraint("regex", "[a-z]{3}"))
        one.send(again)
        assert len(one.collect({5})[0][5]) == 3


def test_abort_takes_effect_within_a_step_in_every_state(long_checkpoint: Path) -> None:
    with engine(long_checkpoint, max_running=2, max_step_tokens=16) as one:
        assert isinstance(one.receive(), Ready)
        one.send(submission(1, [5] * 3, LONG - 3), submission(2, [6] * (LONG - 9), 5), submission(3, [7], 5))
        while True:  # until 1 decodes, 2 is in mid prefill and 3 waits
            step = one.receive()
            assert isinstance(step, StepDone)
            if step.stats.waiting == 1 and step.stats.running == 2 and step.stats.step_phase == "mixed":
                break
        one.send(Abort(3), Abort(2), Abort(77))
        while (step := one.receive()) and isinstance(step, StepDone) and step.stats.running > 1:
            assert not any(progress.finished for progress in step.progress)
        assert isinstance(step, StepDone)
        assert step.stats.waiting == 0
        one.send(Abort(1))
        while step.stats.running:
            step = one.receive()
            assert isinstance(step, StepDone)
        assert (step.stats.used_blocks, step.stats.step_phase) == (0, "idle")


def test_deadlines_and_time_limits(long_checkpoint: Path) -> None:
    with engine(long_checkpoint, max_running=1) as one:
        assert isinstance(one.receive(), Ready)
        for key, seconds in ((1, 0.3), (11, 3.0), (21, 30.0)):
            now = time.monotonic()
            one.send(
                submission(key, [5], LONG - 1, time_limit_at=now + seconds),
                submission(key + 1, [6], 10, deadline=now + seconds / 3),
                submission(key + 2, [6], 10, deadline=now - 1),
            )
            tokens, steps = one.collect({key, key + 1, key + 2})
            if tokens[key]:
                break  # else this machine was busy with something else for all that time
        ends = {p.key - key: (p.finished.kind, step.at[-1]) for step in steps for p in step.progress if p.finished}
        assert {place: kind for place, (kind, _) in ends.items()} == {0: "time_limit", 1: "deadline", 2: "deadline"}
        assert tokens[key]
        assert not tokens[key + 1]
        assert not tokens[key + 2]
        assert ends[1][1] >= now + seconds / 3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"checkpoint": "/nowhere"}, "checkpoint /nowhere"),
        ({"dtype": "float16"}, "--dtype float16 needs a CUDA device"),
        ({"kv_block_size": 12}, "--kv-block-size 12: must be a power of two"),
        ({"max_context": 5000}, "--max-context 5000: the model was trained with 4096 tokens"),
        ({"kv_cache_memory": 1000}, "the KV cache needs 3KiB for one block of 8 tokens, but has 1000B"),
        ({"kv_cache_memory": 1 << 60}, "--kv-cache-memory"),
        ({"tokenizer_size": 1000}, "its tokenizer has 1000 tokens"),
        ({"max_step_tokens": 4}, "max_step_tokens = 4 must be at least max_running = 8"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(checkpoint: Path, changes: dict[str, Any], says: str) -> None:
    settings = configure(**({"checkpoint": checkpoint} | changes))
    with pytest.raises((ModelError, ValueError)) as caught:
        engine_module.Engine(load(settings), settings)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_start_is_told_and_ends_the_process(checkpoint: Path) -> None:
    with engine(checkpoint, kv_block_size=12) as one:
        answer = one.receive()
        assert isinstance(answer, StartFailed)
        assert answer.message.startswith("--kv-block-size 12: must be a power of two")
        assert one.process.wait(timeout=60) == 1


@pytest.mark.parametrize("error", ["RuntimeError('no\\nevaluation')", "SystemExit('no evaluation')"])
def test_whatever_fails_while_a_model_is_loaded_is_told(tmp_path: Path, error: str) -> None:
    module = tmp_path / "broken.py"
    file, _, name = EXAMPLE.rpartition(":")
    module.write_text(
        Path(file).read_text(encoding="utf-8")
        + f"\n\nclass Broken({name}):\n    def eval(self):\n        raise {error}\n",
        encoding="utf-8",
    )
    with engine(checkpoint=custom_checkpoint(tmp_path), module=f"{module}:Broken") as one:
        answer = one.receive()
        assert isinstance(answer, StartFailed)
        expected = f"the model cannot be loaded: {error.partition('(')[0]}: no evaluation; the log has the traceback"
        assert answer.message == expected
        assert one.process.wait(timeout=60) == 1


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux for parents")
def test_engine_dies_with_its_frontend_even_in_the_middle_of_a_step(checkpoint: Path) -> None:
    script = f"""
import socket, subprocess, sys, time
from pellucid_server.engine.framing import frame
from pellucid_testing.stepping import configure
from pathlib import Path
ours, theirs = socket.socketpair()
child = subprocess.Popen([sys.executable, "-m", "pellucid_server.engine", str(theirs.fileno())],
                         pass_fds=[theirs.fileno(), ours.fileno()])
ours.sendall(frame(configure(Path({str(checkpoint)!r}))))
ours.recv(1)
print(child.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=_environment()) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 30
    while _alive(child):
        assert time.monotonic() < deadline, "the engine outlived its frontend"
        time.sleep(0.02)


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("wanted", "running", "expected"), [(0, 32, 2048), (0, 3000, 3000), (64, 8, 64)])
def test_the_largest_step_is_told(checkpoint: Path, wanted: int, running: int, expected: int) -> None:
    assert load(configure(checkpoint, max_step_tokens=wanted, max_running=running)).ready.max_step_tokens == expected


@pytest.mark.parametrize(
    ("parameters", "plain", "tiled"),
    [
        (0, 2048, 2048),
        (2**25, 2048, 2048),
        (2**26, 1024, 2048),
        (100_000_000, 687, 1374),
        (134_515_008, 512, 1024),
        (8_000_000_000, 512, 1024),
    ],
)
def test_small_models_take_large_steps(parameters: int, plain: int, tiled: int) -> None:
    configured = configure(Path(), max_step_tokens=0)
    assert choose_step_tokens(configured, parameters, in_tiles=False) == plain
    assert choose_step_tokens(configured, parameters, in_tiles=True) == tiled
