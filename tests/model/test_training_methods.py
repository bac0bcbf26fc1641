"""What a training run can be told about its tokens, its memory, its weights and its end."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from pellucid_model.checkpoint import load_checkpoint
from pellucid_model.servable import load_servable
from pellucid_model.tokenizers import load_tokenizer
from pellucid_model.training.cli import train_command
from pellucid_model.training.corpus.generator import generate_lines
from pellucid_model.training.data import Dataset, prepare
from pellucid_model.training.errors import TrainingError
from pellucid_model.training.models import ModelSource
from pellucid_model.training.recipe import DEMO, FINE_TUNE, STUDY_NOTE, Recipe
from pellucid_model.training.run_folder import RunFolder
from pellucid_model.training.trainer import Trainer
from pellucid_model.training.vocabulary import byte_pairs, characters, of_checkpoint
from pellucid_testing.custom_model import CONFIG, EXAMPLE

LINES = generate_lines(900)
TINY = """
    --context-length 32 --generated-lines 900 --min-line-length 1 --validation-lines 20 --rows 4 --device cpu
    --warmup 2 --sample-prompts 今天
"""
SHAPE = "--d-model 16 --layers 2 --heads 2 --kv-heads 1 --head-dim 8 --d-ff 24"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(recipe: Recipe, **changes: Any) -> Recipe:
    shape = {"d_model": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "d_ff": 24, "dropout": 0.0}
    short = {"context_length": 32, "max_line_length": 30, "validation_lines": 5, "rows": 4, "warmup": 0}
    return dataclasses.replace(recipe, **{**shape, **short, **changes})


def data_for(recipe: Recipe) -> Dataset:
    return prepare([line for line in LINES if len(line) <= 30], recipe, lambda lines: characters(lines, {}))


def trainer(recipe: Recipe) -> Trainer:
    return Trainer(recipe, data_for(recipe), torch.device("cpu"), ModelSource())


def gradients(recipe: Recipe) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients, as left behind by one step."""
    made = trainer(recipe)
    loss = made.train_step().loss
    return loss, {name: p.grad.clone() for name, p in made.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recipe", [STUDY_NOTE, DEMO], ids=["padded", "packed"])
def test_accumulation_gives_the_gradient_of_the_whole_batch(recipe: Recipe) -> None:
    """Padded rows have different numbers of tokens, so that the mean of the parts' means would be another one."""
    whole_loss, whole = gradients(tiny(recipe))
    for parts in (2, 4):
        loss, accumulated = gradients(tiny(recipe, micro_batches=parts))
        assert loss == pytest.approx(whole_loss, rel=1e-6)
        assert accumulated.keys() == whole.keys()
        for name, gradient in whole.items():
            torch.testing.assert_close(accumulated[name], gradient, rtol=1e-4, atol=1e-7)


def test_checkpointed_blocks_give_the_same_gradient_and_are_computed_again() -> None:
    plain = gradients(tiny(DEMO))
    made = trainer(tiny(DEMO, gradient_checkpointing=True))
    calls = []
    made.model.blocks[0].norm1.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[index, union-attr]
    assert made.train_step().loss == plain[0]
    assert len(calls) == 2  # once in the backward pass
    for name, parameter in made.model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, plain[1][name])


def test_dropout_is_the_same_when_a_block_is_computed_again() -> None:
    dropping = {"dropout": 0.3}
    plain, again = (gradients(tiny(STUDY_NOTE, gradient_checkpointing=on, **dropping)) for on in (False, True))
    assert plain[0] == again[0]
    assert all(torch.equal(gradient, again[1][name]) for name, gradient in plain[1].items())


def test_autocast_multiplies_in_bfloat16_and_keeps_weights_in_float32() -> None:
    made = trainer(tiny(DEMO, precision="bfloat16"))
    types = set()
    made.model.blocks[0].feed_forward.down.register_forward_hook(  # type: ignore[index, union-attr]
        lambda _module, _inputs, output: types.add(output.dtype)
    )
    exact = trainer(tiny(DEMO))
    losses = [(made.train_step().loss, exact.train_step().loss) for _ in range(5)]
    assert types == {torch.bfloat16}
    assert all(a == pytest.approx(b, rel=0.02) for a, b in losses)
    assert any(a != b for a, b in losses)
    assert {p.dtype for p in made.model.parameters()} == {torch.float32}
    made.validate()
    assert types == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize(("decayed", "embedding_shrinks"), [("matrices", True), ("linears", False)])
