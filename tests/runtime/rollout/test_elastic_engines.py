"""Engines and the nodes they are on: who is asked to leave, and when another one starts."""

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
    """A ground of which a test says what has become."""

    leaving: frozenset[str] = frozenset()
    num_free: int = 0
    host: None = None


@dataclass
class Engines:
    """A fleet: node of each engine that is there. Who starts has no node yet."""

    nodes: dict[int, str]
    ends: dict[int, str] = field(default_factory=dict)
    starting: set[int] = field(default_factory=set)

    @property
    def workers(self) -> dict[int, Any]:
        return {engine: SimpleNamespace(node=node) for engine, node in self.nodes.items()}

    @property
    def joined(self) -> set[int]:
        return self.nodes.keys() - self.starting

    staying = joined

    def start(self) -> int:
        engine = max((*self.nodes, *self.ends)) + 1
        self.nodes[engine] = ""
        self.starting.add(engine)
        return engine

    def end(self, engine: int, how: str) -> None:
        del self.nodes[engine]
        self.ends[engine] = how


class Case:
    """Two engines, one of them on node b; at most as many as `most`."""

    def __init__(self, folder: Path, *changes: str) -> None:
        config = load.read_config(write_task(folder), ["runtime.kind=ray", *changes])
        self.nodes, self.engines = Nodes(), Engines({0: "", 1: "b" * 40})
        self.facts: deque[Event] = deque()
        self.said: list[str] = []
        plan: Any = SimpleNamespace(config=config)
        fleet: Any = self.engines
        nodes: Any = self.nodes
        self.elastic = ElasticEngines(plan, nodes, fleet, self.facts, self.said.append)


def test_who_is_on_a_node_that_goes_is_asked_to_leave_it_once(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.elastic.scale()
    assert not case.facts
    case.nodes.leaving = frozenset({"b" * 40})
    case.elastic.scale()
    case.elastic.scale()
    assert [*case.facts] == [DrainRequested(1)]
    assert case.said == ["node bbbbbbbb is drained: engine 1 leaves it"]


def test_who_may_not_leave_yet_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "ASK_AGAIN_S", -1.0)
    case = Case(tmp_path)
    case.nodes.leaving = frozenset({"b" * 40})
    case.elastic.scale()
    case.elastic.scale()
    assert [*case.facts] == [DrainRequested(1)] * 2
    assert len(case.said) == 1


@pytest.mark.parametrize(("how", "num_started"), [("left", 1), ("lost (silent)", 0)])
def test_another_engine_stands_in_for_one_that_left_and_restarts_see_to_the_lost(
    tmp_path: Path, how: str, num_started: int
) -> None:
    case = Case(tmp_path)
    case.nodes.leaving = frozenset({"b" * 40})
    case.elastic.scale()
    case.engines.end(1, how)
    case.elastic.scale()
    assert not case.engines.starting, "there is no room yet"
    case.nodes.num_free = 1
    case.elastic.scale()
    assert len(case.engines.starting) == num_started


def test_engines_start_one_by_one_until_there_are_as_many_as_may_be(tmp_path: Path) -> None:
    case = Case(tmp_path, "ray.max_engines=4")
    case.nodes.num_free = 5
    for engine in (2, 3):
        case.elastic.scale()
        case.elastic.scale()
        assert case.engines.starting == {engine}
        case.engines.starting.clear()
    case.elastic.scale()
    assert not case.engines.starting
    assert case.said == [f"engine {engine} starts, for there is room" for engine in (2, 3)]


def test_fewer_engines_at_most_than_at_the_start_are_refused(tmp_path: Path) -> None:
    config = load.read_config(write_task(tmp_path), ["runtime.kind=ray", "ray.max_engines=1"])
    with pytest.raises(ConfigError, match=r"ray\.max_engines = 1 is less than the 2 engines"):
        launcher.check_ray_config(config)
