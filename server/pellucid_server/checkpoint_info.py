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

from pellucid_server.errors import StartError
from pellucid_server.options import Option
from pellucid_server.settings import MIN_P, TEMPERATURE, TOP_K, TOP_P, Settings

BUNDLED_NAME = "demo"
_WANTED = "name a folder with config.json and model.safetensors"

_OPTIONS: dict[str, Option] = {"temperature": TEMPERATURE, "top_k": TOP_K, "top_p": TOP_P, "min_p": MIN_P}
# Fields that would change the output, with the values under which they do nothing.
_NOT_APPLIED: dict[str, tuple[object, ...]] = {
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "typical_p": (1.0,),
    "num_beams": (1,),
    "no_repeat_ngram_size": (0,),
    "bad_words_ids": (),
    "suppress_tokens": ([],),
    "forced_eos_token_id": (),
    "min_new_tokens": (0,),
}


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling values of one source; None where it says nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint as the frontend sees it."""

    folder: Path
    name: str
    eos_ids: tuple[int, ...]
    """Union of config.json and generation_config.json, ascending; the tokenizer's own are added by the frontend."""
    sampling: SamplingDefaults
    notices: tuple[str, ...] = ()


def read_checkpoint_info(settings: Settings) -> CheckpointInfo:
    """Reads the folder that the settings name. Raises StartError where it, or a JSON file in it, is not usable."""
    folder = checkpoint_folder(settings.checkpoint)
    config = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    eos_ids = set(_eos_ids(folder / "config.json", config))
    eos_ids.update(_eos_ids(folder / "generation_config.json", generation))
    return CheckpointInfo(
        folder=folder,
        name=settings.model_name or (folder.resolve().name if settings.checkpoint else BUNDLED_NAME),
        eos_ids=tuple(sorted(eos_ids)),
        sampling=_sampling_defaults(generation),
        notices=tuple(
            f"generation_config.json: {key} = {generation[key]!r} is not applied; this server does not support it yet"
            for key, neutral in _NOT_APPLIED.items()
            if generation.get(key) is not None and generation[key] not in neutral
        ),
    )


def checkpoint_folder(given: str | None) -> Path:
    """The folder to serve; None: the one bundled with the model package, found without importing anything."""
    if given is None:
        spec = importlib.util.find_spec("pellucid_model")
        folder = Path(spec.origin).parent / "demo" if spec is not None and spec.origin else Path("demo")
        if not (folder / "config.json").is_file():
            raise StartError("the bundled checkpoint is missing from this installation; name a checkpoint folder")
        return folder
    folder = Path(given).expanduser()
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise StartError(f"checkpoint {folder} {what}; name a folder with config.json and model.safetensors")
    if not (folder / "config.json").is_file():
        raise StartError(
            f"checkpoint {folder} has no config.json; name a folder with config.json and model.safetensors"
        )
    return folder


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
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
    for key, option in _OPTIONS.items():
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
