"""Some seed of the swarm detects each rule of the core that is broken on purpose."""

from __future__ import annotations

import pytest
from tests.sim import (  # noqa: F401  each adds its faults to FAULTS
    faults_in_adaptive_staleness,
    faults_in_engines,
    faults_in_evaluation,
    faults_in_groups,
    faults_in_inflight_updates,
    faults_in_loading,
    faults_in_recovery,
)
from tests.sim.fault_tools import FAULTS, Fault

from dora.sim import swarm

NUM_SEEDS = 300
MAX_EVENTS = 5_000
# They detect what few worlds detect; without them the test only takes longer.
RARE_SEEDS = {
    "a_drained_engine_is_removed_during_its_migrations": (668,),
    "a_finished_request_needs_no_decision": (43,),
    "a_request_that_migrated_during_its_abort_is_not_aborted_again": (138,),
    "a_snapshot_forgets_num_fetching": (57,),
    "running_requests_keep_their_version": (196,),
    "waiting_requests_keep_their_version": (85,),
}


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_broken_rule_is_detected(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    monkeypatch.setattr(swarm, "MAX_EVENTS", MAX_EVENTS)
    for owner, rule, broken in fault.replacements:
        monkeypatch.setattr(owner, rule, broken)
    seeds = (*RARE_SEEDS.get(fault.name, ()), *range(NUM_SEEDS))
    assert any(fault.message in swarm.run_world(seed).verdict for seed in seeds)