def test_decay_spares_norms_and_biases_and_embeddings_by_choice(decayed: str, embedding_shrinks: bool) -> None:
    """A rate of 1 and a decay of 0.5, with gradients of 0: what is decayed is halved."""
    recipe = tiny(STUDY_NOTE, weight_decay=0.5, weight_decay_on=decayed, learning_rate=1.0, biases=True)
    made = trainer(recipe)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    made._optimizer.step()
    values = {name: parameter.mean().item() for name, parameter in made.model.named_parameters()}
    assert values["embedding.weight"] == (0.5 if embedding_shrinks else 1.0)
    for name, value in values.items():
        if name != "embedding.weight":
            spared = "norm" in name or name.endswith("bias")
            assert value == (1.0 if spared else 0.5), name


def test_byte_pairs_learn_pieces_and_lose_no_text() -> None:
    vocabulary = byte_pairs(LINES, 600, {"do_sample": True})
    assert vocabulary.size == 600
    line = LINES[0]
    ids = vocabulary.encode_line(line)
    assert (ids[0], ids[-1]) == (1, 2)
    assert len(ids) < 2 + len(line.encode()) / 2
    for text in (line, "龘 unseen \U0001f600 \u00e9 <bos>"):
        assert vocabulary.tokenizer.decode(vocabulary.encode_line(text)) == text
    assert 1 not in vocabulary.encode_line("<bos>")[1:-1]
    assert byte_pairs(LINES, 600, {"do_sample": True}).files == vocabulary.files
    assert json.loads(vocabulary.files["generation_config.json"])["eos_token_id"] == [2]


def test_lines_that_no_row_holds_are_left_out_and_counted() -> None:
    recipe = tiny(DEMO, vocabulary="bpe", max_line_length=400)
    lines = [*LINES[:300], "x1y2z3" * 30]
    data = prepare(lines, recipe, lambda some: byte_pairs(some, 1000, {}))
    assert all(len(ids) <= recipe.context_length + 1 for ids in [*data.train, *data.validation])
    assert data.dropped == 301 - len(data.train) - len(data.validation) > 0
    assert f"{data.dropped} lines left out" in data.summary()


