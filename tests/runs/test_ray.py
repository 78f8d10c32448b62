"""Runs on Ray hold the same guarantees whichever process crashes or hangs, and leave no process behind."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.runs.conftest import StartRun
from tests.runtime.running import Run, dora, journal, metrics, summary, wait_until_gone
from tests.runtime.tiny import write_task

from dora.trainer.checkpoint import load_checkpoint
from dora.weights.store import MEMORY_FS, STORE_PREFIX

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")

from tests.runs.ray_cluster import add_node, two_nodes

pytestmark = pytest.mark.timeout(400)

RAY = {"runtime__kind": "ray"}
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
RAY_COMMAND = Path(sys.executable).with_name("ray")
ENGINES = tuple(f"engine {number}" for number in range(3))


def process_status(run: Run, name: str) -> dict[str, Any]:
    """A process of the run in status.json; empty if it is not there."""
    path = run.out / "status.json"
    status: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"processes": []}
    return next((process for process in status["processes"] if process["name"] == name), {})


def listening_addresses(processes: Iterable[psutil.Process]) -> set[str]:
    """The addresses on which the processes accept connections."""
    connections = [each for process in processes for each in process.net_connections("inet")]
    return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}


def ray_status(address: str, **settings: str) -> tuple[int, str]:
    """Exit code and output of `ray status`, with Ray's settings as docs/ray.md has them."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", **settings}
    command = [str(RAY_COMMAND), "status", "--address", address]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60.0, check=False)
    return done.returncode, done.stdout + done.stderr


def check_ray_status(run: Run, processes: Iterable[psutil.Process]) -> None:
    """`ray status` works for the Ray of a run, with the auth token only."""
    gcs = next(process for process in processes if "gcs_server" in process.name())
    (port,) = {each.laddr.port for each in gcs.net_connections("inet") if each.status == psutil.CONN_LISTEN}
    address = f"127.0.0.1:{port}"
    run.wait_until(
        lambda: "Total Usage" in ray_status(address, RAY_AUTH_MODE="token")[1], "a report of Ray's monitor"
    )
    wrong = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    for settings in ({"RAY_AUTH_MODE": "disabled"}, wrong):
        code, text = ray_status(address, **settings)
        assert code == 1
        assert "Authentication token is missing or incorrect" in text
        assert "Total Usage" not in text


def check_cannot_add(run: Run, text: str) -> None:
    """An engine for which the cluster has no place is refused at once."""
    began_s, added = time.monotonic(), dora("engines", "add", run.out)
    assert (added.code, added.out.partition(";")[0]) == (1, f"no place for 1 more engine: {text}")
    assert time.monotonic() - began_s < 30.0, "less than runtime.start_timeout_s"


def drain(cluster: Any, node: Any) -> None:
    """Drain a node, as a cloud does that preempts a machine in a minute."""
    raylet = importlib.import_module("ray._raylet")  # it has no type annotations
    until_ms = int((time.time() + 60.0) * 1000)
    raylet.GcsClient(address=cluster.address).drain_node(node.node_id, 2, "preempted", until_ms)


def node_of(run: Run, name: str) -> str:
    """The node of a process; "" if it is the driver's."""
    return str(process_status(run, name).get("node", ""))


def has_new_storage(run: Run, old_pid: int) -> bool:
    return process_status(run, "storage").get("pid") not in (None, old_pid)


def kinds(run: Run, engine: int) -> list[str]:
    """The kinds of all events of an engine."""
    return [line["kind"] for line in journal(run.out) if line.get("engine") == engine]


def test_a_run_starts_ray_on_loopback_and_replaces_a_hanging_engine_and_two_storages(
    start_run: StartRun,
) -> None:
    """To Ray, a hanging actor is alive. The first storage crashes, the second hangs. No group is lost.

    At last the whole process group gets a signal, as `timeout` and some schedulers send it: Ray exits as
    well, so the run cannot use it to clean up.
    """
    num_cores = os.cpu_count() or 1
    slow = {"run__steps": 10_000, "engine__min_step_time": "60ms"}  # most of the time it waits for Ray
    run = start_run(**RAY, **slow, runtime__heartbeat_timeout_s=2, ray__engine_cpus=num_cores)
    run.wait_for_steps(1)
    started = psutil.Process(run.pid).children(recursive=True)
    raylet = next(process for process in started if "raylet" in process.name())
    assert raylet.environ()["RAY_AUTH_MODE"] == "token"
    run.wait_until(lambda: "pid" in process_status(run, "engine 0"), "engine 0")
    assert {address for address in listening_addresses(started) if not address.startswith(LOOPBACK)} == set()
    check_cannot_add(run, f"each engine needs {num_cores} CPU on one node, free by node: 0 CPU")
    engine = psutil.Process(process_status(run, "engine 0")["pid"])
    assert " ".join(engine.cmdline()).startswith(f"ray::dora-{run.out.name}-engine-0")
    engine.suspend()
    run.wait_until(lambda: "engine_lost" in kinds(run, 0), "the loss")
    for harm in (psutil.Process.kill, psutil.Process.suspend):
        run.wait_for_steps(len(metrics(run.out)) + 2)
        storage = psutil.Process(process_status(run, "storage")["pid"])
        assert "ray::" in " ".join(storage.cmdline())
        harm(storage)
        run.wait_until(partial(has_new_storage, run, storage.pid), "another storage")
    storage = psutil.Process(process_status(run, "storage")["pid"])
    assert " ".join(storage.cmdline()).startswith(f"ray::dora-{run.out.name}-storage-restart-2")
    run.wait_for_steps(len(metrics(run.out)) + 2)
    check_ray_status(run, started)
    os.killpg(run.pid, signal.SIGTERM)
    ended = run.end()
    assert ended.code == 130, ended
    s = summary(run.out)
    run.check_records()
    assert (s["stopped"], s["engine_failures"]) == ("SIGTERM", 1)
    assert s["trained_groups"] == 2 * s["steps"]
    assert "no heartbeat for more than runtime.heartbeat_timeout_s = 2 s" in ended.out
    assert "in place of engine 0" in ended.out
    assert "Ray runs at 127.0.0.1:" in ended.out
    assert "auth_token" in ended.out
    assert ended.out.count("the storage of the sample stream is lost") == 2
    assert run.weight_folders() == []
    assert wait_until_gone(started) == []


