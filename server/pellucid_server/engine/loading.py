"""From `Configure` to a model that is ready to run: device, dtype, operators, cache size.

Whatever the operator can mend is a ModelError with one line that says what and how.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from pellucid_model.checkpoint_kind import is_saved_weights
from pellucid_model.errors import CheckpointError, ModelError
from pellucid_model.gguf import is_gguf, read_header
from pellucid_model.kernels import Kernels, WeightFormat, accelerate, library, select_kernels, weight_bytes
from pellucid_model.kernels.cache_layout import INT8, MOST_INT8_DIMENSIONS
from pellucid_model.servable import load_servable
from pellucid_model.user_module import one_line
from pellucid_model.weight_files import find_weight_files
from pellucid_server.engine.cache import (
    KVCache,
    LayerShape,
    bytes_per_block,
    default_block_size,
    learn_shapes,
    native_window,
    widest_window,
)
from pellucid_server.engine.company import try_company
from pellucid_server.engine.flash_forward import DecodeShape
from pellucid_server.engine.forward import PlannedForward, choose_forward
from pellucid_server.engine.memory import available_memory
from pellucid_server.engine.messages import Configure, Ready
from pellucid_server.engine.runner import ModelRunner
from pellucid_server.engine.varlen import BLOCK_SIZE as VARLEN_BLOCK_SIZE
from pellucid_server.kv.blocks import BlockPool
from pellucid_server.options import size_text
from pellucid_server.settling import give_back_freed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNKNOWN_CONTEXT = 2048
STEP_TOKENS, MOST_STEP_TOKENS, STEP_WEIGHTS = 512, 2048, 1 << 36
"""Of the largest step where the operator leaves it open: the least, the most, and how many weights they multiply."""
TILES_SPEED = 2
"""So many times as much of a step in bfloat16 with AMX."""
CACHE_SHARE = 0.4
"""Of the free memory, for a cache whose size the operator leaves open."""
GPU_CACHE_SHARE = 0.8
"""The same of a GPU's, which nobody else uses. The rest is for what a step computes and for recorded steps."""


@dataclass(frozen=True)
class Loaded:
    """Everything a step needs, and what to tell the frontend."""

    runner: ModelRunner
    pool: BlockPool
    ready: Ready


