"""Engines that DORA has not written, in a run of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.contract.test_inference import EXAMPLES
from tests.runtime.running import Run, dora, journal, metrics
from tests.runtime.tiny import write_task

from dora import settings
from dora.errors import ConfigError
from dora.runtime import adapters

ENGINE = f"{EXAMPLES / 'transformers_engine.py'}:Transformers"
TRAINER = f"{EXAMPLES / 'transformers_trainer.py'}:Transformers"
FITTING: dict[str, Any] = {
    "engine.adapter": ENGINE,
    "engine.version_slots": 1,
    "orchestrator.placement": "static",
    "orchestrator.rush": "false",
}


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """Without the settings that are of DORA's own engine."""
    path = write_task(tmp_path)
    text = path.read_text().replace('kernels = "eager"\n', "").replace('pace = "10ms"\n', "")
    path.write_text(text)
    return path


def test_a_run_on_other_engines_keeps_its_promises_when_one_of_them_dies(task: Path) -> None:
    changes = {key.replace(".", "__"): value for key, value in FITTING.items()}
    out = task.parent / "run"
    run = Run(task, out, run__steps=6, trainer__adapter=TRAINER, **changes)
    try:
        run.wait_for_steps(2)
        run.workers()[0].kill()
        ended = run.end()
    finally:
        run.kill_all()
    assert ended.code == 0, ended.err
    verdict = dora("audit", out, "--deep", "4")
    assert verdict.code == 0, verdict.out
    assert len(metrics(out)) == 6


def test_engines_of_two_kinds_generate_in_one_run_and_stand_in_for_each_other(tmp_path: Path) -> None:
    """The one that DORA has not written dies half-way, and what it was answering begins again."""
    task = write_task(tmp_path)
    fleet = f'[[fleet]]\nname = "others"\nadapter = "{ENGINE}"\nmax_rows = 2\n'
    task.write_text(task.read_text() + fleet)
    changes = {key.replace(".", "__"): value for key, value in FITTING.items() if key != "engine.adapter"}
    run = Run(task, tmp_path / "run", run__steps=8, engine__num_engines=1, **changes)
    try:
        run.wait_for_steps(2)
        run.workers()[1].kill()
        ended = run.end()
    finally:
        run.kill_all()
    assert ended.code == 0, ended.err
    verdict = dora("audit", run.out, "--deep", "8")
    assert verdict.code == 0, verdict.out
    facts = journal(run.out)
    joined = {fact["engine"]: fact["rows"] for fact in facts if fact["kind"] == "engine_joined"}
    assert joined == {0: 4, 1: 2}
    assert {fact["engine"] for fact in facts if fact["kind"] == "request_finished"} == {0, 1}
    assert [fact["engine"] for fact in facts if fact["kind"] == "engine_lost"] == [1]


def test_what_an_adapter_cannot_do_is_refused_with_every_remedy(task: Path) -> None:
    asked = [f"engine.adapter={ENGINE}", "sampling.top_k=5", 'sampling.stop=["7"]', "engine.dtype=bfloat16"]
    with pytest.raises(ConfigError) as refusal:
        adapters.check(settings.read(task, asked))
    told = str(refusal.value)
    for remedy in (
        "set orchestrator.placement = static",
        "set engine.version_slots = 1",
        "set orchestrator.rush = false",
        "remove sampling.top_k",
        "remove sampling.stop",
        "use float32",
    ):
        assert remedy in told


def test_a_configuration_that_fits_is_not_refused(task: Path) -> None:
    adapters.check(settings.read(task, [f"{key}={value}" for key, value in FITTING.items()]))


def test_versions_that_are_adapters_are_for_runs_that_train_adapters(task: Path) -> None:
    fitting = {**FITTING, "engine.adapter": "vllm-lora", "engine.options": '{python = "python", rank = 4}'}
    asked = [f"{key}={value}" for key, value in fitting.items()]
    with pytest.raises(ConfigError, match=r"set trainer\.lora_rank"):
        adapters.check(settings.read(task, asked))
    adapters.check(settings.read(task, [*asked, "trainer.lora_rank=4"]))


def test_a_class_that_does_not_say_what_it_can_do_is_refused(task: Path) -> None:
    with pytest.raises(ConfigError, match="has no attribute capabilities"):
        adapters.check(settings.read(task, [f"engine.adapter={TRAINER}"]))


@pytest.mark.parametrize("key", ["engine.kernels=eager", "engine.pace=5ms"])
def test_a_setting_of_doras_own_engine_has_no_effect_on_others(task: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="has no effect"):
        settings.read(task, [f"engine.adapter={ENGINE}", key])


@pytest.mark.parametrize("key", ["trainer.num_ranks=2", "trainer.lora_rank=2"])
def test_another_trainer_is_not_asked_for_what_only_doras_own_can(task: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="only DORA's own trainer can"):
        settings.read(task, [f"trainer.adapter={TRAINER}", key])


@pytest.mark.parametrize("key", ["engine", "trainer"])
def test_a_class_that_lacks_methods_is_refused_by_their_names(task: Path, tmp_path: Path, key: str) -> None:
    body = "    capabilities = Capabilities()\n    def put(self, samples, is_whole=False): ...\n"
    (tmp_path / "half.py").write_text(f"from dora.runtime.stations import Capabilities\nclass Half:\n{body}")
    told = "abort, progress, step" if key == "engine" else "work, finish, forget"
    with pytest.raises(ConfigError, match=told):
        adapters.check(settings.read(task, [f"{key}.adapter={tmp_path / 'half.py'}:Half"]))