def test_characters_that_a_checkpoint_does_not_know_are_counted() -> None:
    known = characters(["天地玄黄"], {})
    data = prepare(["天地", "玄鸟", "鸟鸟黄", "黄", "地"], tiny(DEMO, rows=1, validation_lines=1), lambda _: known)
    unknown = sum(line.count(3) for line in data.train)
    assert unknown > 0
    assert f"{unknown} of them unknown to the vocabulary" in data.summary()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on byte pairs, with every way to save memory."""
    path = tmp_path_factory.mktemp("runs") / "base"
    savings = "--micro-batches 2 --gradient-checkpointing --precision bfloat16"
    options = f"--preset demo {TINY} {SHAPE} --vocabulary bpe --bpe-vocab-size 500 --max-line-length 60 {savings}"
    assert train_command(f"{options} --steps 12 --validation-every 6 --out {path}".split()) == 0
    return path


def test_a_run_on_byte_pairs_leaves_a_checkpoint_with_its_tokenizer(base: Path) -> None:
    checkpoint, tokenizer = load_checkpoint(base / "checkpoint"), load_tokenizer(base / "checkpoint")
    assert tokenizer is not None
    assert checkpoint.config.vocab_size == tokenizer.vocab_size == 500
    assert tokenizer.encode("今天")[0] == tokenizer.bos_id == 1
    (validation, _) = RunFolder.open(base).validations()
    assert validation["perplexity"] == pytest.approx(2.718281828 ** validation["validation_loss"], rel=1e-4)
    assert 0 < validation["loss_per_character"] != validation["validation_loss"]


FINE = f"{TINY} --learning-rate 0.01 --validation-every 3 --steps 9"


def test_fine_tuning_goes_on_from_the_weights_and_keeps_the_tokenizer(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "fine"
    assert train_command(["--from", str(base / "checkpoint"), *FINE.split(), "--out", str(path)]) == 0
    run = RunFolder.open(path)
    assert run.settings["preset"] == "fine-tune"
    assert "d_model" not in run.settings["recipe"]
    losses = [record["validation_loss"] for record in run.validations()]
    assert [record["step"] for record in run.validations()] == [0, 3, 6, 9]
    reference = RunFolder.open(base).validations()[-1]["validation_loss"]
    assert losses[0] == pytest.approx(reference, rel=0.05)  # not the same held-out lines
    assert losses[-1] < losses[0]
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (path / "checkpoint" / name).read_bytes() == (base / "checkpoint" / name).read_bytes()
    assert load_checkpoint(path / "checkpoint").config.vocab_size == 500


def test_a_killed_fine_tuning_resumes_to_the_same_end_without_its_source(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, whole, killed = tmp_path / "source", tmp_path / "whole", tmp_path / "killed"
    source.mkdir()
    for file in (base / "checkpoint").iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    assert train_command(["--from", str(source), *FINE.split(), "--out", str(whole)]) == 0

    def die_at_5(run: RunFolder, record: dict[str, Any]) -> None:
        append(run, record)
        if record["step"] == 5:
            raise MemoryError

    append = RunFolder.append
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append", die_at_5)
        with pytest.raises(MemoryError):
            train_command(["--from", str(source), *FINE.split(), "--out", str(killed)])
    for file in source.iterdir():
        file.unlink()
    assert train_command(["--resume", "--out", str(killed)]) == 0
    weights = "checkpoint/model.safetensors"
    assert (killed / weights).read_bytes() == (whole / weights).read_bytes()


def test_a_run_without_patience_left_stops_and_keeps_the_best(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "early"
    hot = FINE.replace("--learning-rate 0.01", "--learning-rate 3").replace("--steps 9", "--steps 300")
    assert train_command(["--from", str(base / "checkpoint"), *hot.split(), "--patience", "2", "--out", str(path)]) == 0
    run = RunFolder.open(path)
    losses = [record["validation_loss"] for record in run.validations()]
    assert len(losses) == losses.index(min(losses)) + 3
    assert min(losses) == losses[0]
    assert "stopped early: best after step 0" in capsys.readouterr().out
    assert (path / "checkpoint/model.safetensors").read_bytes() == (base / "checkpoint/model.safetensors").read_bytes()
    assert train_command(["--resume", "--out", str(path)]) == 0  # done already
    assert len(RunFolder.open(path).validations()) == len(losses)


def test_a_module_of_ones_own_trains_resumes_and_is_fine_tuned(tmp_path: Path) -> None:
    config = tmp_path / "shape.json"
    config.write_text(json.dumps({**CONFIG, "d_model": 12, "heads": [2, 3], "head_dim": 4, "d_ff": 20}))
    path = tmp_path / "own"
    options = f"--preset study-note --module {EXAMPLE} --config {config} {TINY} --max-line-length 30"
    training = f"{options} --steps 4 --validation-every 2 --gradient-checkpointing --out {path}".split()
    assert train_command(training) == 0
    assert train_command(["--resume", "--out", str(path)]) == 0
    servable = load_servable(path / "checkpoint", EXAMPLE)
    tokenizer = load_tokenizer(path / "checkpoint")
    assert tokenizer is not None
    assert servable.vocab_size == tokenizer.vocab_size
    assert servable.context_length == 160
    tuned = f"--from {path}/checkpoint --module {EXAMPLE} {TINY} --steps 2 --out {tmp_path}/tuned".split()
    assert train_command(tuned) == 0
    assert load_servable(tmp_path / "tuned/checkpoint", EXAMPLE).custom


def test_a_tied_tensor_of_ones_own_module_is_stored_once(tmp_path: Path) -> None:
    from pellucid_model.training.models import TrainableModel

    module = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    module["b"].weight = module["a"].weight
    TrainableModel(module, {"x": 1}, None, None).write(tmp_path, torch.bfloat16)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert list(file.keys()) == ["a.weight"]
        assert file.get_tensor("a.weight").dtype == torch.bfloat16


def test_training_refuses_a_tokenizer_that_is_larger_than_the_model(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((base / "checkpoint" / name).read_bytes())
    vocabulary = characters(["".join(chr(0x4E00 + i) for i in range(600))], {})
    (folder / "tokenizer.json").write_bytes(vocabulary.files["tokenizer.json"])
    recipe = tiny(FINE_TUNE, max_line_length=60)
    data = prepare(LINES, recipe, lambda _: of_checkpoint(folder))
    with pytest.raises(TrainingError, match="the tokenizer has 604 tokens, but the model only 500"):
        Trainer(recipe, data, torch.device("cpu"), ModelSource(checkpoint=str(folder)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--preset demo --vocabulary checkpoint", "vocabulary = 'checkpoint': needs --from"),
        ("--preset demo --bpe-vocab-size 100", "bpe_vocab_size = 100: must be at least 260"),
        ("--preset demo --micro-batches 3", "micro_batches = 3: must be a divisor of rows = 2"),
        ("--preset demo --config x.json", "--config is what a --module without --from is built from"),
        ("--from nowhere", "nowhere"),
        ("--preset demo --module none.py:Model", "there is no file"),
        ("--from {base} --d-model 8", "--d-model: the checkpoint of --from decides that"),
        ("--preset demo --module {module} --layers 8", "--layers: --config, of which --module is built, decides that"),
        ("--from {base} --context-length 64", "context_length = 64: the model reads at most 32 tokens"),
    ],
)
def test_errors_are_one_line(
    options: str, message: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = options.format(base=base / "checkpoint", module=EXAMPLE).split()
    assert train_command([*words, "--generated-lines", "1800", "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