def load(configure: Configure) -> Loaded:
    """Load the checkpoint and size the cache. Raises ModelError (ConfigError, CheckpointError)."""
    device = choose_device(configure.device)
    threads = configure.threads or len(os.sched_getaffinity(0))
    library.set_threads(threads)
    _check_weights_fit(Path(configure.checkpoint), device)
    servable = load_servable(Path(configure.checkpoint), configure.module)
    vocab_size = servable.vocab_size
    if configure.tokenizer_size > vocab_size:
        raise CheckpointError(
            f"checkpoint {configure.checkpoint}: its tokenizer has {configure.tokenizer_size} tokens, but the model "
            f"only {vocab_size}; they do not belong together"
        )
    kernels = select_kernels(device)
    # Beside our operators torch does little, and its threads would wait at barriers and keep cores busy meanwhile.
    torch.set_num_threads(1 if kernels.batch_invariant else threads)
    notices = list(servable.notices)
    if 0 < configure.tokenizer_size < vocab_size:
        notices.append(
            f"the model has {vocab_size} token ids, its tokenizer {configure.tokenizer_size}: ids from "
            f"{configure.tokenizer_size} on are never sampled; if the vocabulary was not padded, they do not match"
        )
    dtype = choose_dtype(configure.dtype, servable.dtype, kernels, device, notices)
    format = choose_format(configure.quantize, dtype, kernels)
    parameters = sum(parameter.numel() for parameter in servable.module.parameters())
    place(servable.module, kernels, device, dtype, format)
    context_length = choose_context(configure.max_context, servable.context_length, notices)
    block_size = choose_block_size(configure.kv_block_size, context_length, device)
    shapes = learn_shapes(servable.model, device)
    kv_dtype = choose_kv_dtype(configure.kv_dtype, dtype, kernels, shapes)
    blocks = choose_block_count(configure, shapes, kv_dtype, block_size, context_length, device)
    decoding = DecodeShape(configure.max_running, -(-context_length // block_size), spare_block=blocks)
    spare_blocks = 0 if device.type == "cpu" else 1
    cache = KVCache(shapes, blocks + spare_blocks, block_size, kv_dtype, device)
    forward = choose_forward(
        servable.module,
        servable.model,
        kernels,
        cache,
        device,
        decoding,
        notices,
        vocab_size=vocab_size,
        context_length=context_length,
        graphs=configure.cuda_graphs == "auto",
    )
    runner = ModelRunner(servable.model, kernels, cache, device, forward)
    pool = BlockPool(blocks, block_size)
    in_tiles = kernels.name == "amx" and dtype == torch.bfloat16
    step_tokens = choose_step_tokens(configure, parameters, in_tiles)
    in_plan = isinstance(forward, PlannedForward)
    if servable.custom and kernels.batch_invariant and not in_plan:
        try:
            try_company(runner, pool, vocab_size, context_length, step_tokens)
        except Exception as error:
            raise ModelError(
                f"{configure.module} fails in steps of several sequences, of up to {context_length} tokens each: "
                f"{one_line(error)}; see docs/add-your-model.md"
            ) from error
    ready = Ready(
        vocab_size=vocab_size,
        parameters=parameters,
        context_length=context_length,
        position_scheme=servable.position_scheme,
        native_window=native_window(shapes),
        widest_window=widest_window(shapes),
        kv_block_size=block_size,
        kv_block_count=blocks,
        kv_bytes=blocks * bytes_per_block(shapes, block_size, kv_dtype),
        max_step_tokens=step_tokens,
        weight_bytes=weight_bytes(servable.module),
        device=str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        dtype=describe_dtypes(dtype, format, kv_dtype),
        kernels=kernels.name,
        batch_invariant=in_plan,
        architecture=servable.architecture,
        notices=notices,
    )
    return Loaded(runner, pool, ready)


def choose_device(wanted: str) -> torch.device:
    """ "auto" is the first CUDA device where there is one, else the CPU."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ModelError("--device cuda: torch finds no CUDA device here; use --device cpu or auto")
    return torch.device("cuda" if wanted == "cuda" or (wanted == "auto" and available) else "cpu")


def choose_dtype(
    wanted: str, stored: torch.dtype, kernels: Kernels, device: torch.device, notices: list[str]
) -> torch.dtype:
    """ "auto": bfloat16 where the device multiplies it and the weights are not float16; else float32.

    Accumulation, norms, softmax and logits are float32 always. float16 overflows easily, so it is served only when
    asked for, and only on CUDA.
    """
    if wanted == "float16" and device.type == "cpu":
        raise ModelError("--dtype float16 needs a CUDA device; on the CPU use auto, bfloat16 or float32")
    if wanted != "auto":
        return DTYPES[wanted]
    native = device.type == "cuda" or kernels.name in library.WITH_BFLOAT16
    dtype = torch.bfloat16 if native and stored != torch.float16 else torch.float32
    if dtype.itemsize < stored.itemsize:
        notices.append(
            f"weights stored as {_name(stored)} are served in bfloat16; --dtype float32 serves them in float32"
        )
    return dtype


def choose_format(quantize: str, dtype: torch.dtype, kernels: Kernels) -> WeightFormat:
    """Of the weights in linear layers; `quantize` is "none", "int8" or "int4"."""
    if quantize == "none":
        return "bfloat16" if dtype == torch.bfloat16 else "float32"
    if not kernels.batch_invariant:
        raise ModelError(f"--quantize {quantize} needs the compiled CPU kernels; here torch's operators run: use none")
    return "int8" if quantize == "int8" else "int4"


def choose_kv_dtype(wanted: str, dtype: torch.dtype, kernels: Kernels, shapes: list[LayerShape]) -> torch.dtype:
    """Of the KV cache: the model's, unless the operator wants another one."""
    if wanted == "auto":
        return dtype
    chosen = INT8 if wanted == "int8" else DTYPES[wanted]
    if chosen != dtype and not kernels.batch_invariant:
        raise ModelError(f"--kv-dtype {wanted} needs the compiled CPU kernels; here torch's operators run: use auto")
    widest = max((shape.head_dim for shape in shapes), default=0)
    if chosen == INT8 and widest > MOST_INT8_DIMENSIONS:
        raise ModelError(
            f"--kv-dtype int8: the model has heads of {widest} dimensions; accepted: up to {MOST_INT8_DIMENSIONS}"
        )
    return chosen


def describe_dtypes(dtype: torch.dtype, format: WeightFormat, kv_dtype: torch.dtype) -> str:
    """What is said of a model's numbers, such as "bfloat16" or "int8, bfloat16, KV cache int8"."""
    quantized = [format] if format in ("int8", "int4") else []
    cache = [f"KV cache {'int8' if kv_dtype == INT8 else _name(kv_dtype)}"] if kv_dtype != dtype else []
    return ", ".join([*quantized, _name(dtype), *cache])


def place(module: nn.Module, kernels: Kernels, device: torch.device, dtype: torch.dtype, format: WeightFormat) -> None:
    """Put the model on its device, with our operators where they are the CPU's.

    On the CPU what flows between operators is float32, and `format` is that of the weights in linear layers and
    `dtype` that of embeddings; elsewhere the whole model is cast to `dtype`.
    """
    if not kernels.batch_invariant:
        module.to(device=device, dtype=dtype)
        return
    try:
        accelerate(module, kernels, format, dtype)
    except ValueError as error:
        raise ModelError(f"the weights cannot be served as {format}: {error}; use --quantize none") from None
    module.float()
    give_back_freed()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def choose_context(wanted: int, trained: int | None, notices: list[str]) -> int:
    """The trained context, or less where the operator wants less; what the operator says where nobody else does."""
    if trained is None:
        if not wanted:
            notices.append(f"neither module nor config.json has a context_length: {UNKNOWN_CONTEXT} tokens are assumed")
        return wanted or UNKNOWN_CONTEXT
    if wanted > trained:
        raise ModelError(f"--max-context {wanted}: the model was trained with {trained} tokens; give at most that")
    return wanted or trained


def choose_step_tokens(configure: Configure, parameters: int, in_tiles: bool) -> int:
    """Unset: what a step computes within a fraction of a second, which others wait for: more where that is quick. Each
    part of a prompt reads all weights again, and streams whose prompts are read together end together."""
    speed = TILES_SPEED if in_tiles else 1
    quick = min(speed * STEP_WEIGHTS // max(parameters, 1), MOST_STEP_TOKENS)
    return configure.max_step_tokens or max(speed * STEP_TOKENS, quick, configure.max_running)


def choose_block_size(wanted: int, context_length: int, device: torch.device) -> int:
    """Unset: on CUDA what its attention kernel reads."""
    if wanted < 0 or wanted & (wanted - 1):
        raise ModelError(f"--kv-block-size {wanted}: must be a power of two")
    return wanted or (VARLEN_BLOCK_SIZE if device.type == "cuda" else default_block_size(context_length))


def choose_block_count(
    configure: Configure,
    shapes: list[LayerShape],
    dtype: torch.dtype,
    block_size: int,
    context_length: int,
    device: torch.device,
) -> int:
    """As many blocks as --kv-cache-memory buys; unset: what max_running full contexts take, within the free memory."""
    block_bytes = bytes_per_block(shapes, block_size, dtype)
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else available_memory()
    share = GPU_CACHE_SHARE if on_gpu else CACHE_SHARE
    if configure.kv_cache_memory > free:
        raise ModelError(
            f"--kv-cache-memory {size_text(configure.kv_cache_memory)}: only {size_text(free)} are free "
            "beside the weights; give less"
        )
    wanted = configure.max_running * -(-context_length // block_size)
    blocks = (configure.kv_cache_memory or min(wanted * block_bytes, int(free * share))) // block_bytes
    if blocks < 1:
        memory = configure.kv_cache_memory or free
        raise ModelError(
            f"the KV cache needs {size_text(block_bytes)} for one block of {block_size} tokens, but has "
            f"{size_text(memory)}; raise --kv-cache-memory, or lower --kv-block-size"
        )
    return blocks


def _weight_files(path: Path) -> tuple[Path, ...]:
    return (path,) if is_saved_weights(path) else find_weight_files(path).files


def _check_weights_fit(folder: Path, device: torch.device) -> None:
    """Refuse before loading what cannot fit: the weights as they are read and, beside them, as they will be packed."""
    try:
        stored = (
            read_header(folder).loaded_bytes
            if is_gguf(folder)
            else sum(file.stat().st_size for file in _weight_files(folder))
        )
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {folder}: {Path(error.filename).name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from None
    need, free = 2 * stored, available_memory()
    if device.type == "cpu" and need > free:
        raise ModelError(
            f"checkpoint {folder} takes about {size_text(need)} while it is loaded, but only {size_text(free)} "
            "are free; use a machine or container with more memory"
        )
