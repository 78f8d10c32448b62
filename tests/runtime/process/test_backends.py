"""Backends of other engines are checked before a run starts."""

from __future__ import annotations

import json
import sys
from collections import deque
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.contract.test_engine_contract import LIMITED
from tests.contract.test_trainer_contract import EXAMPLES
from tests.runtime.fake_process import FakeLauncher

from dora.config import load
from dora.engine.backends import sglang, vllm
from dora.engine.interface import Capabilities
from dora.engine.request import EngineError
from dora.errors import ConfigError, InputError
from dora.runtime.process import backends
from dora.runtime.process.messages import EngineSpec, WorkerCrashed
from dora.runtime.process.remote_kv import shared_clock
from dora.runtime.process.supervisor import Supervisor
from dora.runtime.process.worker_process import WorkerMessages
from dora.runtime.rollout.engine_pool import EnginePool
from dora.runtime.run_setup import RunSetup
from dora.runtime.sample_book import SampleBook
from dora.stream.sample_db import SampleStore

TRAINER = f"{EXAMPLES / 'transformers_trainer.py'}:Transformers"
FITTING: dict[str, Any] = {
    "engine.backend": LIMITED,
    "orchestrator.placement": "static",
}


@pytest.fixture
def task(plain_task: Path) -> Path:
    return plain_task


def test_all_missing_capabilities_are_reported_with_remedies(task: Path) -> None:
    changes = [
        f"engine.backend={LIMITED}",
        "sampling.top_k=5",
        'sampling.stop=["7"]',
        "engine.dtype=bfloat16",
    ]
    changes += ["engine.exact_logprobs=true", "engine.version_slots=2"]
    changes += ["orchestrator.prioritize_stragglers=true"]
    with pytest.raises(ConfigError) as error:
        backends.check_backends(load.read_config(task, changes))
    for remedy in (
        "set orchestrator.placement = static",
        "set engine.version_slots = 1",
        "set orchestrator.prioritize_stragglers = false",
        "set engine.exact_logprobs = false",
        "remove sampling.top_k",
        "remove sampling.stop",
        "use float32",
    ):
        assert remedy in str(error.value)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"engine.backend": LIMITED}, "computes on one GPU: set engine.gpus_per_engine = 1"),
        (
            {},
            "own engine computes on one GPU; set engine.backend = vllm or sglang, or remove gpus_per_engine",
        ),
        ({"engine.backend": "vllm", "engine.device": "cpu"}, "set engine.device = cuda, or remove gpus_per"),
        ({"engine.backend": "vllm", "trainer.elastic": "true"}, "remove .*trainer.elastic, or gpus_per_eng"),
    ],
)
def test_several_gpus_for_an_engine_need_a_backend_that_uses_them(
    task: Path, changes: dict[str, str], error: str
) -> None:
    gpus = {"engine.device": "cuda", "trainer.device": "cuda", "orchestrator.placement": "static"}
    given = {**gpus, "engine.gpus_per_engine": "2", **changes}
    with pytest.raises(ConfigError, match=error):
        backends.check_backends(load.read_config(task, [f"{key}={value}" for key, value in given.items()]))


def test_filters_are_refused_where_the_trainer_would_lack_unfiltered_log_probs(task: Path) -> None:
    held_out = {"eval.path": "gcd", "eval.num_prompts": "4"}

    def check(backend: str, **filters: str) -> None:
        filters = {name.replace("__", "."): value for name, value in filters.items()}
        changes = {**FITTING, **held_out, "engine.backend": backend, **filters}
        if backend != LIMITED:
            changes["engine.options"] = f"{{python = '{sys.executable}'}}"
        backends.check_backends(load.read_config(task, [f"{key}={value}" for key, value in changes.items()]))

    check("sglang", sampling__top_k="5")
    check("vllm", eval__top_k="5")
    with pytest.raises(ConfigError, match="min_p, or set only those of eval"):
        check("vllm", sampling__top_k="5")
    with pytest.raises(ConfigError, match="remove top_k, top_p and min_p of eval"):
        check(LIMITED, eval__top_p="0.9")


