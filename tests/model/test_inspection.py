"""`pellucid inspect`: the arrays are what the model computed, and every label can be read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import font_manager
from torch import Tensor

import pellucid_model
from pellucid_model.attention import ReferenceAttend
from pellucid_model.blocks import find_blocks
from pellucid_model.errors import ModelError
from pellucid_model.inspection import labels as labels_module
from pellucid_model.inspection.cli import inspect_command
from pellucid_model.inspection.inspection import inspect_tokens
from pellucid_model.inspection.labels import BUNDLED, choose_fonts, sequence_labels, token_labels
from pellucid_model.reading import read
from pellucid_model.tokenizers import CharacterTokenizer, load_tokenizer
from pellucid_model.training.vocabulary import byte_pairs
from pellucid_testing.checkpoints import tiny_checkpoint, tiny_config, tiny_model
from pellucid_testing.custom_model import EXAMPLE, custom_checkpoint, custom_model

DEMO = Path(pellucid_model.__file__).parent / "demo"
TOKENS = [5, 9, 9, 3, 30, 17, 8, 2, 11]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_reading_is_what_the_model_computes() -> None:
    model = tiny_model()
    reading = read(model, TOKENS)
    attend = ReferenceAttend([len(TOKENS)], torch.arange(len(TOKENS)))
    with torch.no_grad():
        hidden = model(torch.tensor(TOKENS), attend.positions, attend)
        assert torch.equal(reading.logits, model.logits(hidden))
        assert torch.equal(reading.residuals[0], model.embedding(torch.tensor(TOKENS)))
        assert model.final_norm is not None
        assert torch.equal(model.final_norm(reading.residuals[-1]), reading.hidden)
    assert len(reading.residuals) == model.config.layers + 1
    for layer in range(model.config.layers):
        maps = reading.attention[layer]
        assert maps.shape == (6, len(TOKENS), len(TOKENS))
        torch.testing.assert_close(maps.sum(dim=-1), torch.ones(6, len(TOKENS)))
        assert torch.equal(maps, maps.tril())


def test_entropy_is_measured_against_what_a_window_shows() -> None:
    """Without queries every visible token weighs the same: 1, whatever the window."""
    model = tiny_model(tiny_config(windows=(3, None)))
    with torch.no_grad():
        for block in model.blocks:
            block.attention.query.weight.zero_()  # type: ignore[union-attr, operator]
            block.attention.query.bias.zero_()  # type: ignore[union-attr, operator]
    reading = read(model, TOKENS)
    assert reading.windows == {0: 3, 1: None}
    assert reading.visible(0).tolist() == [1, 2, 3, 3, 3, 3, 3, 3, 3]
    for layer, largest in ((0, 3), (1, 9)):
        assert reading.entropy(layer)[:, -1].tolist() == pytest.approx([math.log(largest)] * 6, rel=1e-5)
        relative = reading.relative_entropy(layer)
        assert relative[:, 0].isnan().all()
        torch.testing.assert_close(relative[:, 1:], torch.ones(6, 8))


def test_blocks_are_found_in_any_module() -> None:
    own = custom_model()
    assert find_blocks(own) == list(own.blocks)
    assert find_blocks(torch.nn.Linear(2, 2)) == []
    reading = read(own, TOKENS)
    assert len(reading.residuals) == 4
    assert [maps.shape[0] for maps in reading.attention.values()] == [3, 5, 2]


def test_next_tokens_are_the_likeliest_ones() -> None:
    model = tiny_model()
    inspection = inspect_tokens(model, TOKENS, None, top_k=4)
    probabilities = read(model, TOKENS).logits.softmax(dim=-1).numpy()
    for row in range(len(TOKENS)):
        order = np.argsort(-probabilities[row], kind="stable")[:4]
        assert inspection.next_ids[row].tolist() == order.tolist()
        assert inspection.next_probabilities[row] == pytest.approx(probabilities[row][order])
    assert inspection.labels == [str(token) for token in TOKENS]
    assert inspection.norms.shape == (4, len(TOKENS))
    assert inspection.norms[-1] == pytest.approx(read(model, TOKENS).hidden.norm(dim=-1).numpy())


def test_the_command_leaves_arrays_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert inspect_command([str(DEMO), "今天天气$", "--out", str(out), "--top-k", "3"]) == 0
    said = capsys.readouterr()
    assert "7 pictures and inspection.npz" in said.out
    assert "气\t" in said.out
    assert said.err == ""
    pictures = {path.name for path in out.glob("*.png")}
    assert pictures == {*(f"attention-layer-0{i}.png" for i in range(4)), "entropy.png", "norms.png", "next-tokens.png"}
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    with np.load(out / "inspection.npz") as arrays:
        assert arrays["labels"].tolist() == ["<bos>", "今", "天", "天", "气", "<unk>"]
        assert arrays["attention_3"].shape == (8, 6, 6)
        assert arrays["entropy_0"].shape == (8, 6)
        assert arrays["relative_entropy_0"].shape == (8,)
        assert arrays["norms"].shape == (6, 6)
        assert arrays["stages"].tolist()[0] == "embedding"
        assert arrays["next_labels"].shape == arrays["next_ids"].shape == (6, 3)
        assert (np.diff(arrays["next_probabilities"]) <= 0).all()


def test_a_module_of_ones_own_and_token_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = custom_checkpoint(tmp_path)
    out = tmp_path / "out"
    assert inspect_command([str(folder), "--tokens", "5,6,7", "--module", EXAMPLE, "--out", str(out)]) == 0
    assert "6 pictures" in capsys.readouterr().out
    with np.load(out / "inspection.npz") as arrays:
        assert arrays["attention_1"].shape == (5, 3, 3)


class Gathering(torch.nn.Module):
    """Layer 0 makes a score matrix of its own, layer 1 does not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 8)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        x = self.embedding(tokens)
        attend.gathered(0, x[:, None], x[:, None])
        mixed: Tensor = attend(1, x[:, None], x[:, None], x[:, None])
        return mixed.flatten(1)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def test_a_layer_with_a_score_matrix_of_its_own_is_named(tmp_path: Path) -> None:
    inspection = inspect_tokens(Gathering().eval(), [1, 2, 3], None, top_k=1)
    (notice,) = inspection.save(tmp_path)
    assert notice.endswith("a score matrix of their own: 0")
    assert list(inspection.attention) == [1]
    assert inspection.stages == ["before the head"]


