"""Runs from Python: they have processes of their own, and everything that they wrote can be read."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import run as run_program

import pytest
from tests.runtime.running import wait_until
from tests.runtime.tiny import CONFIG, write_task

import dora
from dora.api import Table
from dora.errors import ConfigError, InputError, RunError
from dora.model.pretrained import load_pretrained


@pytest.mark.timeout(200)
def test_a_run_is_started_followed_and_read(tmp_path: Path) -> None:
    run = dora.train(write_task(tmp_path), tmp_path / "run", {"run.steps": 3, "trainer.lr": 0.02})
    assert run.status.state == "finished"
    assert run.config["trainer"]["lr"] == 0.02
    assert run.summary["trained_groups"] == 6
    metrics = run.metrics()
    assert metrics.column("step") == [0, 1, 2]
    assert list(metrics.to_pandas()["reward/mean"]) == metrics.column("reward/mean")
    with pytest.raises(KeyError, match=r"no column 'mean'; similar: reward/mean, "):
        metrics.column("mean")
    samples = run.samples()
    assert len(samples) == 12
    assert {row["step"] for row in samples} == {1, 2, 3}
    assert len(run.samples(last=1)) == 2
    assert run.report().read_text().startswith("<!doctype html>")
    assert run.checkpoint.name == "step-3"
    load_pretrained(run.checkpoint)
    again = dora.load(run.folder)
    assert again.wait(progress=False).summary == run.summary
    with pytest.raises(InputError, match="already holds a run"):
        dora.train(tmp_path / "task.toml", run.folder)


@pytest.mark.timeout(200)
def test_tables_make_a_run_that_another_program_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tomllib

    write_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    tables = tomllib.loads(CONFIG) | {"run": {"steps": 100_000}}
    run = dora.train(tables, "run", wait=False)

    def has_two_steps() -> bool:
        assert run.status.state == "running"
        return len(run.metrics()) >= 2

    try:
        wait_until(has_two_steps)
        dora.load("run").stop()
    finally:
        run.stop()  # also after a failure: nobody else ends it
    assert run.wait(progress=False).status.state == "stopped"
    assert run.checkpoint.is_dir()


def test_the_names_of_the_package_can_be_completed() -> None:
    assert {"train", "load", "Run", "__version__"} <= {*dir(dora)}


def test_wrong_input_raises_and_leaves_no_run(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    with pytest.raises(ConfigError, match=r"trainer\.lr = -1: input should be greater than 0"):
        dora.train(task, tmp_path / "run", {"trainer.lr": -1})
    with pytest.raises(ConfigError, match="policy_loss_options has no effect"):
        dora.train(task, tmp_path / "run", {"algorithm.policy_loss_options": {"decay": 0.9}})
    with pytest.raises(InputError, match=r"overrides are flat; write \{'trainer.lr': 0.5\}"):
        dora.train(task, tmp_path / "run", {"trainer": {"lr": 0.5}})
    with pytest.raises(ConfigError, match=r"the configuration with its overrides:\n.*model"):
        dora.train({"run": {"steps": 1}}, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="is not the folder of a run: it does not exist"):
        dora.load(tmp_path / "nowhere")


@pytest.mark.timeout(200)
def test_what_only_the_run_can_find_out_is_raised_by_wait(tmp_path: Path) -> None:
    (tmp_path / "short").mkdir()
    task = write_task(tmp_path / "short", prompts=[{"prompt": "1234567890:"}])
    with pytest.raises(InputError, match=r"^.*line 1: the prompt has 11 tokens; must be 1 to"):
        dora.train(task, tmp_path / "long prompt", progress=False)
    failing = write_task(
        tmp_path, reward="def reward(prompt, completion, **row):\n    return float(row['x'])\n"
    )
    with pytest.raises((InputError, RunError), match="KeyError"):
        dora.train(failing, tmp_path / "no column", progress=False)


def test_a_notebook_shows_a_table() -> None:
    table = Table([{"a": 1, "b": 0.123456}, {"a": "<x>"}])
    assert table._repr_html_() == (
        "<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>0.1235</td></tr>"
        "<tr><td>&lt;x&gt;</td><td></td></tr></table>"
    )
    assert (table[1], len(table[1:]), repr(table)) == ({"a": "<x>"}, 1, "Table(2 rows, 2 columns)")


def test_the_package_alone_imports_nothing_heavy() -> None:
    code = "import dora, sys; assert not {'torch', 'pydantic', 'rich', 'numpy'} & {*sys.modules}; dora.train"
    assert run_program([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = dora.trian
