"""Worker for CTranslate2: FOLDER THREADS COMPUTE_TYPE. It batches statically."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import ctranslate2
from protocol import serve


def main() -> None:
    folder, threads, compute_type = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    generator = ctranslate2.Generator(
        folder, device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=threads
    )
    vocabulary = json.loads(Path(folder, "vocabulary.json").read_text())

    def generate(prompts: Sequence[Sequence[int]], new: int, first: Callable[[], None]) -> list[list[int]]:
        began: list[None] = []

        def step(_: object) -> bool:
            if not began:
                began.append(None)
                first()
            return False

        single = {"callback": step} if len(prompts) == 1 else {}
        results = generator.generate_batch(
            [[vocabulary[token] for token in prompt] for prompt in prompts],
            max_length=new,
            min_length=new,
            sampling_topk=1,
            beam_size=1,
            include_prompt_in_result=False,
            end_token=[],
            max_batch_size=len(prompts),
            **single,
        )
        return [result.sequences_ids[0] for result in results]

    serve("ctranslate2", ctranslate2.__version__, len(vocabulary), generate)


main()
