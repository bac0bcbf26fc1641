"""Worker for llama.cpp through llama-cpp-python's low-level calls: FILE.gguf THREADS MOST_STREAMS MOST_TOKENS."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

import llama_cpp
import numpy as np
from protocol import serve

BATCH = 2048


def main() -> None:
    path, threads, streams, tokens = sys.argv[1], *map(int, sys.argv[2:5])
    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    contexts: dict[int, object] = {}
    batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def context_for(count: int) -> object:
        if count not in contexts:
            options = llama_cpp.llama_context_default_params()
            options.n_ctx = tokens if count == 1 else streams * 256
            options.n_batch, options.n_ubatch, options.n_seq_max = BATCH, 512, count
            options.n_threads = options.n_threads_batch = threads
            contexts[count] = llama_cpp.llama_init_from_model(model, options)
        return contexts[count]

    def decode(context: object, items: Iterable[tuple[int, int, int, bool]]) -> None:
        count = 0
        for token, position, sequence, wanted in items:
            batch.token[count], batch.pos[count] = token, position
            batch.n_seq_id[count], batch.logits[count] = 1, wanted
            batch.seq_id[count][0] = sequence
            count += 1
        batch.n_tokens = count
        if llama_cpp.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")

    def likeliest(context: object, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, shape=(vocab_size,)).argmax())

    def generate(prompts: Sequence[Sequence[int]], new: int, first: Callable[[], None]) -> list[list[int]]:
        context = context_for(len(prompts))
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        outputs: list[list[int]] = []
        together = max(1, BATCH // len(prompts[0]))
        for begin in range(0, len(prompts), together):
            part = prompts[begin : begin + together]
            rows = [len(prompt) for prompt in part]
            decode(context, ((t, p, begin + s, p == rows[s] - 1) for s, x in enumerate(part) for p, t in enumerate(x)))
            if begin == 0:
                first()
            outputs += [[likeliest(context, sum(rows[: s + 1]) - 1)] for s in range(len(part))]
        for step in range(new - 1):
            position = len(prompts[0]) + step
            decode(context, ((output[-1], position, s, True) for s, output in enumerate(outputs)))
            for row, output in enumerate(outputs):
                output.append(likeliest(context, row))
        return outputs

    serve("llama.cpp", llama_cpp.__version__, vocab_size, generate)


main()
