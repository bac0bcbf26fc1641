"""What the frontend needs to know of a checkpoint folder, read from its JSON files without torch.

In comes a folder; out come the ids that end a sequence and the sampling defaults of generation_config.json, and notices
of what was found there and is not applied. The engine checks and loads the weights.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid_model.checkpoint_kind import companions, is_saved_weights
from pellucid_model.errors import CheckpointError
from pellucid_model.gguf import is_gguf, read_header
from pellucid_model.tokenizers import TokenizerError
from pellucid_model.tokenizers.from_gguf import gguf_end_ids, gguf_tokenizer_notice
from pellucid_server.errors import StartError
from pellucid_server.ranges import SAMPLING
from pellucid_server.settings import Settings

BUNDLED_NAME = "demo"
_WANTED = "name a folder with config.json and model.safetensors, or a file: .gguf, .pt, .pth, .bin, .ckpt, .safetensors"

# Fields that would change the output, with the values under which they do nothing.
_NOT_APPLIED: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "min_new_tokens": (0,),
}


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling values of one source; None where it says nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint as the frontend sees it."""

    folder: Path
    name: str
    eos_ids: tuple[int, ...]
    """Union of config.json and generation_config.json, ascending; the tokenizer's own are added by the frontend."""
    sampling: SamplingDefaults
    notices: tuple[str, ...] = ()

    @property
    def files(self) -> Path:
        """Where its tokenizer and templates are."""
        return companions(self.folder)


def read_checkpoint_info(settings: Settings) -> CheckpointInfo:
    """Reads the folder or GGUF file that the settings name. Raises StartError where it is not usable."""
    folder = checkpoint_folder(settings.checkpoint)
    if is_gguf(folder):
        return _read_gguf_info(folder, settings)
    config_file, generation_file = (companions(folder) / name for name in ("config.json", "generation_config.json"))
    config, generation = (_read_json(file) if file.exists() else {} for file in (config_file, generation_file))
    eos_ids = {*_eos_ids(config_file, config), *_eos_ids(generation_file, generation)}
    return CheckpointInfo(
        folder=folder,
        name=settings.model_name or (_name(folder) if settings.checkpoint else BUNDLED_NAME),
        eos_ids=tuple(sorted(eos_ids)),
        sampling=_sampling_defaults(generation),
        notices=tuple(
            f"generation_config.json: {key} = {generation[key]!r} is not applied; this server does not support it yet"
            for key, neutral in _NOT_APPLIED.items()
            if generation.get(key) is not None and generation[key] not in neutral
        ),
    )


def _name(checkpoint: Path) -> str:
    return checkpoint.stem if is_saved_weights(checkpoint) else checkpoint.resolve().name


def _read_gguf_info(path: Path, settings: Settings) -> CheckpointInfo:
    try:
        metadata = read_header(path).metadata
        notice = gguf_tokenizer_notice(metadata)
        eos_ids = gguf_end_ids(metadata)
    except CheckpointError as error:
        raise StartError(str(error)) from None
    except TokenizerError as error:
        raise StartError(f"{path}: {error}") from None
    return CheckpointInfo(
        folder=path,
        name=settings.model_name or path.stem,
        eos_ids=eos_ids,
        sampling=SamplingDefaults(),
        notices=() if notice is None else (notice,),
    )


def checkpoint_folder(given: str | None) -> Path:
    """The folder or file to serve; None: the one bundled with the model package, found without importing anything."""
    if given is None:
        spec = importlib.util.find_spec("pellucid_model")
        folder = Path(spec.origin).parent / "demo" if spec is not None and spec.origin else Path("demo")
        if not (folder / "config.json").is_file():
            raise StartError("the bundled checkpoint is missing from this installation; name a checkpoint folder")
        return folder
    folder = Path(given).expanduser()
    if is_gguf(folder) or (is_saved_weights(folder) and folder.is_file()):
        return folder
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise StartError(f"checkpoint {folder} {what}; {_WANTED}")
    if not (folder / "config.json").is_file():
        inside = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f"name the file {folder / inside[0]}" if inside else _WANTED
        raise StartError(f"checkpoint {folder} has no config.json; {hint}")
    return folder


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise StartError(f"{path} is not valid JSON: {error}; the checkpoint is damaged") from None
    if not isinstance(content, dict):
        raise StartError(f"{path} holds no JSON object; the checkpoint is damaged")
    return content


def _eos_ids(path: Path, config: dict[str, Any]) -> list[int]:
    given = config.get("eos_token_id")
    ids = [] if given is None else given if isinstance(given, list) else [given]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not token_id >= 0:
            raise StartError(f"{path}: eos_token_id = {given!r}; accepted: a token id or a list of them")
    return ids


def _sampling_defaults(generation: dict[str, Any]) -> SamplingDefaults:
    values: dict[str, Any] = {}
    for key, option in SAMPLING.items():
        if generation.get(key) is None:
            continue
        try:
            values[key] = option.parse(generation[key])
        except ValueError:
            raise StartError(
                f"generation_config.json: {key} = {generation[key]!r} is not accepted; accepted: {option.accepts}"
            ) from None
    if generation.get("do_sample") is False:
        values["temperature"] = 0.0
    return SamplingDefaults(**values)
