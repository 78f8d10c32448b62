"""Every code block on every page parses, is valid, and runs if it is Python."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shlex
import sqlite3
import tomllib
from pathlib import Path
from typing import Any, cast

import pytest
from tests.docs.blocks import BLOCKS, ROOT, Block, commands, dora, furnish, of_language, parse, run

from dora.cli.dry_run import dry_run
from dora.config import load
from dora.core.types import GroupId, RequestId
from dora.stream.sample_db import SampleStore, Trajectory

BENCHMARKS = ROOT / "benchmarks"
KINDS = {"python", "toml", "json", "yaml", "sql", "sh", "settings", "text"}
BASE = tomllib.loads(
    """
run.steps = 60
model.path = "start"
data.path = "prompts.jsonl"
sampling.max_response_length = 64
reward.function = "reward.py:reward"
trainer = {batch_size = 8, lr = 3e-4}
"""
)
OF_PYTHON = {"README.md"} | {
    f"docs/{page}.md"
    for page in (
        *("quickstart", "algorithms", "data", "engine", "environments", "backends", "stream"),
        *("monitoring", "external-trainer", "service", "python-api"),
    )
}  # the last three are tried with runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the files that the pages name."""
    made = tmp_path_factory.mktemp("reader")
    furnish(made)
    return made


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def with_base(tables: dict[str, Any]) -> dict[str, Any]:
    """A fragment of a configuration, completed with the required keys."""
    several = {name: given for name, given in tables.items() if isinstance(given, list)}
    merged = {n: {**BASE.get(n, {}), **table} for n, table in tables.items() if n not in several}
    given = {**BASE, **merged, **several}
    if "source" in several:
        given["data"] = {key: value for key, value in given["data"].items() if key != "path"}
    return given


def test_every_block_has_a_language_that_is_tested() -> None:
    assert [str(block) for block in BLOCKS if block.language not in KINDS] == []
    assert {block.page for block in of_language("python")} <= OF_PYTHON


@pytest.mark.parametrize("block", of_language("toml"), ids=str)
def test_every_configuration_is_valid(block: Block) -> None:
    tables = tomllib.loads(block.text)
    assert load.parse_config(tables if "run" in tables else with_base(tables)).run.steps > 0


def test_a_section_of_algorithms_can_be_pasted_into_the_demo() -> None:
    """TOML allows each table only once."""
    blocks = [block.text for block in of_language("toml") if block.page == "docs/algorithms.md"]
    pasted = [text for text in blocks if text.startswith("[algorithm]")]
    demo = (ROOT / "examples" / "gcd.toml").read_text(encoding="utf-8")
    assert len(pasted) >= 5
    assert all(tomllib.loads(f"{demo}\n{text}") for text in pasted)


@pytest.mark.parametrize("block", of_language("settings"), ids=str)
def test_settings_of_a_block_are_valid_together(block: Block) -> None:
    assert load.parse_config(with_base(tomllib.loads(block.text))).run.steps > 0


def test_every_line_of_json_and_every_yaml_parses() -> None:
    for block in of_language("json"):
        assert all(json.loads(line) for line in block.text.splitlines()), str(block)
    yaml = importlib.import_module("yaml")  # the client libraries of Hugging Face bring it
    for block in of_language("yaml"):
        assert yaml.safe_load(block.text), str(block)


@pytest.mark.parametrize("block", of_language("sql"), ids=str)
def test_sql_queries_of_a_trace_run(block: Block) -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.execute("create table slice (name, category, ts, dur)")
        slices = [("v0 0/1/0", "requests", 0, 2e9), ("v1 0/2/0", "requests", 5, 1e9), ("v0", "loads", 0, 1)]
        db.executemany("insert into slice values (?, ?, ?, ?)", slices)
        assert db.execute(block.text).fetchall() == [("v0", 1, 2.0), ("v1", 1, 1.0)]


@pytest.mark.parametrize(("block", "line"), commands(), ids=lambda given: str(given))
def test_every_command_line_is_valid(block: Block, line: str, here: Path) -> None:
    """Options exist; a configuration with its overrides is valid, and the files that it names exist."""
    program, *given = shlex.split(line, comments=True)
    if program == "dora":
        name, options = parse(line)
        if name in ("train", "serve") and options["config"] is not None:
            short = [f"run.steps={options['steps']}"] if options.get("steps") else []
            assert load.read_config(options["config"], [*(options["overrides"] or []), *short]).run.steps > 0
    elif program == "python" and given[0] == "-m":
        assert importlib.util.find_spec(given[1]) is not None
    elif program == "python":
        text = "".join(path.read_text("utf-8") for path in (ROOT / given[0], BENCHMARKS / "report.py"))
        assert [option for option in given if option.startswith("--") and option not in text] == []
    elif program.endswith("pip"):
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert {*re.findall(r"\[(\w+)\]", line)} <= extras.keys()
        assert "-c" not in given or (ROOT / given[given.index("-c") + 1]).is_file()
    elif program == "make":
        assert f"\n{given[0]}:" in (ROOT / "Makefile").read_text()
    else:
        assert program in ("pytest", "export", "ray")


DRY = [line for block, line in commands() if line.startswith("dora train") and "--resume" not in line]


@pytest.mark.parametrize("page", sorted({block.page for block, line in commands() if line in DRY}))
def test_the_first_run_of_a_page_passes_a_dry_run(page: str, here: Path) -> None:
    """`--dry-run`: models, data and environments are loaded, rewards are called."""
    line = next(line for block, line in commands() if block.page == page and line in DRY)
    _, options = parse(line)
    config = load.read_config(options["config"], options["overrides"] or [])
    assert "staleness" in dry_run(config, here / "runs" / "none")


