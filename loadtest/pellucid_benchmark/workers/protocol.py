"""How a worker talks to the benchmark: one JSON object a line, on standard input and output. Standard library only,
since a worker runs in the virtual environment of the engine that it drives.

    benchmark  {"prompts": [[id, …], …], "new": tokens for each, EOS ignored, greedy}
    worker     {"first": s, "last": s, "tokens": n, "ids": [the first 12 of the first output]}, or {"error": text}

The first line of a worker is {"ready": {"name": …, "version": …, "vocab_size": …}}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Generate = Callable[[Sequence[Sequence[int]], int, Callable[[], None]], "list[list[int]]"]
"""(prompts, new tokens for each, to be called once the first token is there) -> outputs."""


def serve(name: str, version: str, vocab_size: int, generate: Generate) -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the engine itself prints is no answer
    ready = {"name": name, "version": version, "vocab_size": vocab_size}
    answers.write(json.dumps({"ready": ready}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answers.write(json.dumps(_timed(generate, request["prompts"], request["new"])) + "\n")
        except Exception as error:
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")


def _timed(generate: Generate, prompts: list[list[int]], new: int) -> dict[str, Any]:
    first: list[float] = []
    began = time.perf_counter()
    outputs = generate(prompts, new, lambda: first.append(time.perf_counter() - began))
    last = time.perf_counter() - began
    return {
        "first": first[0] if first else last,
        "last": last,
        "tokens": sum(map(len, outputs)),
        "ids": [int(token) for token in outputs[0][:12]],
    }
