"""Runs on Ray: the same record and the same guarantees, whatever dies; nothing is left behind.

Ray's own tests are Ray's. What is held here is that a run sees for itself who is dead, or hangs.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import psutil
import pytest
from tests.runs.conftest import StartRun
from tests.runtime.running import Run, dora, journal, summary, wait_until_gone

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")

from tests.runtime.process.ray_cluster import add_node, two_nodes

RAY = {"runtime__kind": "ray"}
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
ENGINES = tuple(f"engine {number}" for number in range(3))


def told(run: Run, name: str) -> dict[str, Any]:
    """Of a process of the run, as `dora status` has it; nothing: it is not there."""
    path = run.out / "status.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"processes": []}
    return next((process for process in found["processes"] if process["name"] == name), {})


def listening(processes: Iterable[psutil.Process]) -> set[str]:
    """The addresses on which they wait for somebody."""
    found = [one for process in processes for one in process.net_connections("inet")]
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN}


def drain(cluster: Any, node: Any) -> None:
    """As a cloud does that takes a machine back in a minute."""
    raylet = importlib.import_module("ray._raylet")  # without annotations
    until_ms = int((time.time() + 60.0) * 1000)
    raylet.GcsClient(address=cluster.address).drain_node(node.node_id, 2, "it is taken back", until_ms)


def check(run: Run, **wanted: int) -> None:
    """It has ended well, its record holds the guarantees, and `wanted` is in its summary."""
    ended = run.end()
    assert (ended.code, ended.err) == (0, ""), ended
    s = summary(run.out)
    assert (s["c1"], s["c2"], s["c3"], s["pending_groups"]) == (True, True, True, 0)
    assert {name: s[name] for name in wanted} == wanted
    audit, replay = dora("audit", run.out), dora("replay", run.out)
    assert (audit.code, replay.code) == (0, 0), (audit, replay)
    assert run.weight_folders() == []


def on(run: Run, name: str) -> str:
    """The node where it is, other than the driver's."""
    return str(told(run, name).get("node", ""))


def is_another(run: Run, storage: int) -> bool:
    """Whether there is a storage, and it is not that one."""
    return told(run, "storage").get("pid") not in (None, storage)


def kinds(run: Run, engine: int) -> list[str]:
    """What has become of an engine."""
    return [line["kind"] for line in journal(run.out) if line.get("engine") == engine]


def test_a_run_starts_ray_by_itself_and_leaves_an_actor_that_hangs(start_run: StartRun) -> None:
    """To Ray, it is alive."""
    run = start_run(**RAY, run__steps=20, engine__min_step_time="20ms", runtime__heartbeat_timeout_s=2)
    run.wait_for_steps(1)
    started = psutil.Process(run.pid).children(recursive=True)
    raylet = next(process for process in started if "raylet" in process.name())
    assert raylet.environ()["RAY_AUTH_MODE"] == "token"
    run.wait_until(lambda: "pid" in told(run, "engine 0"), "engine 0")
    assert {address for address in listening(started) if not address.startswith(LOOPBACK)} == set()
    engine = psutil.Process(told(run, "engine 0")["pid"])
    assert "ray::" in " ".join(engine.cmdline())
    engine.suspend()
    run.wait_until(lambda: "engine_lost" in kinds(run, 0), "the loss")
    check(run, engine_failures=1, trained_groups=40)
    assert "silent for more than runtime.heartbeat_timeout_s = 2" in run.end().out
    assert "another one takes its place" in run.end().out
    assert wait_until_gone(started, 10.0) == []


def test_a_stop_of_the_whole_process_group_ends_a_run_that_started_ray(start_run: StartRun) -> None:
    """As `timeout` and some schedulers stop it: Ray's own processes, which the run would ask, go with it."""
    run = start_run(**RAY, run__steps=10_000, engine__min_step_time="20ms", trainer__save_freq=2)
    run.wait_for_steps(1)
    started = psutil.Process(run.pid).children(recursive=True)
    os.killpg(run.pid, signal.SIGTERM)
    assert (run.end().code, summary(run.out)["stopped"]) == (130, "SIGTERM")
    assert run.weight_folders() == []
    assert wait_until_gone(started, 10.0) == []


