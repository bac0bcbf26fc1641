"""`pellucid train`, `pellucid train compare` and `pellucid train corpus`.

In: arguments. Out: an exit code: 0 done, 1 the run failed, 2 the arguments cannot be used, 130 interrupted. An error is
one line on standard error. torch is imported only once the arguments are understood.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from pellucid_model.errors import ModelError
from pellucid_model.one_line_parser import OneLineParser
from pellucid_model.training.corpus.cleaning import clean
from pellucid_model.training.corpus.generator import DEFAULT_LINES, DEFAULT_SEED, generate_lines
from pellucid_model.training.errors import DivergedError, TrainingError
from pellucid_model.training.recipe import PRESETS, SHAPE, Recipe

if TYPE_CHECKING:
    from pellucid_model.training.models import ModelSource
    from pellucid_model.training.run import RunSettings

_GENERATED = "generated"
_NEEDED = ("torch", "safetensors", "tqdm", "matplotlib")


def train_command(argv: list[str]) -> int:
    """The entry point; argv without the words `pellucid train`."""
    try:
        match argv[:1]:
            case ["compare"]:
                return _compare(argv[1:])
            case ["corpus"]:
                return _corpus(argv[1:])
            case _:
                return _train(argv)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except ModelError as error:
        return _fail(str(error), code=2)
    except OSError as error:
        return _fail(f"{error.filename or 'files'}: {error.strerror}", code=1)
    except KeyboardInterrupt:
        return _fail("interrupted", code=130)


def _fail(message: str, code: int) -> int:
    print(f"pellucid train: {message}", file=sys.stderr)
    return code


def _train(argv: list[str]) -> int:
    arguments = _train_parser().parse_args(argv)
    given = vars(arguments)
    overrides = {f.name: given[f.name] for f in dataclasses.fields(Recipe) if f.name in given}
    if "sample_prompts" in overrides:
        overrides["sample_prompts"] = tuple(overrides["sample_prompts"])
    if arguments.resume:
        return _resume(arguments, overrides)
    require_packages(*_NEEDED)
    from pellucid_model.training.run import RunSettings, start_run

    source = _source(arguments)
    preset = arguments.preset or ("fine-tune" if source.checkpoint else None)
    if preset is None:
        raise TrainingError(f"--preset is needed: {', '.join(PRESETS)}")
    settings = RunSettings(
        preset=preset,
        recipe=_recipe(PRESETS[preset], overrides, source),
        model=source,
        corpus=_corpus_path(arguments.corpus or _GENERATED),
        threads=arguments.threads or 1,
        device=_device(arguments.device or "auto"),
    )
    path = Path(arguments.out or f"runs/{preset}-{time.strftime('%Y%m%d-%H%M%S')}")
    return _finish(path, lambda: start_run(path, settings))


def _source(arguments: argparse.Namespace) -> ModelSource:
    """Where the model comes from, with absolute paths, so that the run can be resumed from anywhere."""
    from pellucid_model.training.models import ModelSource
    from pellucid_model.weight_files import read_json

    module, config = arguments.module, arguments.config
    if config is not None and (module is None or arguments.checkpoint is not None):
        raise TrainingError("--config is what a --module without --from is built from")
    if module is not None:
        file, _, name = module.rpartition(":")
        module = f"{os.path.abspath(file)}:{name}"
    return ModelSource(
        checkpoint=None if arguments.checkpoint is None else os.path.abspath(arguments.checkpoint),
        module=module,
        config=None if config is None else read_json(Path(config)),
    )


def _recipe(preset: Recipe, overrides: dict[str, Any], source: ModelSource) -> Recipe:
    """The preset with what was asked for; a model that is not the recipe's own decides its shape, and its tokens."""
    if source.is_recipe:
        return dataclasses.replace(preset, **overrides)
    if given := sorted(SHAPE & set(overrides)):
        decides = "the checkpoint of --from" if source.checkpoint else "--config, of which --module is built,"
        raise TrainingError(f"--{given[0].replace('_', '-')}: {decides} decides that")
    known: dict[str, Any] = {}
    if source.checkpoint is not None:
        from pellucid_model.servable import load_servable

        context = load_servable(Path(source.checkpoint), source.module or "").context_length
        known = {"vocabulary": "checkpoint", "context_length": min(preset.context_length, context or 2**31)}
    return dataclasses.replace(preset, **(known | overrides))


def _resume(arguments: argparse.Namespace, overrides: dict[str, Any]) -> int:
    if arguments.out is None:
        raise TrainingError("--resume needs --out, the folder of the run to go on with")
    require_packages(*_NEEDED)
    from pellucid_model.training.run import RunSettings, resume_run
    from pellucid_model.training.run_folder import RunFolder

    path = Path(arguments.out)
    run = RunFolder.open(path)
    settings = RunSettings.from_json(run.settings)
    _refuse_changes(arguments, overrides, settings)
    return _finish(path, lambda: resume_run(run, settings))