def test_a_server_divides_its_model_among_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    flags, environment = vllm._device_options("cuda:4", 2, 0, ())
    assert ([*flags], environment["CUDA_VISIBLE_DEVICES"]) == (["--tensor-parallel-size", "2"], "4,5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4")  # of those that the engine's process may use
    assert vllm._device_options("cuda:1", 2, 0, ())[1]["CUDA_VISIBLE_DEVICES"] == "6,5"
    assert vllm._device_options("cuda:1", 1, 0, ())[0] == ()
    expected = ["--device", "cuda", "--base-gpu-id", "4", "--tp-size", "2"]
    assert [*sglang._device_flags("cuda:4", 2)] == expected


def test_a_pace_that_nothing_would_keep_is_rejected(monkeypatch: pytest.MonkeyPatch, task: Path) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    assert vllm._device_options("cpu", 1, 0, (), 0.02)[1]["DORA_VLLM_MIN_STEP_S"] == "0.02"
    for device, arguments in (("cuda:0", ()), ("cpu", ("--distributed-executor-backend", "mp"))):
        with pytest.raises(EngineError, match="min_step_s needs DORA-RL's executor on a CPU"):
            vllm._device_options(device, 1, 0, arguments, 0.02)
    for options, error in (
        ("url = 'http://here:8000', min_step_s = 0.02", "paces servers that DORA-RL starts"),
        ("python = 'python3', min_step_s = 'fast'", "must be seconds, 0 or more"),
    ):
        given = {**FITTING, "engine.backend": "vllm", "engine.options": f"{{{options}}}"}
        with pytest.raises(ConfigError, match=error):
            backends.check_backends(load.read_config(task, [f"{k}={value}" for k, value in given.items()]))


def test_servers_over_nixl_have_ports_of_their_own_and_stay_on_loopback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert vllm._kv_options(None, "nixl", None, "cpu") == ((), {})
    assert vllm._kv_options(tmp_path, "files", None, "cpu")[1] == {}
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
    monkeypatch.delenv("UCX_TLS", raising=False)
    flags, environment = vllm._kv_options(tmp_path, "nixl", None, "cpu")
    assert json.loads(flags[1])["kv_connector_extra_config"] == {"kv_lease_duration": vllm.NIXL_LEASE_S}
    assert environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] != "5600"
    assert (environment["UCX_NET_DEVICES"], environment["UCX_TLS"]) == ("lo", "tcp,self")
    monkeypatch.setenv("UCX_TLS", "rc")
    _, environment = vllm._kv_options(tmp_path, "nixl", "127.0.0.1", "cuda:0")
    assert not environment.keys() & {"UCX_NET_DEVICES", "UCX_TLS"}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("python = 'python3', kv_connector = 'rdma'", "must be one of files, nixl"),
        ("url = 'http://here:8000', kv_connector = 'nixl'", "start the server with that connector"),
    ],
)
@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_a_kv_connector_that_cannot_be_used_is_rejected(
    task: Path, backend: str, options: str, error: str
) -> None:
    given = {**FITTING, "engine.backend": backend, "engine.options": f"{{{options}}}"}
    with pytest.raises(ConfigError, match=error):
        backends.check_backends(load.read_config(task, [f"{key}={value}" for key, value in given.items()]))


class OnSeveralMachines:
    """An engine that migrates requests between machines."""

    capabilities = Capabilities(max_versions=None)
    kv_address = None

    def __init__(self, *, host: str | None, **_: object) -> None:
        self.host, self.connected = host, list[object]()

    def connect(self, *arguments: object) -> None:
        self.connected += arguments


@pytest.mark.parametrize("host", [None, "10.0.0.5"])
def test_an_engine_of_a_run_with_several_machines_opens_migrations_by_the_broker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str | None
) -> None:
    monkeypatch.setattr(backends, "_load_engine", lambda *_: OnSeveralMachines)
    spec = EngineSpec(tmp_path, tmp_path, None, 1, 8, 1, "auto", 0.0, backend="own", host=host)
    engine = backends.make_engine(spec)
    assert isinstance(engine, OnSeveralMachines)
    assert (engine.host, engine.connected[1:]) == (host, [shared_clock] if host else [])


