"""Engines on draining nodes are drained, and engines start while the cluster has free slots."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.runtime.tiny import write_task

from dora.config import load
from dora.core.events import DrainRequested, Event
from dora.errors import ConfigError
from dora.runtime.process import launcher
from dora.runtime.rollout import engine_pool
from dora.runtime.rollout.engine_pool import ElasticEngines


@dataclass
class Nodes:
    """A launcher whose nodes a test controls."""

    draining_nodes: frozenset[str] = frozenset()
    num_free_slots: int = 0
    host: None = None


@dataclass
class Engines:
    """An engine pool: the node of each engine; "" while it starts."""

    nodes: dict[int, str]
    end_states: dict[int, str] = field(default_factory=dict)
    starting: set[int] = field(default_factory=set)

    @property
    def workers(self) -> dict[int, Any]:
        return {
            engine: SimpleNamespace(process=SimpleNamespace(node=node)) for engine, node in self.nodes.items()
        }

    @property
    def joined(self) -> set[int]:
        return self.nodes.keys() - self.starting

    active = joined

    def start(self) -> int:
        engine = max((*self.nodes, *self.end_states)) + 1
        self.nodes[engine] = ""
        self.starting.add(engine)
        return engine

    def end(self, engine: int, state: str) -> None:
        del self.nodes[engine]
        self.end_states[engine] = state


class Case:
    """Two engines; engine 1 is on node b."""

    def __init__(self, folder: Path, *changes: str) -> None:
        config = load.read_config(write_task(folder), ["runtime.kind=ray", *changes])
        self.nodes, self.engines = Nodes(), Engines({0: "", 1: "b" * 40})
        self.events: deque[Event] = deque()
        self.notices: list[str] = []
        setup: Any = SimpleNamespace(config=config)
        engine_pool: Any = self.engines
        launcher: Any = self.nodes
        self.elastic = ElasticEngines(setup, launcher, engine_pool, self.events, self.notices.append)


def test_an_engine_on_a_draining_node_is_drained_once(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.elastic.scale()
    assert not case.events
    case.nodes.draining_nodes = frozenset({"b" * 40})
    case.elastic.scale()
    case.elastic.scale()
    assert [*case.events] == [DrainRequested(1)]
    assert case.notices == ["node bbbbbbbb is draining: removing engine 1"]


def test_a_rejected_drain_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "DRAIN_RETRY_S", -1.0)
    case = Case(tmp_path)
    case.nodes.draining_nodes = frozenset({"b" * 40})
    case.elastic.scale()
    case.elastic.scale()
    assert [*case.events] == [DrainRequested(1)] * 2
    assert len(case.notices) == 1


@pytest.mark.parametrize(("state", "num_started"), [(engine_pool.REMOVED, 1), ("lost (timed out)", 0)])
def test_a_removed_engine_is_replaced_and_a_lost_one_is_left_to_the_restarts(
    tmp_path: Path, state: str, num_started: int
) -> None:
    case = Case(tmp_path)
    case.nodes.draining_nodes = frozenset({"b" * 40})
    case.elastic.scale()
    case.engines.end(1, state)
    case.elastic.scale()
    assert not case.engines.starting, "no slot is free yet"
    case.nodes.num_free_slots = 1
    case.elastic.scale()
    assert len(case.engines.starting) == num_started


def test_engines_start_one_by_one_up_to_the_maximum(tmp_path: Path) -> None:
    case = Case(tmp_path, "ray.max_engines=4")
    case.nodes.num_free_slots = 5
    for engine in (2, 3):
        case.elastic.scale()
        case.elastic.scale()
        assert case.engines.starting == {engine}
        case.engines.starting.clear()
    case.elastic.scale()
    assert not case.engines.starting
    assert case.notices == [f"starting engine {engine}: the cluster has a free slot" for engine in (2, 3)]


def test_an_engine_whose_node_left_before_it_started_is_started_again(tmp_path: Path) -> None:
    case = Case(tmp_path, "ray.max_engines=3")
    case.nodes.num_free_slots = 1
    case.elastic.scale()
    case.nodes.num_free_slots = 0
    case.engines.end(2, f"{engine_pool.NO_PLACE} on the cluster")
    case.elastic.scale()
    assert case.engines.nodes.keys() == {0, 1}
    case.nodes.num_free_slots = 1
    case.elastic.scale()
    assert case.engines.nodes.keys() == {0, 1, 3}


def test_max_engines_below_num_engines_is_rejected(tmp_path: Path) -> None:
    config = load.read_config(write_task(tmp_path), ["runtime.kind=ray", "ray.max_engines=1"])
    with pytest.raises(ConfigError, match=r"ray\.max_engines = 1 is less than the 2 engines"):
        launcher.check_ray_config(config)
