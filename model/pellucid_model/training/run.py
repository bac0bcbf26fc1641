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
from pellucid_model.training.data import prepare
from pellucid_model.training.errors import TrainingError
from pellucid_model.training.recipe import Recipe
from pellucid_model.training.run_folder import RunFolder
from pellucid_model.training.samples import draw_samples
from pellucid_model.training.trainer import StepResult, Trainer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """All a run depends on besides the code."""

    preset: str
    recipe: Recipe
    corpus: str | None
    """Absolute path of a text file; None: generated."""
    threads: int
    device: str
    """"cpu" or "cuda"."""

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "recipe": self.recipe.to_json()}

    @staticmethod
    def from_json(values: dict[str, Any]) -> RunSettings:
        """Read run.json; what it records for people only is passed over."""
        try:
            chosen = {field.name: values[field.name] for field in dataclasses.fields(RunSettings)}
            return RunSettings(**{**chosen, "recipe": Recipe.from_json(chosen["recipe"])})
        except KeyError as error:
            raise TrainingError(f"run.json: {error.args[0]} is missing") from None


def start_run(path: Path, settings: RunSettings) -> bool:
    """Train from the beginning. True: all steps are done; False: interrupted and saved."""
    corpus = load_corpus(settings.corpus, settings.recipe)
    trainer = _trainer(settings, corpus)
    run = RunFolder.create(path, {**settings.to_json(), **_facts(trainer, corpus)})
    run.save_state(trainer.state())
    print(f"corpus: {corpus.summary()}; vocabulary {trainer.tokenizer.vocab_size:,}")
    return _train(run, trainer)


def resume_run(run: RunFolder, settings: RunSettings) -> bool:
    """Go on from state.pt; the result equals that of a run which was never interrupted."""
    corpus = load_corpus(settings.corpus, settings.recipe)
    if _digest(corpus) != run.settings.get("corpus_sha256"):
        raise TrainingError(f"{run.path} cannot be resumed: the corpus is not the one that the run began with")
    trainer = _trainer(settings, corpus)
    trainer.restore(run.load_state())
    run.drop_records_after(trainer.step)
    print(f"resuming {run.path} after step {trainer.step:,} of {settings.recipe.steps:,}")
    return _train(run, trainer)


def load_corpus(file: str | None, recipe: Recipe) -> CleanedCorpus:
    """The cleaned lines of a file, or generated ones."""
    lines = generate_lines(recipe.generated_lines) if file is None else read_lines(Path(file))
    return clean(lines, recipe.min_line_length, recipe.max_line_length)


def _trainer(settings: RunSettings, corpus: CleanedCorpus) -> Trainer:
    torch.set_num_threads(settings.threads)
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise TrainingError("device = 'cuda': torch finds no CUDA device here; use --device cpu")
    data = prepare(corpus.lines, settings.recipe)
    return Trainer(settings.recipe, data, torch.device(settings.device))


def _facts(trainer: Trainer, corpus: CleanedCorpus) -> dict[str, Any]:
    """What run.json records beside the settings."""
    return {
        "corpus_sha256": _digest(corpus),
        "corpus_summary": corpus.summary(),
        "vocab_size": trainer.tokenizer.vocab_size,
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
        while not trainer.finished and not stop.requested:
            _timed_step(run, trainer, bar)
            if trainer.step % recipe.validation_every == 0 or trainer.finished:
                _validate(run, trainer)
                _save(run, trainer)
            elif stop.requested:
                _save(run, trainer)
    if trainer.finished:
        _print_summary(run, trainer)
    return trainer.finished


def _timed_step(run: RunFolder, trainer: Trainer, bar: tqdm[Any]) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    result = trainer.train_step()
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
    loss = trainer.validation_loss()
    perplexity = float(torch.tensor(loss).exp())
    samples = draw_samples(trainer.model, trainer.tokenizer, trainer.recipe.sample_prompts)
    lines = [line for sample in samples for line in str(sample).splitlines()]
    run.append({"step": trainer.step, "validation_loss": loss, "perplexity": perplexity, "samples": lines})
    heading = f"step {trainer.step:,}: validation loss {loss:.4f}, perplexity {perplexity:.3f}"
    tqdm.write("\n    ".join([heading, *lines]))


def _save(run: RunFolder, trainer: Trainer) -> None:
    dtype = _DTYPES[trainer.recipe.checkpoint_dtype]
    run.save(trainer.model, trainer.tokenizer, dtype, trainer.state())


def _print_summary(run: RunFolder, trainer: Trainer) -> None:
    steps = [record for record in run.records() if "loss" in record]
    last = run.validations()[-1]
    print(
        f"done: {trainer.step:,} steps, {sum(r['tokens'] for r in steps):,} tokens, "
        f"{sum(r['cpu_seconds'] for r in steps):.0f} CPU seconds in steps; "
        f"validation loss {last['validation_loss']:.4f}, perplexity {last['perplexity']:.3f}"
    )
    print(f"serve it with: pellucid serve {run.checkpoint}")


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