def test_a_storage_that_dies_takes_no_sample_with_it(start_run: StartRun) -> None:
    """It is replaced twice: one is killed, and one hangs. What it had is offered again and judged once."""
    run = start_run(**RAY, run__steps=20, engine__min_step_time="20ms", runtime__heartbeat_timeout_s=2)
    for harm, num_steps in ((psutil.Process.kill, 2), (psutil.Process.suspend, 8)):
        run.wait_for_steps(num_steps)
        storage = psutil.Process(told(run, "storage")["pid"])
        assert "ray::" in " ".join(storage.cmdline())
        harm(storage)
        run.wait_until(partial(is_another, run, storage.pid), "another storage")
    check(run, trained_groups=40, engine_failures=0)
    assert run.end().out.count("the storage of the sample stream is lost") == 2


@pytest.mark.timeout(300)
def test_engines_follow_the_nodes_that_come_and_go(start_run: StartRun) -> None:
    """An engine takes 3 CPUs, so that there is one on each node, and room for a third on a third one."""
    cluster = two_nodes()
    visitor = add_node(cluster, 3)
    changes = {"ray__address": cluster.address, "ray__engine_cpus": 3, "engine__num_engines": 3}
    run = start_run(**RAY, **changes, run__steps=10_000, engine__min_step_time="50ms")
    run.wait_for_steps(1)
    run.wait_until(lambda: visitor.node_id[:8] in map(partial(on, run), ENGINES), "an engine on each node")
    drained = next(number for number, name in enumerate(ENGINES) if on(run, name) == visitor.node_id[:8])
    drain(cluster, visitor)
    run.wait_until(
        lambda: "engine_removed" in kinds(run, drained), "an engine leaves the node that is drained"
    )
    assert "engine_lost" not in kinds(run, drained)
    cluster.remove_node(visitor)
    guest = add_node(cluster, 3)
    run.wait_until(lambda: "engine_joined" in kinds(run, 3), "an engine joins where there is room")
    psutil.Process(guest.all_processes["raylet"][0].process.pid).kill()
    run.wait_until(lambda: "engine_lost" in kinds(run, 3), "the loss of a node")
    os.kill(run.pid, signal.SIGTERM)
    ended, s = run.end(), summary(run.out)
    assert (s["c1"], s["c2"], s["c3"], s["engine_failures"], s["reprefill_tokens"]) == (
        True,
        True,
        True,
        1,
        0,
    )
    audit, replay = dora("audit", run.out), dora("replay", run.out)
    assert (audit.code, replay.code) == (0, 0), (audit, replay)
    assert f"node {visitor.node_id[:8]} is drained: engine {drained} leaves it" in ended.out
    assert "(raylet)" not in ended.out
    cluster.remove_node(guest)


def test_a_trainer_and_then_the_driver_die_and_the_run_goes_on(start_run: StartRun) -> None:
    """The one is replaced while the run goes; after the other it is resumed, without Ray."""
    cluster = two_nodes()
    run = start_run(
        **RAY, ray__address=cluster.address, run__steps=12, trainer__save_freq=2, engine__min_step_time="20ms"
    )
    run.wait_for_steps(3)
    psutil.Process(told(run, "trainer")["pid"]).kill()
    run.wait_until(
        lambda: any(line["kind"] == "trainer_replaced" for line in journal(run.out)), "another trainer"
    )
    os.kill(run.pid, signal.SIGKILL)
    run.end()
    gone_on = Run(None, run.out, runtime__kind="local")
    try:
        assert gone_on.end().code == 0, gone_on.end()
    finally:
        gone_on.kill_all()
    s = summary(run.out)
    assert (s["c1"], s["c2"], s["c3"], s["trained_groups"], s["pending_groups"]) == (True, True, True, 24, 0)
    audit, replay = dora("audit", run.out), dora("replay", run.out)
    assert (audit.code, replay.code) == (0, 0), (audit, replay)