def test_a_program_that_a_reward_function_has_started_ends_with_a_run_on_ray(
    start_run: StartRun, tmp_path: Path
) -> None:
    reward = f"""
import subprocess
def reward(prompt, completion, **row):
    program = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open({str(tmp_path / "pids")!r}, "a") as file:
        print(program.pid, file=file)
    return len(set(completion)) / 100
"""
    run = start_run(write_task(tmp_path, reward), **RAY, run__steps=10_000)
    run.wait_for_steps(1)
    os.kill(run.pid, signal.SIGTERM)
    assert run.end().code == 130
    pids = map(int, (tmp_path / "pids").read_text().split())
    programs = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert [each for each in programs if each.name() == "sleep" and wait_until_gone([each], 5.0)] == []


def test_engines_are_removed_and_added_with_the_nodes_of_the_cluster(start_run: StartRun) -> None:
    """An engine needs 3 CPUs: each node has room for one."""
    cluster = two_nodes()
    third = add_node(cluster, 3)
    changes = {"ray__address": cluster.address, "ray__engine_cpus": 3, "engine__num_engines": 3}
    run = start_run(**RAY, **changes, run__steps=10_000, engine__min_step_time="50ms")
    run.wait_for_steps(1)
    check_cannot_add(run, "each engine needs 3 CPU on one node, free by node: 0 CPU, 0 CPU, 0 CPU")
    run.wait_until(
        lambda: third.node_id[:8] in map(partial(node_of, run), ENGINES), "an engine on the third node"
    )
    pids = [process_status(run, name)["pid"] for name in ENGINES]
    drained = next(number for number, name in enumerate(ENGINES) if node_of(run, name) == third.node_id[:8])
    drain(cluster, third)
    run.wait_until(lambda: "engine_removed" in kinds(run, drained), "the removal of the drained engine")
    assert "engine_lost" not in kinds(run, drained)
    cluster.remove_node(third)
    fourth = add_node(cluster, 3)
    run.wait_until(lambda: "engine_joined" in kinds(run, 3), "an engine on the fourth node")
    psutil.Process(fourth.all_processes["raylet"][0].process.pid).kill()
    run.wait_until(lambda: "engine_lost" in kinds(run, 3), "the loss of a node")
    os.kill(run.pid, signal.SIGTERM)
    ended, s = run.end(), summary(run.out)
    run.check_records()
    assert (s["engine_failures"], s["reprefill_tokens"]) == (1, 0)
    assert f"node {third.node_id[:8]} is draining: removing engine {drained}" in ended.out
    assert "(raylet)" not in ended.out
    cluster.remove_node(fourth)
    assert [folder for pid in pids for folder in MEMORY_FS.glob(f"{STORE_PREFIX}{pid}-*")] == [], "KV pools"


def test_a_run_survives_its_trainer_and_is_resumed_after_its_driver_without_ray(start_run: StartRun) -> None:
    cluster = two_nodes()
    run = start_run(
        **RAY, ray__address=cluster.address, run__steps=12, trainer__save_freq=2, engine__min_step_time="20ms"
    )
    run.wait_for_steps(3)
    psutil.Process(process_status(run, "trainer")["pid"]).kill()
    run.wait_until(
        lambda: any(line["kind"] == "trainer_replaced" for line in journal(run.out)), "another trainer"
    )
    os.kill(run.pid, signal.SIGKILL)
    run.end()
    resumed = Run(None, run.out, runtime__kind="local")
    try:
        resumed.succeed()
    finally:
        resumed.kill_all()
    run.check_records()
    s = summary(run.out)
    assert (s["trained_groups"], s["pending_groups"]) == (24, 0)


def test_ranks_on_two_nodes_train_what_one_rank_trains(
    start_run: StartRun, task: Path, tmp_path: Path
) -> None:
    """On-policy and in a fixed order. Each node has room for one rank; the second one crashes."""
    cluster = two_nodes()
    on_policy = {"orchestrator__max_staleness": 0, "trainer__deterministic": "true", "run__steps": 6}
    single = Run(task, tmp_path / "single", **on_policy)  # type: ignore[arg-type]
    ranks = {"trainer__num_ranks": 2, "ray__trainer_nodes": "any", "trainer__save_freq": 2}
    places = {"ray__trainer_cpus": 3, "engine__num_engines": 1}
    run = start_run(**RAY, ray__address=cluster.address, **ranks, **places, **on_policy)
    run.wait_for_steps(3)
    assert (node_of(run, "trainer"), bool(node_of(run, "trainer rank 1"))) == ("", True)
    psutil.Process(process_status(run, "trainer rank 1")["pid"]).kill()
    run.succeed()
    assert "trainer lost (trainer rank 1 " in run.end().out
    run.check_records()
    single.succeed()
    found, expected = (load_checkpoint(each.out / "checkpoints" / "step-6")[1] for each in (run, single))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
