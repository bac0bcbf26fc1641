"""Worker for OpenVINO GenAI's continuous batching: FOLDER THREADS PRECISION_HINT."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from protocol import serve


def main() -> None:
    folder, threads, hint = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 1, 2048, 64
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": hint}
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
    vocab_size = json.loads(Path(folder, "config.json").read_text())["vocab_size"]
    requests = iter(range(1, sys.maxsize))

    def generate(prompts: Sequence[Sequence[int]], new: int, first: Callable[[], None]) -> list[list[int]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
        handles = [
            pipeline.add_request(next(requests), openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
            for prompt in prompts
        ]
        outputs: list[list[int]] = [[] for _ in prompts]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for output, handle in zip(outputs, handles, strict=True):
                while handle.can_read():
                    for part in handle.read().values():
                        if not any(outputs):
                            first()
                        output += part.generated_ids
        return outputs

    serve("openvino", openvino_genai.__version__, vocab_size, generate)


if __name__ == "__main__":
    main()
