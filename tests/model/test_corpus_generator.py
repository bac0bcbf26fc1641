"""The generator of short lines: the same bytes everywhere, distinct lines, all of its words in use."""

from __future__ import annotations

import hashlib
import re

import pytest

from pellucid_model.training.corpus import templates, words
from pellucid_model.training.corpus.generator import SplitMix64, generate_lines
from pellucid_model.training.errors import TrainingError


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return generate_lines()


def test_the_default_corpus_has_the_same_bytes_everywhere(lines: list[str]) -> None:
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert digest == "ce818ac5ac72731b25a18baa5f86bbcee116ce7a561513bd682daac10f27d64b"


def test_it_has_more_than_a_hundred_thousand_distinct_short_lines(lines: list[str]) -> None:
    assert len(lines) == len(set(lines)) == 120_000
    assert max(map(len, lines)) <= 62


def test_headlines_and_dialogue_are_both_there(lines: list[str]) -> None:
    assert sum(line.startswith("问：") and "答：" in line for line in lines) > 20_000
    assert sum("。" not in line and "？" not in line for line in lines) > 20_000


def test_most_lines_about_the_weather_today_call_it_fine(lines: list[str]) -> None:
    weather = [line for line in lines if line.startswith("今天天气")]
    assert len(weather) > 1000
    assert sum("不错" in line for line in weather) > len(weather) / 2


def test_another_seed_gives_other_lines() -> None:
    assert generate_lines(1000, seed=1) == generate_lines(1000, seed=1) != generate_lines(1000, seed=2)


def test_no_slot_is_left_open(lines: list[str]) -> None:
    assert not any("{" in line or "}" in line for line in lines)


def test_templates_use_every_list_of_words_and_no_other() -> None:
    used = {name for topic in templates.TOPICS for name in re.findall(r"\{(\w+)!?\}", topic.templates)}
    assert used == set(words.WORDS)


@pytest.mark.parametrize("count", [0, -1, 744, 170_001])
def test_a_count_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(TrainingError, match=rf"corpus lines = {count}: must be between 745 and 170000"):
        generate_lines(count)


def test_splitmix64_gives_the_published_numbers() -> None:
    random = SplitMix64(1234567)
    assert [random.next() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_below_stays_in_range_and_reaches_both_ends() -> None:
    random = SplitMix64(0)
    assert {random.below(3) for _ in range(100)} == {0, 1, 2}
