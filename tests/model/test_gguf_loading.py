"""GGUF files as models: every architecture as transformers computes it, every storage type as the format's library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from pellucid_model.attention import ReferenceAttend
from pellucid_model.errors import CheckpointError, ConfigError
from pellucid_model.gguf.loading import load_gguf
from pellucid_model.gguf.types import REFUSED_TYPES, TENSOR_TYPES
from pellucid_model.servable import load_servable
from pellucid_testing.families import build, logits_of, some_tokens
from pellucid_testing.gguf_files import ARCHITECTURES, write_model, write_tensors

LENGTH = 60
SCALED = {"rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32}

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        *({"num_attention_heads": heads, "num_key_value_heads": kv} for heads, kv in ((4, 2), (6, 2), (8, 1), (6, 3))),
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        *({"rope_parameters": SCALED | {"rope_type": kind}} for kind in ("linear", "yarn")),
    ],
    "mistral": [{"sliding_window": None}],
    "qwen2": [{"tie_word_embeddings": True}],
    "gpt_neox": [{"use_parallel_residual": parallel, "rotary_pct": 0.5} for parallel in (True, False)],
    "phi3": [{"sliding_window": 9}],
    "falcon": [{}, {"new_decoder_architecture": True, "num_kv_heads": 2}],
    "stablelm": [{"use_parallel_residual": True}, {"use_qkv_bias": True}],
    "gemma2": [{"query_pre_attn_scalar": 20, "sliding_window": 16}],
}
CASES = [(kind, changes) for kind in ARCHITECTURES for changes in VARIANTS.get(kind, [{}])]


def our_logits(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    model = load_gguf(path).model
    positions = torch.arange(len(tokens))
    with torch.no_grad():
        return model.logits(model(tokens, positions, ReferenceAttend([len(tokens)], positions)))


@pytest.mark.parametrize(("kind", "changes"), CASES, ids=[f"{kind}-{changes}" for kind, changes in CASES])
def test_logits_equal_transformers(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    """B61: rows of q and k in the wrong order, or of the wrong head, give gibberish."""
    theirs = build(kind, **changes)
    path = write_model(tmp_path / "model.gguf", theirs)
    tokens = some_tokens(LENGTH)
    want, have = logits_of(theirs, tokens), our_logits(path, tokens)
    assert want.std() >= 0.5
    assert (have - want).abs().max() <= 1e-4 * want.abs().max()


def test_llama_3_keeps_its_scaling_in_a_tensor(tmp_path: Path) -> None:
    scaling = SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    theirs = build("llama", rope_parameters=scaling)
    scaled = theirs.model.rotary_emb.inv_freq
    plain = 5000.0 ** (-torch.arange(0, 20, 2) / 20)
    factors = (plain / scaled).numpy().astype(np.float32)
    assert factors.max() > 3.9
    path = write_model(tmp_path / "m.gguf", theirs, lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    want, have = logits_of(theirs, some_tokens(LENGTH)), our_logits(path, some_tokens(LENGTH))
    assert (have - want).abs().max() <= 1e-4 * want.abs().max()


# ---- Storage types ----

WIDTH = 256
SHAPE: dict[str, Any] = {
    ".block_count": 1,
    ".context_length": 64,
    ".embedding_length": WIDTH,
    ".feed_forward_length": 512,
    ".attention.head_count": 4,
    ".attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES = {
    "token_embd.weight": (40, WIDTH),
    "output_norm.weight": (WIDTH,),
    "blk.0.attn_norm.weight": (WIDTH,),
    "blk.0.ffn_norm.weight": (WIDTH,),
    **{f"blk.0.attn_{name}.weight": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")},
    "blk.0.ffn_gate.weight": (512, WIDTH),
    "blk.0.ffn_up.weight": (512, WIDTH),
    "blk.0.ffn_down.weight": (WIDTH, 512),
}


def plain_tensors() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def random_blocks(kind: gguf.GGMLQuantizationType, shape: tuple[int, ...]) -> Any:
    """Random bytes, in which every two that may be a float16 scale are a small number."""
    generator = np.random.default_rng(int(kind))
    data = generator.integers(0, 256, gguf.quant_shape_to_byte_shape(shape, kind), dtype=np.uint8)
    data[..., 1::2] &= 0x3B  # below 1.0 whichever half of a float16 it is
    if kind.name == "MXFP4":  # whose scales are powers of two, 127 being 1
        data.reshape(-1, 17)[:, 0] = generator.integers(120, 130, data.size // 17)
    return data


@pytest.mark.parametrize("kind", TENSOR_TYPES.values(), ids=lambda kind: kind.name)
def test_every_storage_type_reads_as_the_format_s_library(tmp_path: Path, kind: Any) -> None:
    number = gguf.GGMLQuantizationType[kind.name]
    assert (kind.block, kind.size) == gguf.GGML_QUANT_SIZES[number]
    tensors = plain_tensors()
    for name in ("blk.0.ffn_down.weight", "token_embd.weight"):
        tensors[name] = random_blocks(number, SHAPES[name])
    path = write_tensors(tmp_path / "model.gguf", tensors, SHAPE, stored=number)
    model = load_gguf(path).model
    by_name = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for ours, theirs in (("blocks.0.feed_forward.down", "blk.0.ffn_down"), ("embedding", "token_embd")):
        stored = by_name[f"{theirs}.weight"]
        want = torch.tensor(dequantize(stored.data, number)).reshape(SHAPES[f"{theirs}.weight"])
        assert want.isfinite().all()
        assert want.unique().numel() > 10
        assert torch.equal(model.get_parameter(f"{ours}.weight").float(), want.float())


def test_the_table_of_types_is_the_format_s() -> None:
    theirs = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    for number, kind in TENSOR_TYPES.items():
        assert theirs[number] == kind.name
    assert all(theirs[number] == name for number, name in REFUSED_TYPES.items() if number in theirs)
    assert {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"} <= {kind.name for kind in TENSOR_TYPES.values()}


def test_large_tensors_are_dequantized_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = gguf.GGMLQuantizationType.Q4_K
    tensors = plain_tensors() | {"blk.0.ffn_down.weight": random_blocks(number, SHAPES["blk.0.ffn_down.weight"])}
    path = write_tensors(tmp_path / "model.gguf", tensors, SHAPE, stored=number)
    whole = load_gguf(path).model.state_dict()
    monkeypatch.setattr("pellucid_model.gguf.loading.SLICE_ELEMENTS", 5 * 512)
    sliced = load_gguf(path).model.state_dict()
    assert all(torch.equal(whole[name], sliced[name]) for name in whole)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.bfloat16)],
)
def test_what_the_matrices_are_stored_in(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    number = gguf.GGMLQuantizationType[kind]
    tensors = {
        name: random_blocks(number, tensor.shape) if tensor.ndim == 2 else tensor
        for name, tensor in plain_tensors().items()
    }
    path = write_tensors(tmp_path / "model.gguf", tensors, SHAPE, stored=number)
    servable = load_servable(path)
    assert (servable.dtype, servable.architecture, servable.vocab_size) == (dtype, "llama", 40)
    assert servable.context_length == 64


# ---- What is refused ----


def refused(path: Path, error: type[Exception] = CheckpointError) -> str:
    with pytest.raises(error) as caught:
        load_gguf(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_tensors_that_are_missing_or_unknown_or_of_another_shape(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tensors = plain_tensors()
    without = {name: tensor for name, tensor in tensors.items() if name != "blk.0.attn_v.weight"}
    assert "tensors are missing: blk.0.attn_v.weight" in refused(write_tensors(path, without, SHAPE))
    extra = tensors | {"blk.0.attn_mystery.weight": tensors["output_norm.weight"]}
    assert "does not have: blk.0.attn_mystery.weight" in refused(write_tensors(path, extra, SHAPE))
    shape = tensors | {"blk.0.ffn_up.weight": tensors["blk.0.ffn_down.weight"]}
    assert "blk.0.ffn_up.weight has shape [256, 512], but the metadata asks for [512, 256]" in refused(
        write_tensors(path, shape, SHAPE)
    )
    nan = tensors | {"blk.0.ffn_up.weight": np.full((512, WIDTH), np.nan, np.float32)}
    assert "blk.0.ffn_up.weight" in refused(write_tensors(path, nan, SHAPE))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({".block_count": None}, "block_count is missing"),
        ({".attention.head_count": 7}, "attention.head_count = 7"),
        ({".attention.head_count_kv": 3}, "attention.head_count_kv = 3"),
        ({".attention.head_count_kv": [4, 2]}, "must be the same in all layers"),
        ({".attention.value_length": 32}, "attention.value_length = 32"),
        ({".rope.dimension_count": 7}, "rotary_fraction"),
        ({".rope.scaling.type": "mystery"}, "rope_type = 'mystery'"),
        ({".expert_count": 8}, "expert_count = 8"),
        ({".block_count": 2**31}, "block_count = 2147483648: must be at most 11"),
        ({".attention.key_length": 2**31}, "attention.key_length = 2147483648: must be at most 512"),
        ({".context_length": 2**32 - 1}, "context_length = 4294967295: must be at most"),
        ({".attention.mystery": 1.5}, "attention.mystery = 1.5"),
    ],
)
def test_metadata_that_is_not_understood_is_refused_by_name(tmp_path: Path, changes: Any, says: str) -> None:
    shape = {key: value for key, value in (SHAPE | changes).items() if value is not None}
    assert says in refused(write_tensors(tmp_path / "m.gguf", plain_tensors(), shape), ConfigError)


def test_architectures_and_types_that_are_not_known(tmp_path: Path) -> None:
    message = refused(write_tensors(tmp_path / "a.gguf", plain_tensors(), {}, architecture="mamba"), ConfigError)
    assert "general.architecture = 'mamba'" in message
    assert "accepted: llama, " in message
    integers = plain_tensors() | {"blk.0.ffn_up.weight": np.zeros((512, WIDTH), np.int8)}
    message = refused(write_tensors(tmp_path / "i.gguf", integers, SHAPE))
    assert "tensor 'blk.0.ffn_up.weight' is stored as I8; accepted: F32, F16" in message


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    assert "one of several parts" in refused(write_tensors(tmp_path / "m.gguf", plain_tensors(), {"split.count": 2}))
