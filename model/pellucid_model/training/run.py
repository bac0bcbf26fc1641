"""A training run from its settings to its folder: the loop, its progress bar, and a clean stop on Ctrl-C.

In: `RunSettings`, or the folder of a run to go on with. Out: the files of run_folder.py, and whether the run is done.
The order of a step: train, log, then, if it is due, validate, log, save; only then is an interruption obeyed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import platform
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tqdm import tqdm

from pellucid_model.training.corpus.cleaning import CleanedCorpus, clean, read_lines
from pellucid_model.training.corpus.generator import generate_lines
from pellucid_model.training.data import Dataset, prepare
from pellucid_model.training.errors import DivergedError, TrainingError
from pellucid_model.training.models import ModelSource
from pellucid_model.training.recipe import PRESETS, SHAPE, Recipe
from pellucid_model.training.run_folder import Record, RunFolder
from pellucid_model.training.samples import TEMPERATURE, TOP_K, draw_samples
from pellucid_model.training.trainer import StepResult, Trainer
from pellucid_model.training.vocabulary import Vocabulary, byte_pairs, characters, of_checkpoint

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_GENERATION = {"do_sample": True, "temperature": TEMPERATURE, "top_k": TOP_K}
"""What requests to the trained model that say nothing else get: varied, and mostly sound."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """All a run depends on besides the code."""

    preset: str
    recipe: Recipe
    model: ModelSource
    corpus: str | None
    """Absolute path of a text file; None: generated."""
    threads: int
    device: str
    """"cpu" or "cuda"."""

    def to_json(self) -> dict[str, Any]:
        recipe = self.recipe.to_json(shape=self.model.is_recipe)
        return {**dataclasses.asdict(self), "recipe": recipe, "model": self.model.to_json()}

    @staticmethod
    def from_json(values: dict[str, Any]) -> RunSettings:
        """Read run.json; what it records for people only is passed over."""
        try:
            chosen = {field.name: values[field.name] for field in dataclasses.fields(RunSettings)}
            model = ModelSource(**chosen["model"])
            shape = {} if model.is_recipe else {name: getattr(PRESETS["demo"], name) for name in SHAPE}
            recipe = Recipe.from_json({**shape, **chosen["recipe"]})
            return RunSettings(**{**chosen, "model": model, "recipe": recipe})
        except KeyError as error:
            raise TrainingError(f"run.json: {error.args[0]} is missing") from None
        except TypeError:
            raise TrainingError("run.json: model is not what this release writes") from None


def start_run(path: Path, settings: RunSettings) -> bool:
    """Train from the beginning. True: the run is done; False: interrupted and saved."""
    corpus = load_corpus(settings.corpus, settings.recipe)
    data = load_data(settings, corpus)
    trainer = _trainer(settings, data)
    run = RunFolder.create(path, {**settings.to_json(), **_facts(trainer, corpus)})
    print(f"corpus: {corpus.summary()}; {data.summary()}")
    run.save_state(trainer.state())
    if settings.model.checkpoint is not None:
        # What the weights can do already. Their checkpoint is also what a resumed run learns the model's shape from.
        _validate(run, trainer)
        _save(run, trainer)
    return _train(run, trainer)


def resume_run(run: RunFolder, settings: RunSettings) -> bool:
    """Go on from state.pt; the result equals that of a run which was never interrupted."""
    if settings.model.checkpoint is not None and (run.checkpoint / "config.json").exists():
        saved = dataclasses.replace(settings.model, checkpoint=str(run.checkpoint))
        settings = dataclasses.replace(settings, model=saved)
    corpus = load_corpus(settings.corpus, settings.recipe)
    _require_same(run, "corpus", _digest(corpus))
    data = load_data(settings, corpus)
    _require_same(run, "tokenizer", data.vocabulary.tokenizer.sha256)
    trainer = _trainer(settings, data)
    trainer.restore(run.load_state())
    run.drop_records_after(trainer.step)
    print(f"resuming {run.path} after step {trainer.step:,} of {settings.recipe.steps:,}")
    return _train(run, trainer)


def _require_same(run: RunFolder, what: str, digest: str) -> None:
    if digest != run.settings.get(f"{what}_sha256"):
        raise TrainingError(f"{run.path} cannot be resumed: the {what} is not the one that the run began with")


def load_corpus(file: str | None, recipe: Recipe) -> CleanedCorpus:
    """The cleaned lines of a file, or generated ones."""
    lines = generate_lines(recipe.generated_lines) if file is None else read_lines(Path(file))
    return clean(lines, recipe.min_line_length, recipe.max_line_length)


def load_data(settings: RunSettings, corpus: CleanedCorpus) -> Dataset:
    """The corpus as the run reads it: split, and in tokens."""
    recipe = settings.recipe

    def vocabulary_of(lines: list[str]) -> Vocabulary:
        if recipe.vocabulary == "characters":
            return characters(lines, _GENERATION)
        if recipe.vocabulary == "bpe":
            return byte_pairs(lines, recipe.bpe_vocab_size, _GENERATION)
        if settings.model.checkpoint is None:
            raise TrainingError("vocabulary = 'checkpoint': needs --from, the checkpoint whose tokenizer it is")
        return of_checkpoint(Path(settings.model.checkpoint))

    return prepare(corpus.lines, recipe, vocabulary_of)


def _trainer(settings: RunSettings, data: Dataset) -> Trainer:
    torch.set_num_threads(settings.threads)
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise TrainingError("device = 'cuda': torch finds no CUDA device here; use --device cpu")
    return Trainer(settings.recipe, data, torch.device(settings.device), settings.model)


def _facts(trainer: Trainer, corpus: CleanedCorpus) -> dict[str, Any]:
    """What run.json records beside the settings."""
    return {
        "corpus_sha256": _digest(corpus),
        "corpus_summary": corpus.summary(),
        "tokenizer_sha256": trainer.vocabulary.tokenizer.sha256,
        "vocab_size": trainer.trainable.vocab_size,
        "parameters": trainer.parameters,
        "versions": {
            "pellucid": _pellucid_version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": f"{platform.system()} {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        },
    }


def _digest(corpus: CleanedCorpus) -> str:
    return hashlib.sha256("\n".join(corpus.lines).encode()).hexdigest()


def _pellucid_version() -> str:
    try:
        return importlib.metadata.version("pellucid")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _train(run: RunFolder, trainer: Trainer) -> bool:
    recipe = trainer.recipe
    # disable=None: no bar where standard error is not a terminal.
    bar = tqdm(total=recipe.steps, initial=trainer.step, unit="step", disable=None, dynamic_ncols=True)
    with StopRequest() as stop, bar:
        done = _is_done(run, trainer)
        while not done and not stop.requested:
            _timed_step(run, trainer, bar)
            if trainer.step % recipe.validation_every == 0 or trainer.finished:
                _validate(run, trainer)
                _save(run, trainer)
                done = _is_done(run, trainer)
            elif stop.requested:
                _save(run, trainer)
    if done:
        _print_summary(run, trainer)
    return done


def _is_done(run: RunFolder, trainer: Trainer) -> bool:
    """All steps are trained, or the held-out lines have gained nothing for too long."""
    patience = trainer.recipe.patience
    return trainer.finished or (patience > 0 and _since_best(run.validations()) >= patience)


def _since_best(validations: list[Record]) -> int:
    """Validations after the one with the lowest loss; of equal ones the first counts."""
    losses = [record["validation_loss"] for record in validations]
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0


def _timed_step(run: RunFolder, trainer: Trainer, bar: tqdm[Any]) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        result = trainer.train_step()
    except DivergedError as error:
        run.append({"step": trainer.step + 1, "diverged": str(error)})
        raise
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    run.append({**dataclasses.asdict(result), "seconds": round(seconds, 6), "cpu_seconds": round(cpu_seconds, 6)})
    bar.set_postfix_str(_postfix(result, seconds), refresh=False)
    bar.update()


def _postfix(result: StepResult, seconds: float) -> str:
    return (
        f"loss {result.loss:.3f}, rate {result.learning_rate:.2e}, gradient {result.gradient_norm:.2f}, "
        f"{result.tokens / seconds:,.0f} tokens/s"
    )


def _validate(run: RunFolder, trainer: Trainer) -> None:
    validation = trainer.validate()
    recipe = trainer.recipe
    samples = draw_samples(trainer.model, trainer.vocabulary, recipe.sample_prompts, recipe.context_length)
    lines = [line for sample in samples for line in str(sample).splitlines()]
    run.append({"step": trainer.step, **dataclasses.asdict(validation), "samples": lines})
    heading = (
        f"step {trainer.step:,}: validation loss {validation.validation_loss:.4f}, "
        f"perplexity {validation.perplexity:.3f}"
    )
    tqdm.write("\n    ".join([heading, *lines]))


def _save(run: RunFolder, trainer: Trainer) -> None:
    """The checkpoint holds the newest weights; where the run may stop early, the best ones that were validated."""
    validations = run.validations()
    newest_is_best = bool(validations) and validations[-1]["step"] == trainer.step and not _since_best(validations)
    if trainer.recipe.patience == 0 or newest_is_best or not (run.checkpoint / "config.json").exists():
        run.save_checkpoint(trainer.trainable, trainer.vocabulary, _DTYPES[trainer.recipe.checkpoint_dtype])
    run.save_state(trainer.state())
    run.save_views()


def _print_summary(run: RunFolder, trainer: Trainer) -> None:
    steps = [record for record in run.records() if "loss" in record]
    validations = run.validations()
    kept = min(validations, key=lambda r: float(r["validation_loss"])) if trainer.recipe.patience else validations[-1]
    early = "" if trainer.finished else f" (stopped early: best after step {kept['step']:,})"
    print(
        f"done: {trainer.step:,} steps{early}, {sum(r['tokens'] for r in steps):,} tokens, "
        f"{sum(r['cpu_seconds'] for r in steps):.0f} CPU seconds in steps; "
        f"validation loss {kept['validation_loss']:.4f}, perplexity {kept['perplexity']:.3f}"
    )
    module = run.settings["model"]["module"]
    print(f"serve it with: pellucid serve {module + ' ' if module else ''}{run.checkpoint}")


class StopRequest:
    """Turns the first Ctrl-C into a wish that the loop fulfils between steps; a second one interrupts at once."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> StopRequest:
        self._previous = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _request(self, _signal: int, _frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        tqdm.write("stopping after this step; press Ctrl-C again to stop at once without saving")