def _finish(path: Path, work: Callable[[], bool]) -> int:
    """Run the work and say how it ended."""
    try:
        done = work()
    except DivergedError as error:
        saved = path / "checkpoint"
        kept = f"; the last good checkpoint is kept in {saved}" if (saved / "config.json").exists() else ""
        return _fail(f"{error}{kept}", code=1)
    except KeyboardInterrupt:
        return _fail(f"interrupted without saving; go on from the last save with --resume --out {path}", code=130)
    if not done:
        return _fail(f"interrupted and saved; go on with: pellucid train --resume --out {path}", code=130)
    return 0


def _refuse_changes(arguments: argparse.Namespace, overrides: dict[str, Any], settings: RunSettings) -> None:
    """A resumed run keeps its settings; options may repeat them but not change them."""
    asked: dict[str, tuple[Any, Any]] = {
        name: (value, getattr(settings.recipe, name)) for name, value in overrides.items()
    }
    source = _source(arguments)
    asked["preset"] = (arguments.preset, settings.preset)
    asked["from"] = (source.checkpoint, settings.model.checkpoint)
    asked["module"] = (source.module, settings.model.module)
    asked["config"] = (source.config, settings.model.config)
    asked["threads"] = (arguments.threads, settings.threads)
    if arguments.corpus is not None:
        asked["corpus"] = (_corpus_path(arguments.corpus) or _GENERATED, settings.corpus or _GENERATED)
    if arguments.device is not None:
        asked["device"] = (_device(arguments.device), settings.device)
    for name, (now, before) in asked.items():
        if now is not None and now != before:
            raise TrainingError(f"{name} = {now!r}: the run to resume was begun with {before!r}, which cannot change")


def _corpus_path(value: str) -> str | None:
    return None if value == _GENERATED else os.path.abspath(value)


def _device(value: str) -> str:
    if value != "auto":
        return value
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def require_packages(*names: str) -> None:
    """Raise TrainingError where one of these modules cannot be imported."""
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            raise TrainingError(f"{name} is not installed; install 'pellucid[train]'") from None


def _compare(argv: list[str]) -> int:
    parser = OneLineParser(prog="pellucid train compare", description="Print the settings in which two runs differ.")
    parser.add_argument("run_a", metavar="RUN_A", type=Path, help="folder of a run")
    parser.add_argument("run_b", metavar="RUN_B", type=Path, help="folder of another run")
    arguments = parser.parse_args(argv)
    require_packages(*_NEEDED)
    from pellucid_model.training.compare import compare_runs
    from pellucid_model.training.run_folder import RunFolder

    print(compare_runs(RunFolder.open(arguments.run_a), RunFolder.open(arguments.run_b)))
    return 0


def _corpus(argv: list[str]) -> int:
    parser = OneLineParser(
        prog="pellucid train corpus", description="Write the generated corpus, cleaned, one line a line."
    )
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="text file to write, UTF-8")
    parser.add_argument("--lines", type=int, default=DEFAULT_LINES, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="of the generator (default: %(default)s)")
    arguments = parser.parse_args(argv)
    recipe = PRESETS["demo"]
    lines = generate_lines(arguments.lines, arguments.seed)
    corpus = clean(lines, recipe.min_line_length, recipe.max_line_length)
    arguments.out.write_text("".join(f"{line}\n" for line in corpus.lines), encoding="utf-8", newline="\n")
    print(f"{arguments.out}: {corpus.summary()}")
    return 0


def _train_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="pellucid train",
        description="Train a decoder on short lines of text. Also: pellucid train compare RUN_A RUN_B, "
        "pellucid train corpus --out FILE.",
        allow_abbrev=False,
    )
    parser.add_argument("--preset", choices=list(PRESETS), help="where the settings below have their defaults")
    parser.add_argument(
        "--from", dest="checkpoint", metavar="CHECKPOINT", help="fine-tune these weights, with their own tokenizer"
    )
    parser.add_argument("--module", metavar="FILE.py:CLASS", help="train a module of your own; the file is executed")
    parser.add_argument("--config", metavar="FILE", help="JSON object that a --module without --from is built from")
    parser.add_argument("--out", metavar="FOLDER", help="of the run (default: runs/PRESET-TIME)")
    parser.add_argument("--corpus", metavar="FILE", help="UTF-8 text, one line a line, or 'generated' (default)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out, with its own settings")
    parser.add_argument("--threads", type=at_least_one, metavar="N", help="CPU threads (default: 1)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="default: auto")
    settings = parser.add_argument_group("settings of the preset that can be changed")
    hints = get_type_hints(Recipe)
    for name, description in Recipe.descriptions().items():
        defaults = ", ".join(f"{preset}: {_shown(getattr(recipe, name))}" for preset, recipe in PRESETS.items())
        settings.add_argument(
            f"--{name.replace('_', '-')}",
            default=argparse.SUPPRESS,
            help=f"{description} ({defaults})",
            **_option(hints[name]),
        )
    return parser


def _option(hint: Any) -> dict[str, Any]:
    """How argparse reads a field of this type."""
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if hint is int:
        return {"type": int, "metavar": "N"}
    if hint is float:
        return {"type": float, "metavar": "X"}
    choices = [choice for choice in get_args(hint) if isinstance(choice, str)]
    return {"choices": choices} if choices else {"nargs": "*", "metavar": "TEXT"}


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(repr(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value