def test_one_token_alone_has_its_pictures(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, tokenizer=False)
    assert inspect_command([str(folder), "--tokens", "7", "--out", str(tmp_path / "out")]) == 0
    with np.load(tmp_path / "out/inspection.npz") as arrays:
        assert arrays["attention_0"].tolist() == [[[1.0]]] * 6


def test_common_chinese_is_drawn_without_any_font_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(font_manager, "findSystemFonts", list)
    tokenizer = load_tokenizer(DEMO)
    assert isinstance(tokenizer, CharacterTokenizer)
    vocabulary = "".join(token_labels(range(tokenizer.vocab_size), tokenizer))
    fonts = choose_fonts(vocabulary + "问：今天天气怎么样？\u23ce\u2423\u2026<bos>".replace("\u23ce", ""))
    assert fonts.families == ("DejaVu Sans", "Pellucid Noto Sans SC")
    assert fonts.missing == frozenset()


def test_what_no_font_has_is_a_number_and_not_a_box(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(font_manager, "findSystemFonts", list)
    fonts = choose_fonts("a龘𠀀")
    assert fonts.missing == frozenset("龘𠀀")
    assert fonts.drawable("a龘b") == "aU+9F98b"
    assert fonts.drawable("𠀀") == "U+20000"


def test_a_system_s_font_is_asked_for_what_the_others_lack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []
    broken = tmp_path / "broken.ttf"
    broken.write_bytes(b"no font")

    def system_fonts() -> list[str]:
        asked.append(1)
        return [str(broken), str(BUNDLED)]

    monkeypatch.setattr(font_manager, "findSystemFonts", system_fonts)
    assert choose_fonts("abc").families == ("DejaVu Sans",)
    assert asked == []
    monkeypatch.setattr(labels_module, "BUNDLED", broken)
    assert choose_fonts("天").families == ("DejaVu Sans", "Pellucid Noto Sans SC")
    assert asked == [1]
    assert choose_fonts("天", BUNDLED).families == ("Pellucid Noto Sans SC",)
    with pytest.raises(ModelError, match="cannot be read as a font"):
        choose_fonts("天", broken)


def test_every_token_has_a_label_that_shows() -> None:
    vocabulary = byte_pairs(["你好 hello world"] * 3, 270, {})
    ids = vocabulary.encode_line("龘 \n\thello")
    shown = token_labels([*ids, 5000], vocabulary.tokenizer)
    assert shown[0] == "<bos>"
    assert "<E9>" in shown  # a byte of a character
    assert "\u2423" in shown
    assert "\u21b5" in shown
    assert shown[-1] == "#5000"
    assert all(label and label.isprintable() and not label.isspace() and len(label) <= 12 for label in shown)


def test_tokens_that_make_a_character_together_show_it() -> None:
    vocabulary = byte_pairs(["hello"], 262, {})
    ids = vocabulary.encode_beginning("a 天\U0001f642b")
    assert sequence_labels(ids, vocabulary.tokenizer) == [
        *("<bos>", "a", "\u2423"),
        *("天 1/3", "天 2/3", "天 3/3"),
        *(f"\U0001f642 {part}/4" for part in range(1, 5)),
        "b",
    ]
    assert sequence_labels(ids[3:5], vocabulary.tokenizer) == ["<E5>", "<A4>"]  # the rest of it is missing
    assert sequence_labels(ids[4:7], vocabulary.tokenizer) == ["<A4>", "<A9>", "<F0>"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give a text, or --tokens 1,2,3"),
        (["x", "--tokens", "1"], 2, "give a text, or --tokens 1,2,3"),
        (["--tokens", "1,b"], 2, "--tokens 1,b: must be numbers"),
        (["--tokens", "1,9000"], 2, "token 9000: the model has tokens 0 to 1193"),
        (["天" * 150], 2, "the text has 151 tokens; accepted: up to 128"),
        (["天" * 300, "--max-tokens", "600"], 2, "the text has 301 tokens; the model reads at most 256"),
        (["天", "--max-tokens", "5000"], 2, "argument --max-tokens: 5000: must be at most 1024"),
        (["天", "--top-k", "0"], 2, "argument --top-k: 0: must be at least 1"),
        (["天", "--font", "none.ttf"], 2, "--font none.ttf cannot be read as a font"),
        (["天", "--module", "none.py:M"], 2, "there is no file 'none.py'"),
        (["天", "--out", "/proc/nowhere"], 1, "/proc/nowhere"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        found = inspect_command([str(DEMO), *arguments])
    except SystemExit as end:
        found = int(end.code or 0)
    assert found == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
