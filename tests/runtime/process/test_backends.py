"""Engines that DORA has not written, in a run of its own."""

from __future__ import annotations

import sys
from collections import deque
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.contract.test_engine_contract import EXAMPLES
from tests.runtime.fake_process import FakeLauncher
from tests.runtime.running import Run, dora, journal, metrics
from tests.runtime.tiny import write_task

from dora.config import load
from dora.errors import ConfigError, InputError
from dora.runtime.process import backends
from dora.runtime.process.messages import WorkerCrashed
from dora.runtime.process.worker_process import WorkerMessages
from dora.runtime.rollout.engine_pool import EnginePool
from dora.runtime.run_setup import RunSetup
from dora.runtime.sample_book import SampleBook
from dora.stream.sample_db import SampleStore

ENGINE = f"{EXAMPLES / 'transformers_engine.py'}:Transformers"
TRAINER = f"{EXAMPLES / 'transformers_trainer.py'}:Transformers"
FITTING: dict[str, Any] = {
    "engine.backend": ENGINE,
    "engine.version_slots": 1,
    "orchestrator.placement": "static",
    "orchestrator.prioritize_stragglers": "false",
}


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """Without the settings that are of DORA's own engine."""
    path = write_task(tmp_path)
    text = path.read_text().replace('kernels = "eager"\n', "").replace('min_step_time = "10ms"\n', "")
    path.write_text(text)
    return path


def test_a_run_on_other_engines_keeps_its_promises_when_one_of_them_dies(task: Path) -> None:
    changes = {key.replace(".", "__"): value for key, value in FITTING.items()}
    out = task.parent / "run"
    run = Run(task, out, run__steps=6, trainer__backend=TRAINER, **changes)
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
    fleet = f'[[fleet]]\nname = "others"\nbackend = "{ENGINE}"\nmax_num_seqs = 2\n'
    task.write_text(task.read_text() + fleet)
    changes = {key.replace(".", "__"): value for key, value in FITTING.items() if key != "engine.backend"}
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
    joined = {fact["engine"]: fact["max_num_seqs"] for fact in facts if fact["kind"] == "engine_joined"}
    assert joined == {0: 4, 1: 2}
    assert {fact["engine"] for fact in facts if fact["kind"] == "request_finished"} == {0, 1}
    assert [fact["engine"] for fact in facts if fact["kind"] == "engine_lost"] == [1]


def test_what_an_adapter_cannot_do_is_refused_with_every_remedy(task: Path) -> None:
    asked = [f"engine.backend={ENGINE}", "sampling.top_k=5", 'sampling.stop=["7"]', "engine.dtype=bfloat16"]
    with pytest.raises(ConfigError) as refusal:
        backends.check_backends(load.read_config(task, asked))
    told = str(refusal.value)
    for remedy in (
        "set orchestrator.placement = static",
        "set engine.version_slots = 1",
        "set orchestrator.prioritize_stragglers = false",
        "remove sampling.top_k",
        "remove sampling.stop",
        "use float32",
    ):
        assert remedy in told


def test_a_configuration_that_fits_is_not_refused(task: Path) -> None:
    backends.check_backends(load.read_config(task, [f"{key}={value}" for key, value in FITTING.items()]))


def test_versions_that_are_adapters_are_for_runs_that_train_adapters(task: Path) -> None:
    options = f'{{python = "{sys.executable}", rank = 4}}'
    fitting = {**FITTING, "engine.backend": "vllm-lora", "engine.options": options}
    asked = [f"{key}={value}" for key, value in fitting.items()]
    with pytest.raises(ConfigError, match=r"set trainer\.lora_rank"):
        backends.check_backends(load.read_config(task, asked))
    backends.check_backends(load.read_config(task, [*asked, "trainer.lora_rank=4"]))


@pytest.mark.parametrize("adapter", ["vllm", "sglang", "vllm-lora"])
@pytest.mark.parametrize(
    ("options", "told"),
    {
        "": "give .* either python, an interpreter, or url, a server",
        'python = "python3", url = "http://here:1"': "either python",
        'python = "nope"': "python = 'nope': no such command",
        "python = 3": "python = 3: no such command",
        'url = "here:8000"': "must read http://name:port",
        'url = "http://here:99999"': "must read http://name:port",
        'url = "http://here:8000/v1"': "must read http://name:port",
    }.items(),
    ids=["nothing", "both", "nope", "number", "no scheme", "no port", "a path"],
)
def test_options_with_which_there_can_be_no_server_are_refused_before_anything_starts(
    task: Path, adapter: str, options: str, told: str
) -> None:
    rank = "rank = 4" if adapter == "vllm-lora" else ""
    given = {**FITTING, "trainer.lora_rank": 4, "engine.backend": adapter}
    given["engine.options"] = f"{{{', '.join(filter(None, (options, rank)))}}}"
    with pytest.raises(ConfigError, match=rf"engine\.options = .*{told}"):
        backends.check_backends(load.read_config(task, [f"{key}={value}" for key, value in given.items()]))


def test_where_no_engine_can_start_for_what_it_was_given_that_line_is_the_end(
    task: Path, tmp_path: Path
) -> None:
    plan, launcher = RunSetup.make(load.read_config(task), tmp_path / "run"), FakeLauncher()
    told = WorkerMessages(launcher.start)
    with closing(SampleStore(tmp_path / "samples.sqlite")) as samples:
        fleet = EnginePool(plan, tmp_path, told, deque(), SampleBook(plan, samples), print)
        for process in launcher.processes:
            process.emit(WorkerCrashed("a traceback", "there is no server; start it"))
            process.kill()
        while fleet.workers:
            worker, message = told.get(timeout=10.0)
            engine = fleet.engine_of(worker)
            assert engine is not None
            fleet.on_message(engine, message)
        with pytest.raises(InputError, match=r"^there is no server; start it$"):
            fleet.check_not_empty()


def test_a_class_that_does_not_say_what_it_can_do_is_refused(task: Path) -> None:
    with pytest.raises(ConfigError, match="has no attribute capabilities"):
        backends.check_backends(load.read_config(task, [f"engine.backend={TRAINER}"]))


@pytest.mark.parametrize("key", ["engine.kernels=eager", "engine.min_step_time=5ms"])
def test_a_setting_of_doras_own_engine_has_no_effect_on_others(task: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="has no effect"):
        load.read_config(task, [f"engine.backend={ENGINE}", key])


@pytest.mark.parametrize("key", ["trainer.num_ranks=2", "trainer.lora_rank=2"])
def test_another_trainer_is_not_asked_for_what_only_doras_own_can(task: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="only DORA's own trainer can"):
        load.read_config(task, [f"trainer.backend={TRAINER}", key])


@pytest.mark.parametrize("key", ["engine", "trainer"])
def test_a_class_that_lacks_methods_is_refused_by_their_names(task: Path, tmp_path: Path, key: str) -> None:
    body = "    capabilities = Capabilities()\n    def put(self, samples, is_whole=False): ...\n"
    (tmp_path / "half.py").write_text(f"from dora.engine.interface import Capabilities\nclass Half:\n{body}")
    told = "abort, progress, step" if key == "engine" else "work, finish, forget"
    with pytest.raises(ConfigError, match=told):
        backends.check_backends(load.read_config(task, [f"{key}.adapter={tmp_path / 'half.py'}:Half"]))
