"""Worker for vLLM's CPU build, in-process: FOLDER THREADS DTYPE CONTEXT."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, range(int(sys.argv[2])))),
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

import vllm
from protocol import serve
from vllm.inputs import TokensPrompt


def main() -> None:
    folder, dtype, context = sys.argv[1], sys.argv[3], int(sys.argv[4])
    model = vllm.LLM(
        model=folder,
        dtype=dtype,
        max_model_len=context,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        disable_log_stats=True,
        generation_config="vllm",
    )
    engine = model.llm_engine
    requests = iter(range(1, sys.maxsize))

    def generate(prompts: Sequence[Sequence[int]], new: int, first: Callable[[], None]) -> list[list[int]]:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
        names = [str(next(requests)) for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, TokensPrompt(prompt_token_ids=list(prompt)), sampling)
        outputs: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not outputs:
                    first()
                outputs[output.request_id] = list(output.outputs[0].token_ids)
        return [outputs[name] for name in names]

    serve("vllm", vllm.__version__, model.llm_engine.model_config.get_vocab_size(), generate)


if __name__ == "__main__":
    main()