@pytest.mark.parametrize("line", ["dora doctor", "dora metrics staleness", "dora config --defaults"])
def test_commands_that_need_no_run_succeed(line: str, here: Path) -> None:
    assert line in " ".join(re.sub(r"\s+", " ", block.text) for block in of_language("sh"))
    assert dora(*line.split()[1:]) == 0


def blocks_of(page: str) -> list[Block]:
    return [block for block in of_language("python") if block.page == page]


def names_of(page: str, **given: object) -> list[dict[str, object]]:
    """The names that each block of a page defines; a block sees the names of those before."""
    names: dict[str, object] = {"__name__": "page", **given}
    return [dict(run(block, names)) for block in blocks_of(page)]


def test_reward_functions_on_the_pages_return_rewards(here: Path) -> None:
    for page in ("README.md", "docs/quickstart.md"):
        reward: Any = names_of(page)[0]["reward"]
        assert (reward("12,30:", "06", answer="06"), reward("12,30:", "=06", answer="06")) in {(1, 0), (0, 1)}
    forms, as_verl, complete, thinking = names_of("docs/data.md")
    finished: Any = complete["reward"]
    assert [finished("p", "06", reason, answer="06") for reason in ("stop", "length")] == [1.0, 0.0]
    many: Any = forms["reward"]
    assert many(["p"] * 2, ["is 72", "is 7"], answer=["72", "72"]) == [1.0, 0.0]
    assert cast(Any, as_verl["compute_score"])("math", "#### 72", "72") == 1.0
    accuracy, has_format = cast(Any, thinking["accuracy"]), cast(Any, thinking["has_format"])
    completions = ("<think>72</think>\\boxed{72}", "<think>\\boxed{72}", "\\boxed{72}")
    assert [accuracy("p", text, answer="72") for text in completions] == [1.0, 0.0, 1.0]
    assert [has_format("p", text) for text in completions] == [1.0, 0.0, 0.0]


def test_engines_on_the_pages_generate(here: Path) -> None:
    alone, episode = names_of("docs/engine.md")
    for names in (alone, episode):
        answers: Any = names["completions"]
        assert len(answers[0].token_ids) == len(answers[0].logprobs) > 0
    assert episode["observations"] == []


def test_environments_on_the_pages_run_an_episode(here: Path) -> None:
    pytest.importorskip("gymnasium")
    import asyncio

    doubling, costly, stored, lake, _ = names_of("docs/environments.md")
    made: Any = doubling["Doubling"]
    game = made()
    assert asyncio.run(game.reset({"prompt": "12,12:", "number": 12}, 0)) == "12,12:"
    assert asyncio.run(game.step("24")).done
    made = costly["Costly"]
    game = made()
    asyncio.run(game.reset({"prompt": "12,12:", "number": 12}, 0))
    rewards = [asyncio.run(game.step(action)).reward for action in ("1", "2", "24")]
    assert rewards == pytest.approx([-0.1, -0.1, 0.9])
    made = stored["StoredDoubling"]
    before, after = made(), made()
    asyncio.run(before.reset({"prompt": "12,12:", "number": 12}, 0))
    after.restore(before.snapshot())
    assert asyncio.run(after.step("24")).done
    made = lake["Lake"]
    assert "you are at 0" in asyncio.run(made().reset({"prompt": "lake", "seed": 0}, 0))


def test_samples_are_read_as_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    store = SampleStore(tmp_path / "runs" / "a" / "samples.sqlite")
    for sibling, mask in enumerate((None, [1, 0, 1])):
        request = RequestId(0, 3, sibling)
        store.put(Trajectory(request, 0, "d", [1], [2, 3, 4], [-1.0, 0.0, -0.5], loss_mask=mask))
    store.set_state([GroupId(0, 3)], "trained", 0)
    store.close()
    names_of("docs/monitoring.md")
    assert capsys.readouterr().out == "0/3/0: 3 tokens, log-prob -1.500\n0/3/1: 2 tokens, log-prob -1.500\n"


def test_the_table_of_samples_has_all_columns(tmp_path: Path) -> None:
    SampleStore(tmp_path / "samples.sqlite").close()
    with contextlib.closing(sqlite3.connect(tmp_path / "samples.sqlite")) as store:
        columns = {row[1] for row in store.execute("pragma table_info(samples)")}
    section = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8").partition("\n## Samples\n")[2]
    rows = re.findall(r"^\| (`.*?) \|", section.partition("```python")[0], re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == columns


def test_adapters_on_the_pages_have_contract_tests(here: Path) -> None:
    pytest.importorskip("transformers")
    files = {"engine": "src/dora/engine/backends/transformers_engine.py"}
    files["trainer"] = "examples/adapters/transformers_trainer.py"
    for kind, file in files.items():
        (here / f"my{kind}.py").write_text((ROOT / file).read_text())
    lines = [f"from my{kind} import Transformers as My{kind.capitalize()}" for kind in ("engine", "trainer")]
    (here / "mine.py").write_text("\n".join(lines))
    (names,) = names_of("docs/backends.md")
    for name in ("TestMyEngine", "TestMyTrainer"):
        tried: Any = names[name]
        assert [test for test in dir(tried) if test.startswith("test_")] != []


def test_the_stream_on_the_page_serves_two_consumers(here: Path) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    producer, consumer = blocks_of("docs/stream.md")
    run(producer, names)
    mine, server, serving = names["client"], names["server"], names["serving"]
    run(consumer, names)
    assert names["batch"].requests == [(0, 7, 0), (0, 7, 1)]
    mine.close()
    server.stop()
    serving.join()
