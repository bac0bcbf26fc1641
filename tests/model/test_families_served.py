"""Hugging Face families as they are served: paged, chunked, in company, every decode step against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pellucid_testing.families import CONFIGS, build, edit_config, logits_of, save, some_tokens
from pellucid_testing.stepping import Stepper, submission

NEW = 64
PROMPT = 37
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in CONFIGS),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
    ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 1.0}),
    ("bloom", {"n_head": 4}),
    ("bloom", {"n_head": 12}),
    ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 28}),
    ("cohere", {"use_qk_norm": True}),
]


@pytest.mark.parametrize(("model_type", "changes"), CASES, ids=str)
def test_every_step_equals_transformers(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    """Prefill, chunked prefill and 64 decode steps, the longest request beside others that come and go."""
    theirs = build(model_type, **changes)
    stepper = Stepper.of(save(theirs, tmp_path))
    theirs.double()  # the reference is exact, so that its own error is not counted as ours
    prompts = [some_tokens(count, seed).tolist() for seed, count in enumerate((PROMPT, 5, 50, 1))]
    requests = [submission(key, prompt, NEW if key == 0 else 20) for key, prompt in enumerate(prompts)]
    stepper.run(*requests, gap=3)
    logits, tokens = stepper.logits, stepper.tokens
    assert len(tokens[0]) == NEW
    for key, prompt in enumerate(prompts):
        want = logits_of(theirs, torch.tensor(prompt + tokens[key]))[len(prompt) - 1 : -1]
        assert want.std() >= 1
        have = torch.stack(logits[key])
        assert (have - want).abs().max() <= 1e-4 * want.abs().max()
        assert want.argmax(-1).tolist() == tokens[key]  # so greedy text is theirs, token by token
    stepper.run(requests[0], max_step_tokens=9, prefix_cache=False)
    assert stepper.tokens[0] == tokens[0]
    for alone, crowded in zip(stepper.logits[0], logits[0], strict=True):
        assert torch.equal(alone, crowded)


def test_learned_positions_end_with_their_table(tmp_path: Path) -> None:
    """The context is the size of the table, whatever the operator asks for; nobody reads a row past its end."""
    from pellucid_model.errors import ModelError

    save(build("gpt2", n_positions=32), tmp_path)
    with pytest.raises(ModelError, match="--max-context 64: the model was trained with 32 tokens"):
        Stepper.of(tmp_path, max_context=64)
    stepper = Stepper.of(tmp_path)
    assert stepper.loaded.ready.context_length == 32
    assert stepper.loaded.ready.position_scheme == "absolute"
    full = submission(0, some_tokens(31).tolist(), 40, max_length=32)
    stepper.run(full, submission(1, some_tokens(5).tolist(), 20))
    assert (len(stepper.tokens[0]), len(stepper.tokens[1])) == (1, 20)
    edit_config(tmp_path, n_positions=64)
    with pytest.raises(ModelError, match=r"wpe.weight has shape \[32, 60\], but config.json asks for \[64, 60\]"):
        Stepper.of(tmp_path)


def test_large_gains_are_served_in_a_type_that_holds_them(tmp_path: Path) -> None:
    """One gain of 1e5 overflows float16, which is therefore never chosen, and refused on the CPU by name."""
    from pellucid_model.errors import ModelError

    theirs = build("llama")
    with torch.no_grad():
        theirs.model.layers[1].post_attention_layernorm.weight.mul_(1e5)
        theirs.model.layers[1].mlp.down_proj.weight.mul_(1e-8)
    prompt = some_tokens(PROMPT).tolist()
    for dtype in (torch.float32, torch.bfloat16):
        save(theirs.to(dtype), tmp_path)
        stepper = Stepper.of(tmp_path).run(submission(0, prompt, 20))
        exact = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
        want = logits_of(exact, torch.tensor(prompt + stepper.tokens[0]))[PROMPT - 1 : -1]
        assert want.argmax(-1).tolist() == stepper.tokens[0]
        assert all(logits.isfinite().all() for logits in stepper.logits[0])
        with pytest.raises(ModelError, match="--dtype float16 needs a CUDA device"):
            Stepper.of(tmp_path, dtype="float16")
