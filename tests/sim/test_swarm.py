"""Random worlds keep the guarantees, come to their end, and are the same for ever."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dora.core import batching, codec
from dora.core.events import Event
from dora.core.orchestrator import Orchestrator
from dora.core.records import ABLATIONS
from dora.sim import swarm
from dora.sim.marks import MARKS
from dora.sim.models import FAMILIES, draw_config
from dora.sim.swarm import Outcome, replays_alike, run_world

NUM_MARKED_SEEDS = 1_000
NUM_SEEDS = 60  # `make test` runs 200 by the command
REGRESSIONS = Path(__file__).with_name("regressions.txt")


def read_regressions() -> dict[int, str]:
    """Seed -> cause."""
    lines = (line.partition("#") for line in REGRESSIONS.read_text().splitlines() if line.strip())
    return {int(seed): cause.strip() for seed, _, cause in lines if seed}


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [run_world(seed) for seed in range(NUM_SEEDS)]


def test_every_world_keeps_the_guarantees_and_comes_to_its_end(outcomes: list[Outcome]) -> None:
    assert {outcome.seed: outcome.verdict for outcome in outcomes if outcome.verdict != "ok"} == {}


def test_the_worlds_use_every_fact_and_every_order(outcomes: list[Outcome]) -> None:
    kinds = {cls.__name__ for cls in (*codec.FACTS.values(), *codec.ORDERS.values())}
    assert kinds - {kind for outcome in outcomes for kind in outcome.seen} == set()


def test_every_mark_is_met_and_every_situation_is_a_mark() -> None:
    met: set[str] = set()
    for seed in range(NUM_MARKED_SEEDS):
        met |= {name for name in run_world(seed).seen if ": " in name}
        if met == {*MARKS}:
            return
    assert {*MARKS} - met == set(), "no world came into these situations"
    assert met - {*MARKS} == set(), "these are not in MARKS"


def test_the_worlds_use_up_the_bound_and_never_more(outcomes: list[Outcome]) -> None:
    unused = [draw_config(o.seed).limits.max_staleness - o.max_staleness for o in outcomes]
    assert min(unused) == 0
    assert {draw_config(o.seed).limits.max_staleness for o in outcomes} >= {0, 1, 2, 3, 4}
    assert {o.max_staleness for o in outcomes} >= {0, 1, 2, 3}


def test_worlds_differ_in_size_speed_and_policy() -> None:
    configs = [draw_config(seed) for seed in range(400)]
    sizes = {len(c.engines) for c in configs}
    assert sizes >= {1, 2, 3, 4, 5, 6, 8, 12}
    assert max(sizes) > 48
    assert {c.limits.max_staleness for c in configs} == {*range(9)}
    assert {c.family for c in configs} == {*FAMILIES}
    assert any(slots > c.limits.max_staleness + 1 for c in configs for _, slots in c.engines)
    assert any(c.num_colocated == len(c.engines) > 1 for c in configs)
    assert any(0 < c.num_colocated < len(c.engines) for c in configs)
    varied = ("batches_per_version", "slack", "load_interval", "is_deferred", "skip_below_kl", "is_static")
    for field in (*varied, "level_running", "rush", "aging"):
        assert len({getattr(c.limits, field) for c in configs}) >= 2, field
    assert {part for c in configs for part in c.limits.without} == {*ABLATIONS}
    assert {len(c.limits.without) for c in configs} >= {0, 1, 2, len(ABLATIONS)}


@pytest.mark.parametrize("seed", range(0, NUM_SEEDS, 3))
def test_an_orchestrator_that_never_crashed_gives_the_same_orders(outcomes: list[Outcome], seed: int) -> None:
    assert replays_alike(outcomes[seed], Orchestrator(draw_config(seed).limits))


class Thorough(Orchestrator):
    """Asks all rules after each fact, and remembers nothing; counts the facts after which it need not ask."""

    num_calm = 0

    def _is_calm(self, event: Event) -> bool:
        self.num_calm += super()._is_calm(event)
        self.snapshot().admissible.clear()
        return False


def test_a_calm_fact_leaves_the_rules_nothing_to_order(outcomes: list[Outcome]) -> None:
    cores = [Thorough(draw_config(outcome.seed).limits) for outcome in outcomes]
    assert all(replays_alike(outcome, core) for outcome, core in zip(outcomes, cores, strict=True))
    assert sum(core.num_calm for core in cores) > 0.02 * sum(outcome.num_events for outcome in outcomes)


def test_orchestrators_crash_in_many_worlds(outcomes: list[Outcome]) -> None:
    assert sum(outcome.seen["crash"] > 0 for outcome in outcomes[::3]) >= 5


def test_everything_dies_in_many_worlds(outcomes: list[Outcome]) -> None:
    assert sum(outcome.seen["Resumed"] > 0 for outcome in outcomes) >= 10


@pytest.mark.parametrize("seed", range(0, NUM_SEEDS, 12))
def test_a_seed_is_the_same_world_for_ever(outcomes: list[Outcome], seed: int) -> None:
    assert run_world(seed) == outcomes[seed]


@pytest.mark.parametrize("seed", read_regressions())
def test_a_seed_that_once_failed_stays_right(seed: int) -> None:
    """Also by the whole rules, where the world of this seed has come to do without some."""
    config = draw_config(seed)
    for without in {(), config.limits.without}:
        world = replace(config, limits=replace(config.limits, without=without))
        assert run_world(seed, world).verdict == "ok", read_regressions()[seed]


def test_every_regression_names_its_cause() -> None:
    assert all(read_regressions().values())


def test_the_last_line_printed_is_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert swarm.main(3, as_json=True) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["seeds"] == 3
    assert summary["violations"] == summary["deadlocks"] == 0
    assert summary["events"] > summary["median_events_per_world"] > 0
    assert {
        "migrations",
        "migrations_failed",
        "steps_repeated",
        "crashes",
        "drains",
        "marks",
    } < summary.keys()
    assert swarm.main(3, as_json=False) == 0
    assert capsys.readouterr().out.startswith("seeds 3, events ")


def test_a_failed_world_is_named_and_makes_the_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batching, "train", lambda state: [])
    monkeypatch.setattr(swarm, "MAX_EVENTS", 2_000)
    assert swarm.main(1, as_json=True) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("seed 0: deadlock: ")
    (failure,) = json.loads(last)["failures"]
    assert failure["seed"] == 0
    assert failure["verdict"].startswith("deadlock")