def test_a_configuration_that_the_backend_supports_is_accepted(task: Path) -> None:
    backends.check_backends(load.read_config(task, [f"{key}={value}" for key, value in FITTING.items()]))


def test_a_backend_with_lora_versions_needs_a_trainer_of_lora_adapters(task: Path) -> None:
    options = f'{{python = "{sys.executable}", rank = 4}}'
    fitting = {**FITTING, "engine.backend": "vllm-lora", "engine.options": options}
    changes = [f"{key}={value}" for key, value in fitting.items()]
    with pytest.raises(ConfigError, match=r"set trainer\.lora_rank"):
        backends.check_backends(load.read_config(task, changes))
    backends.check_backends(load.read_config(task, [*changes, "trainer.lora_rank=4"]))


@pytest.mark.parametrize("backend", ["vllm", "sglang", "vllm-lora"])
@pytest.mark.parametrize(
    ("options", "error"),
    {
        "": "give either python, an interpreter, or url, the address of a server",
        'python = "python3", url = "http://here:1"': "either python",
        'python = "nope"': "python = 'nope': no such command",
        "python = 3": "python = 3: no such command",
        'url = "here:8000"': "must read http://host:port",
        'url = "https://here:8000"': "must read http://host:port",
        'url = "http://here"': "must read http://host:port",
        'url = "http://here:99999"': "must read http://host:port",
        'url = "http://here:8000/v1"': "must read http://host:port",
    }.items(),
    ids=["nothing", "both", "no command", "number", "no scheme", "https", "no port", "large port", "a path"],
)
def test_invalid_server_options_are_rejected_before_anything_starts(
    task: Path, backend: str, options: str, error: str
) -> None:
    rank = "rank = 4" if backend == "vllm-lora" else ""
    given = {**FITTING, "trainer.lora_rank": 4, "engine.backend": backend}
    given["engine.options"] = f"{{{', '.join(filter(None, (options, rank)))}}}"
    with pytest.raises(ConfigError, match=rf"engine\.options = .*{error}"):
        backends.check_backends(load.read_config(task, [f"{key}={value}" for key, value in given.items()]))


@pytest.mark.parametrize("backend", ["vllm", "vllm-lora"])
def test_an_interpreter_with_an_untested_vllm_is_rejected_before_anything_starts(
    task: Path, tmp_path: Path, backend: str
) -> None:
    """Asked for the version of its vLLM, this interpreter prints one. `environment` is beside the task."""
    python = tmp_path / "environment"
    python.write_text("#!/bin/sh\necho 0.33.1\n")
    python.chmod(0o700)
    rank = ", rank = 4" if backend == "vllm-lora" else ""
    given = {**FITTING, "trainer.lora_rank": 4, "engine.backend": backend}
    given["engine.options"] = f'{{python = "{python}"{rank}}}'
    changes = [f"{key}={value}" for key, value in given.items()]
    with pytest.raises(ConfigError, match=r"environment has vLLM 0\.33\.1; DORA-RL .* 0\.32: install"):
        backends.check_backends(load.read_config(task, changes))
    python.write_text("#!/bin/sh\necho 0.32.1\n")
    backends.check_backends(load.read_config(task, changes))


def test_a_run_none_of_whose_engines_can_start_ends_with_the_input_error(task: Path, tmp_path: Path) -> None:
    setup, launcher = RunSetup.make(load.read_config(task), tmp_path / "run"), FakeLauncher()
    supervisor = Supervisor(setup.config, setup.out, WorkerMessages(launcher.start))
    with closing(SampleStore(tmp_path / "samples.sqlite")) as samples:
        pool = EnginePool(setup, tmp_path, supervisor, deque(), SampleBook(setup, samples), print)
        for process in launcher.processes:
            process.emit(WorkerCrashed("a traceback", "there is no server; start it"))
            process.kill()
        while pool.workers:
            supervisor.poll(10.0)
        with pytest.raises(InputError, match=r"^there is no server; start it$"):
            pool.check_not_empty()


def test_a_class_without_capabilities_is_rejected(task: Path) -> None:
    with pytest.raises(ConfigError, match="has no attribute capabilities"):
        backends.check_backends(load.read_config(task, [f"engine.backend={TRAINER}"]))


