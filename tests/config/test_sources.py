"""[[source]] tables."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from tests.config.minimal import error_of

from dora.config.load import read_config
from dora.config.toml import to_toml

SOURCES = """
[[source]]
name = "easy"
path = "prompts.jsonl"
ratio = 3
[[source]]
name = "gcd"
path = "gcd"
"""


@pytest.fixture
def mixed(file: Path) -> Path:
    file.write_text(file.read_text().replace('[data]\npath = "prompts.jsonl"\n', "") + SOURCES)
    return file


def test_sources_take_the_place_of_data_path(mixed: Path) -> None:
    config = read_config(mixed, ["source.easy.ratio=4"])
    assert [(source.name, source.ratio) for source in config.source] == [("easy", 4.0), ("gcd", 1.0)]
    assert config.source[0].path == str(mixed.parent.resolve() / "prompts.jsonl")
    again = tomllib.loads(to_toml(config))
    assert [source["path"] for source in again["source"]] == [config.source[0].path, "gcd"]


def test_a_run_of_several_sources_can_be_resumed(mixed: Path) -> None:
    """The configuration of a run has all keys of each source, also those without effect."""
    mixed.write_text(mixed.read_text() + EVAL_SOURCES)
    config = read_config(mixed)
    written = mixed.with_name("again.toml")
    written.write_text(to_toml(config))
    assert to_toml(read_config(written)) == to_toml(config)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["data.path=gcd"], "data.path = 'gcd' with [[source]] easy: list all datasets as [[source]]"),
        (["source.gcd.name=easy"], "source.easy is there twice"),
        (["source.easy.ratio=0"], "input should be greater than 0"),
        (["source.easy.path=service"], "a run with uploaded prompts has no other source"),
        (["source.easy.path=nowhere.jsonl"], "source.easy.path = 'nowhere.jsonl': "),
        (["data.split=train"], "data.split has no effect with [[source]]"),
        (
            ["source.gcd.split=train"],
            "source.gcd.split has no effect with path = gcd in that table; remove it",
        ),
    ],
)
def test_sources_that_cannot_be_mixed_are_refused(mixed: Path, overrides: list[str], why: str) -> None:
    assert why in error_of(mixed, *overrides)


EVAL_SOURCES = """
[[eval_source]]
name = "easy"
path = "prompts.jsonl"
[[eval_source]]
name = "gcd"
path = "gcd"
"""


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["eval.path=gcd"], "eval.path = 'gcd' with [[eval_source]] easy: list all held-out datasets"),
        (["eval_source.gcd.name=easy"], "eval_source.easy is there twice"),
        (["eval_source.easy.path=nowhere.jsonl"], "eval_source.easy.path = 'nowhere.jsonl': "),
        (["eval.split=test"], "eval.split has no effect with [[eval_source]]"),
    ],
)
def test_held_out_sources_that_cannot_be_mixed_are_refused(
    mixed: Path, overrides: list[str], why: str
) -> None:
    mixed.write_text(mixed.read_text() + EVAL_SOURCES)
    assert why in error_of(mixed, *overrides)


def test_held_out_sources_are_part_of_the_resolved_configuration(mixed: Path) -> None:
    mixed.write_text(mixed.read_text() + EVAL_SOURCES)
    config = read_config(mixed, ["eval.every=2"])
    assert config.evaluates_during_training
    again = tomllib.loads(to_toml(config))
    assert [source["name"] for source in again["eval_source"]] == ["easy", "gcd"]
    assert again["eval"]["every"] == 2


def test_some_prompts_are_needed(file: Path) -> None:
    file.write_text(file.read_text().replace('path = "prompts.jsonl"\n', ""))
    assert "data.path is missing: name the training prompts, or add [[source]] tables" in error_of(file)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["curriculum.easy_threshold=0.5", "curriculum.hard_threshold=0.5"], "every prompt would be skipped"),
        (["curriculum.easy_threshold=0"], "input should be greater than 0"),
        (["curriculum.skip_epochs=2"], "curriculum.skip_epochs has no effect without"),
        (["curriculum.easy_threshold=1", "data.path=service"], "each uploaded prompt is used once"),
        (["data.easy_threshold=1"], "easy_threshold is curriculum.easy_threshold here"),
    ],
)
def test_a_curriculum_that_cannot_work_is_refused(file: Path, overrides: list[str], why: str) -> None:
    assert why in error_of(file, *overrides)
