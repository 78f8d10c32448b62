"""Random worlds keep the guarantees, finish, and are deterministic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dora.core import batching, codec
from dora.core.events import Event
from dora.core.orchestrator import Orchestrator
from dora.core.types import ABLATIONS
from dora.sim import swarm
from dora.sim.random_config import LENGTH_FAMILIES, draw_world_config
from dora.sim.swarm import WorldOutcome, run_swarm, run_world

NUM_SEEDS = 60  # `make test` runs 200 by the command
REGRESSIONS = Path(__file__).with_name("regressions.txt")


def read_regressions() -> dict[int, str]:
    """Seed -> cause."""
    lines = (line.partition("#") for line in REGRESSIONS.read_text().splitlines() if line.strip())
    return {int(seed): cause.strip() for seed, _, cause in lines if seed}


@pytest.fixture(scope="module")
def outcomes() -> list[WorldOutcome]:
    return [run_world(seed) for seed in range(NUM_SEEDS)]


def test_every_world_keeps_the_guarantees_and_finishes(outcomes: list[WorldOutcome]) -> None:
    assert {outcome.seed: outcome.verdict for outcome in outcomes if outcome.verdict != "ok"} == {}


def test_the_worlds_use_every_event_and_every_action(outcomes: list[WorldOutcome]) -> None:
    kinds = {cls.__name__ for cls in codec.RECORDS.values()}
    assert kinds - {kind for outcome in outcomes for kind in outcome.coverage} == set()


def test_the_worlds_reach_the_bound_and_never_exceed_it(outcomes: list[WorldOutcome]) -> None:
    unused = [draw_world_config(o.seed).limits.max_staleness - o.max_staleness for o in outcomes]
    assert min(unused) == 0
    assert {draw_world_config(o.seed).limits.max_staleness for o in outcomes} >= {0, 1, 2, 3, 4}
    assert {o.max_staleness for o in outcomes} >= {0, 1, 2, 3}


def test_worlds_differ_in_size_speed_and_policy() -> None:
    configs = [draw_world_config(seed) for seed in range(400)]
    sizes = {len(c.engines) for c in configs}
    assert sizes >= {1, 2, 3, 4, 5, 6, 8, 12}
    assert max(sizes) > 48
    assert {c.limits.max_staleness for c in configs} == {*range(9)}
    assert {c.length_family for c in configs} == {*LENGTH_FAMILIES}
    assert any(slots > c.limits.max_staleness + 1 for c in configs for _, slots in c.engines)
    assert any(c.num_colocated == len(c.engines) > 1 for c in configs)
    assert any(0 < c.num_colocated < len(c.engines) for c in configs)
    varied = (
        "batches_per_version",
        "slack",
        "weight_sync_interval",
        "defers_loads",
        "skip_below_kl",
        "is_static",
    )
    for field in (*varied, "balance_running", "prioritize_stragglers", "adaptive_staleness", "curriculum"):
        assert len({getattr(c.limits, field) for c in configs}) >= 2, field
    assert {part for c in configs for part in c.limits.ablations} == {*ABLATIONS}
    assert {len(c.limits.ablations) for c in configs} >= {0, 1, 2, len(ABLATIONS)}


def replays_equally(outcome: WorldOutcome, orchestrator: Orchestrator) -> bool:
    """Whether a new orchestrator, which never crashes, gives the same actions for the recorded events."""
    orchestrator.start(0.0)
    return all(orchestrator.handle(event, now) == actions for now, event, actions in outcome.record)


@pytest.mark.parametrize("seed", range(0, NUM_SEEDS, 3))
def test_an_orchestrator_that_never_crashed_gives_the_same_actions(
    outcomes: list[WorldOutcome], seed: int
) -> None:
    assert replays_equally(outcomes[seed], Orchestrator(draw_world_config(seed).limits))


class ThoroughOrchestrator(Orchestrator):
    """Decides after each event, without a cache; counts the events that need no decision."""

    num_without_decision = 0

    def _needs_no_decision(self, event: Event) -> bool:
        self.num_without_decision += super()._needs_no_decision(event)
        self.snapshot().admissible_cache.clear()
        return False


def test_events_that_need_no_decision_lead_to_no_action(outcomes: list[WorldOutcome]) -> None:
    thorough = [ThoroughOrchestrator(draw_world_config(outcome.seed).limits) for outcome in outcomes]
    assert all(replays_equally(outcome, one) for outcome, one in zip(outcomes, thorough, strict=True))
    num_events = sum(outcome.num_events for outcome in outcomes)
    assert sum(one.num_without_decision for one in thorough) > 0.02 * num_events


def test_orchestrators_crash_in_many_worlds(outcomes: list[WorldOutcome]) -> None:
    assert sum(outcome.coverage["orchestrator crash"] > 0 for outcome in outcomes[::3]) >= 5


def test_the_whole_run_crashes_in_many_worlds(outcomes: list[WorldOutcome]) -> None:
    assert sum(outcome.coverage["Resumed"] > 0 for outcome in outcomes) >= 10


@pytest.mark.parametrize("seed", range(0, NUM_SEEDS, 12))
def test_a_seed_always_gives_the_same_world(outcomes: list[WorldOutcome], seed: int) -> None:
    assert run_world(seed) == outcomes[seed]


@pytest.mark.parametrize("seed", read_regressions())
def test_a_seed_that_once_failed_passes(seed: int) -> None:
    """Also with all rules, and without a curriculum, which most of the seeds are older than."""
    config = draw_world_config(seed)
    drawn = config.limits
    for limits in {drawn, replace(drawn, ablations=()), replace(drawn, curriculum=None)}:
        world = replace(config, limits=limits)
        assert run_world(seed, world).verdict == "ok", read_regressions()[seed]


def test_every_regression_names_its_cause() -> None:
    assert all(read_regressions().values())


def test_the_last_line_printed_is_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_swarm(3, as_json=True) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["seeds"] == 3
    assert summary["violations"] == summary["deadlocks"] == 0
    assert summary["events"] > summary["median_events_per_world"] > 0
    assert {
        "migrations",
        "migrations_failed",
        "steps_failed",
        "orchestrator_crashes",
        "run_crashes",
        "engines_removed",
        "coverage",
    } < summary.keys()
    assert run_swarm(3, as_json=False) == 0
    assert capsys.readouterr().out.startswith("seeds 3, events ")


def test_a_failed_world_is_named_and_makes_the_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batching, "train", lambda state: [])
    monkeypatch.setattr(swarm, "MAX_EVENTS", 2_000)
    assert run_swarm(1, as_json=True) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("seed 0: deadlock: ")
    (failure,) = json.loads(last)["failures"]
    assert failure["seed"] == 0
    assert failure["verdict"].startswith("deadlock")