@pytest.mark.parametrize("key", ["engine.kernels=eager", "engine.min_step_time=5ms"])
def test_a_setting_of_doras_own_engine_has_no_effect_on_others(task: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key.partition('=')[0]} has no effect"):
        load.read_config(task, [f"engine.backend={LIMITED}", key])


@pytest.mark.parametrize(
    "key", ["trainer.num_ranks=2", "trainer.lora_rank=2", "trainer.continue_from=checkpoint"]
)
def test_features_of_doras_own_trainer_are_rejected_with_others(task: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="only DORA-RL's own trainer supports"):
        load.read_config(task, [f"trainer.backend={TRAINER}", key])


@pytest.mark.parametrize("key", ["engine", "trainer"])
def test_missing_methods_are_named(task: Path, tmp_path: Path, key: str) -> None:
    body = "    capabilities = Capabilities()\n    def add_samples(self, samples): ...\n"
    (tmp_path / "half.py").write_text(f"from dora.engine.interface import Capabilities\nclass Half:\n{body}")
    missing = "abort, progress, step" if key == "engine" else "accumulate, finish_step, discard_batch"
    with pytest.raises(ConfigError, match=missing):
        backends.check_backends(load.read_config(task, [f"{key}.backend={tmp_path / 'half.py'}:Half"]))


OWN_ENGINE = """
from dora.engine.interface import NATIVE
from dora.engine.engine import Engine

class Own(Engine):
    capabilities = {capabilities}
    def __init__(self, *, model, max_rows, max_context, version_slots, device, dtype{arguments}): ...
"""


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    {
        "surplus": ("", ["engine.options={size=3}"], "'size'; remove it"),
        "missing": (", size", [], r"engine\.options = {}: .* missing .*'size'; add it"),
        "reserved": ("", ["engine.options={dtype='bfloat16'}"], "DORA-RL sets dtype itself; remove it"),
        "update": (
            "",
            ["orchestrator.update_policy=inflight"],
            "'inflight_update'; a backend takes the keywords of .*InferenceFactory",
        ),
    }.values(),
    ids=["surplus", "missing", "reserved", "update"],
)
def test_the_arguments_of_a_backend_are_checked_before_a_run(
    task: Path, tmp_path: Path, arguments: str, changes: list[str], message: str
) -> None:
    source = OWN_ENGINE.format(capabilities="NATIVE", arguments=arguments)
    (tmp_path / "own.py").write_text(source)
    with pytest.raises(ConfigError, match=message):
        backends.check_backends(load.read_config(task, [f"engine.backend={tmp_path}/own.py:Own", *changes]))


def test_doras_own_engine_is_no_backend(task: Path) -> None:
    with pytest.raises(ConfigError, match=r"'model'; a backend takes the keywords of .*InferenceFactory"):
        backends.check_backends(load.read_config(task, ["engine.backend=dora.engine.engine:Engine"]))


def test_an_inflight_update_needs_a_backend_with_two_versions(task: Path, tmp_path: Path) -> None:
    """`engine.version_slots = 1`, the remedy under other policies, is refused under this one."""
    source = OWN_ENGINE.format(
        capabilities="__import__('dataclasses').replace(NATIVE, max_versions=1)",
        arguments=", inflight_update=None",
    )
    (tmp_path / "own.py").write_text(source)
    changes = [f"engine.backend={tmp_path}/own.py:Own", "orchestrator.update_policy=inflight"]
    remedy = "update_policy = inflight needs 2: set orchestrator.update_policy = dora"
    with pytest.raises(ConfigError, match=f"at most 1 version at a time, and {remedy}") as error:
        backends.check_backends(load.read_config(task, changes))
    assert "version_slots" not in str(error.value)


def test_exact_log_probs_need_doras_own_engine(task: Path, tmp_path: Path) -> None:
    """Only its log-probs have the bits of the trainer's."""
    (tmp_path / "own.py").write_text(OWN_ENGINE.format(capabilities="NATIVE", arguments=""))
    changes = [f"engine.backend={tmp_path}/own.py:Own", "engine.exact_logprobs=true"]
    with pytest.raises(ConfigError, match=r"set engine\.exact_logprobs = false"):
        backends.check_backends(load.read_config(task, changes))
