"""Writes the benchmark's models in the formats of other engines: `python -m pellucid_benchmark.peer_models PEER`.

All are made from the same folders that Pellucid serves, so that everybody computes the same model.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize

from pellucid_benchmark.engines import PEERS
from pellucid_benchmark.models import BenchmarkModel, find_model
from pellucid_model.weight_files import load_tensors

OUT = PEERS / "models"
_GGUF_TYPES = {"f32": Type.F32, "bf16": Type.BF16, "q8_0": Type.Q8_0, "q4_0": Type.Q4_0}
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main(peer: str) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    for model in (find_model("tiny"), find_model("smollm2")):
        _give_tokenizer(model)
        if peer == "llama-cpp":
            for precision in _GGUF_TYPES:
                _write_gguf(model, precision)
        elif peer == "openvino":
            for weights, options in (("fp32", ()), ("int8", ()), ("int4", ("--group-size", "64", "--sym"))):
                _openvino(model, weights, options)
        elif peer == "ctranslate2":
            for precision in ("float32", "int8"):
                _ctranslate2(model, precision)
        elif peer == "onnxruntime":
            for precision in ("fp32", "int8", "int4"):
                _onnxruntime(model, precision)


def _give_tokenizer(model: BenchmarkModel) -> None:
    """Other engines do not load a model without a tokenizer; the small one gets a part of the other's, never used."""
    if (model.folder / "tokenizer.json").exists():
        return
    source = find_model("smollm2").folder
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    size = json.loads((model.folder / "config.json").read_text())["vocab_size"]
    vocabulary = {text: token for text, token in tokenizer["model"]["vocab"].items() if token < size}
    tokenizer["model"]["vocab"] = vocabulary
    merges = (merge if isinstance(merge, list) else merge.split(" ") for merge in tokenizer["model"]["merges"])
    tokenizer["model"]["merges"] = [
        [left, right] for left, right in merges if {left, right, left + right} <= vocabulary.keys()
    ]
    (model.folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    if (source / "tokenizer_config.json").exists():
        shutil.copy(source / "tokenizer_config.json", model.folder)


def _write_gguf(model: BenchmarkModel, precision: str) -> None:
    path = OUT / f"{model.name}-{precision}.gguf"
    if path.exists():
        return
    config = json.loads((model.folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path.with_suffix(".partial"), "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(_rope_base(config))
    writer.add_rope_dimension_count(config.get("head_dim", config["hidden_size"] // heads))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_vocabulary(writer, model, config["vocab_size"])
    kind = _GGUF_TYPES[precision]
    for theirs, tensor in load_tensors(model.folder).items():
        values: npt.NDArray[np.float32] = tensor.float().numpy()
        name = _gguf_name(theirs)
        if name.endswith("attn_q.weight"):
            values = _interleaved(values, heads)
        if name.endswith("attn_k.weight"):
            values = _interleaved(values, kv_heads)
        stored = kind if values.ndim == 2 else Type.F32
        if stored == Type.Q4_0 and name in ("token_embd.weight", "output.weight"):
            stored = Type.Q8_0  # as llama.cpp's own tool keeps the output layer above 4 bits
        writer.add_tensor(name, quantize(np.ascontiguousarray(values), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".partial").rename(path)


def _rope_base(config: dict[str, Any]) -> float:
    parameters = config.get("rope_parameters") or {}
    return float(config.get("rope_theta") or parameters["rope_theta"])


def _gguf_name(theirs: str) -> str:
    parts = theirs.removesuffix(".weight").split(".")
    if parts[:2] == ["model", "layers"]:
        return f"blk.{parts[2]}.{_GGUF_NAMES['.'.join(parts[3:])]}.weight"
    return f"{_GGUF_NAMES['.'.join(parts)]}.weight"


def _interleaved(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows in the order of GGUF's Llama: the two halves of a head's rotated pairs side by side."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _add_vocabulary(writer: gguf.GGUFWriter, model: BenchmarkModel, size: int) -> None:
    tokenizer = json.loads((model.folder / "tokenizer.json").read_text())
    texts = {token: text for text, token in tokenizer["model"]["vocab"].items()}
    special = {each["id"] for each in tokenizer["added_tokens"]}
    merges = [each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([texts[token] for token in range(size)])
    writer.add_token_types([3 if token in special else 1 for token in range(size)])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _openvino(model: BenchmarkModel, weights: str, options: tuple[str, ...]) -> None:
    out = OUT / f"{model.name}-openvino-{weights}"
    if not out.exists():
        tool = str(PEERS / "openvino" / "bin" / "optimum-cli")
        command = [tool, "export", "openvino", "--model", str(model.folder), "--task", "text-generation-with-past"]
        _run([*command, "--weight-format", weights, *options, str(out)])


def _ctranslate2(model: BenchmarkModel, precision: str) -> None:
    out = OUT / f"{model.name}-ctranslate2-{precision}"
    if not out.exists():
        tool = str(PEERS / "ctranslate2" / "bin" / "ct2-transformers-converter")
        _run([tool, "--model", str(model.folder), "--output_dir", str(out), "--quantization", precision])


def _onnxruntime(model: BenchmarkModel, precision: str) -> None:
    out = OUT / f"{model.name}-onnxruntime-{precision}"
    if not out.exists():
        # -I: a file of the current folder must not stand in for a package of the same name.
        tool = [str(PEERS / "onnxruntime" / "bin" / "python"), "-I", "-m", "onnxruntime_genai.models.builder"]
        # Products of whole numbers, as in the int8 model; else weights of 4 bits would be widened first.
        extra = ("--extra_options", "int4_accuracy_level=4") if precision == "int4" else ()
        with tempfile.TemporaryDirectory() as cache:
            _run([*tool, "-i", str(model.folder), "-o", str(out), "-c", cache, "-p", precision, "-e", "cpu", *extra])


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        last = result.stderr.strip().splitlines()[-1:] or ["no output"]
        print(f"{Path(command[0]).name} failed and its model is left out: {last[0]}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1])
