"""Worker for ONNX Runtime's generate API: FOLDER THREADS. It batches statically."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnxruntime_genai
from protocol import serve


def main() -> None:
    folder, threads = sys.argv[1], int(sys.argv[2])
    config = onnxruntime_genai.Config(folder)
    config.clear_providers()
    options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    model = onnxruntime_genai.Model(config)
    vocab_size = json.loads(Path(folder, "genai_config.json").read_text())["model"]["vocab_size"]

    def generate(prompts: Sequence[Sequence[int]], new: int, first: Callable[[], None]) -> list[list[int]]:
        length = len(prompts[0]) + new
        parameters = onnxruntime_genai.GeneratorParams(model)
        parameters.set_search_options(
            do_sample=False,
            min_length=length,  # no end token before
            max_length=length,
            batch_size=len(prompts),
            past_present_share_buffer=False,
        )
        generator = onnxruntime_genai.Generator(model, parameters)
        generator.append_tokens(np.array(prompts, dtype=np.int32))
        outputs: list[list[int]] = [[] for _ in prompts]
        for step in range(new):
            generator.generate_next_token()
            if step == 0:
                first()
            for output, token in zip(outputs, generator.get_next_tokens(), strict=True):
                output.append(int(token))
        return outputs

    serve("onnxruntime-genai", onnxruntime_genai.__version__, vocab_size, generate)


main()
