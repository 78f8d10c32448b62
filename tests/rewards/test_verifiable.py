"""The verifiable tasks of the examples: rewards, demonstrations and held-out prompts."""

from __future__ import annotations

import json
import random
import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from dora.data import gcd
from dora.data.tokenizer import Tokenizer
from dora.rewards.gcd import reward

FOLDER = Path(__file__).parent.parent.parent / "examples" / "verifiable"
RIGHT = {
    "chains": ({"prompt": "36,14:"}, "22,14;08,14;08,06;02,06;02,04;02,02=02"),
    "countdown": ({"prompt": "k3d1p2:"}, "k3k2k1d1p2p1"),
    "sorting": ({"prompt": "qfxab:"}, "abfqx"),
    "stories": ({"prompt": "Mia has 7. Buys 5. Loses 3.", "steps": "+5-3"}, "7+5=12;12-3=9"),
}


@cache
def task_of(name: str) -> Any:
    """The module of a task, under a name of its own: other tests have modules of the same name."""
    if str(FOLDER) not in sys.path:  # tasks import each other
        sys.path.append(str(FOLDER))
    spec = spec_from_file_location(f"verifiable_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


def rows_of(name: str, file: str) -> list[dict[str, Any]]:
    text = (FOLDER / name / f"{file}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("name", RIGHT)
def test_only_the_complete_correct_answer_is_rewarded(name: str) -> None:
    row, right = RIGHT[name]
    wrong = ["", right[:-1], right + right[-1], right[1:], right.replace(right[2], "x", 1)]
    rewards = [task_of(name).reward(completion=text, **row) for text in (right, *wrong)]
    assert rewards == [1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("name", RIGHT)
def test_the_prompts_in_the_repository_are_those_of_the_generator(name: str) -> None:
    rows, held_out = task_of(name).rows(random.Random(0))
    assert [rows, held_out] == [rows_of(name, "prompts"), rows_of(name, "held_out")]


@pytest.mark.parametrize("name", RIGHT)
def test_held_out_prompts_are_not_trained(name: str) -> None:
    trained = {row["prompt"] for row in rows_of(name, "prompts")}
    assert trained.isdisjoint(row["prompt"] for row in rows_of(name, "held_out"))


@pytest.mark.parametrize("name", RIGHT)
def test_demonstrations_can_be_tokenized_and_some_have_errors(name: str) -> None:
    task, tokenizer, source = task_of(name), Tokenizer(FOLDER / name / "start"), random.Random(1)
    rewards = []
    for row in rows_of(name, "prompts")[:300]:
        if (text := task.demonstration(row, source)) is not None:
            assert tokenizer.decode(tokenizer.encode(row["prompt"] + text)) == row["prompt"] + text
            rewards.append(task.reward(completion=text, **row))
    assert 0.3 < sum(rewards) / len(rewards) < 0.9


def test_long_chains_are_trained_and_not_demonstrated() -> None:
    chains = task_of("chains")
    texts = [chains.demonstration(row, random.Random(0)) for row in rows_of("chains", "prompts")]
    assert 0.2 < sum(text is None for text in texts) / len(texts) < 0.5


def test_demonstrated_chains_have_the_stated_error_rate_and_end() -> None:
    source, rows = random.Random(0), gcd.training_rows()
    chains = [task_of("chains").chain_with_errors(row["a"], row["b"], 0.11, source) for row in rows]
    correct = sum(reward(row["prompt"], chain) for row, chain in zip(rows, chains, strict=True)) / len(rows)
    assert 0.35 < correct < 0.45


def test_stories_are_written_in_three_scripts() -> None:
    held_out = rows_of("stories", "held_out")
    by_language = {
        name: "".join(r["prompt"] for r in held_out if r["language"] == name) for name in ["en", "ru", "zh"]
    }
    for name, letters in {"en": "aeinsy", "ru": "авля", "zh": "小明红"}.items():
        assert all(letter in by_language[name] for letter in letters)
