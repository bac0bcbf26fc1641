"""Worker for transformers' own generate: FOLDER THREADS DTYPE."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
import transformers
from protocol import serve


class FirstToken(transformers.generation.streamers.BaseStreamer):
    """Calls once when the first new token comes; the prompt is streamed before it."""

    def __init__(self, first: Callable[[], None]) -> None:
        self._left, self._first = 2, first

    def put(self, value: torch.Tensor) -> None:
        self._left -= 1
        if self._left == 0:
            self._first()

    def end(self) -> None:
        pass


def main() -> None:
    folder, threads, dtype = sys.argv[1], int(sys.argv[2]), getattr(torch, sys.argv[3])
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0

    @torch.inference_mode()
    def generate(prompts: Sequence[Sequence[int]], new: int, first: Callable[[], None]) -> list[list[int]]:
        tokens = torch.tensor(prompts)
        streamer = FirstToken(first) if len(prompts) == 1 else None
        output = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, do_sample=False, streamer=streamer
        )
        answer: list[list[int]] = output[:, tokens.shape[1] :].tolist()
        return answer

    serve("transformers", transformers.__version__, model.config.vocab_size, generate)


main()
