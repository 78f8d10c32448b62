"""The swarm is worth its time: each rule of the core, broken on purpose, is caught by some seed."""

from __future__ import annotations

import pytest
from tests.sim.breaking import Fault
from tests.sim.faults_in_aging import FAULTS as IN_AGING
from tests.sim.faults_in_engines import FAULTS as IN_ENGINES
from tests.sim.faults_in_evaluation import FAULTS as IN_EVALUATION
from tests.sim.faults_in_groups import FAULTS as IN_GROUPS
from tests.sim.faults_in_loading import FAULTS as IN_LOADING
from tests.sim.faults_in_renewing import FAULTS as IN_RENEWING
from tests.sim.faults_in_trainers import FAULTS as IN_TRAINERS

from dora.sim import swarm

NUM_SEEDS = 300
MAX_EVENTS = 5_000
FAULTS: list[tuple[Fault, str]] = [
    *IN_GROUPS,
    *IN_AGING,
    *IN_ENGINES,
    *IN_EVALUATION,
    *IN_LOADING,
    *IN_RENEWING,
    *IN_TRAINERS,
]


@pytest.mark.parametrize(("fault", "words"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_broken_rule_is_caught(monkeypatch: pytest.MonkeyPatch, fault: Fault, words: str) -> None:
    monkeypatch.setattr(swarm, "MAX_EVENTS", MAX_EVENTS)
    fault(monkeypatch)
    assert any(words in swarm.run_world(seed).verdict for seed in range(NUM_SEEDS))
