"""Some seed of the swarm detects each rule of the core that is broken on purpose."""

from __future__ import annotations

import pytest
from tests.sim.fault_tools import Fault
from tests.sim.faults_in_adaptive_staleness import FAULTS as IN_ADAPTIVE_STALENESS
from tests.sim.faults_in_engines import FAULTS as IN_ENGINES
from tests.sim.faults_in_evaluation import FAULTS as IN_EVALUATION
from tests.sim.faults_in_groups import FAULTS as IN_GROUPS
from tests.sim.faults_in_inflight_updates import FAULTS as IN_INFLIGHT_UPDATES
from tests.sim.faults_in_loading import FAULTS as IN_LOADING
from tests.sim.faults_in_recovery import FAULTS as IN_RECOVERY

from dora.sim import swarm

NUM_SEEDS = 300
MAX_EVENTS = 5_000
# They detect what few worlds detect; without them the test only takes longer.
RARE_SEEDS = {
    "a_finished_request_needs_no_decision": (43,),
    "a_request_that_migrated_during_its_abort_is_not_aborted_again": (138,),
    "a_snapshot_forgets_num_fetching": (57,),
    "running_requests_keep_their_version": (196,),
    "waiting_requests_keep_their_version": (85,),
}
FAULTS: list[tuple[Fault, str]] = [
    *IN_GROUPS,
    *IN_ADAPTIVE_STALENESS,
    *IN_ENGINES,
    *IN_EVALUATION,
    *IN_INFLIGHT_UPDATES,
    *IN_LOADING,
    *IN_RECOVERY,
]


@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_broken_rule_is_detected(monkeypatch: pytest.MonkeyPatch, fault: Fault, message: str) -> None:
    monkeypatch.setattr(swarm, "MAX_EVENTS", MAX_EVENTS)
    fault(monkeypatch)
    seeds = (*RARE_SEEDS.get(fault.__name__, ()), *range(NUM_SEEDS))
    assert any(message in swarm.run_world(seed).verdict for seed in seeds)
