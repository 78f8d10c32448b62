"""The fast path: after an event for which it runs, all rules together would return the same actions."""

from __future__ import annotations

from copy import deepcopy

import pytest

from dora.core.actions import Action
from dora.core.orchestrator import Orchestrator
from dora.sim import swarm

NUM_SEEDS = 120


class Compared(Orchestrator):
    """Compares each use of the fast path with all rules, on a copy of the state."""

    num_compared = 0

    def _decide(self, is_fast_path: bool = False) -> list[Action]:
        if not is_fast_path:
            return super()._decide()
        expected = deepcopy(self)._decide()
        actions = super()._decide(is_fast_path=True)
        assert actions == expected
        Compared.num_compared += 1
        return actions


def test_the_fast_path_leaves_out_no_action(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm, "Orchestrator", Compared)
    outcomes = [swarm.run_world(seed) for seed in range(NUM_SEEDS)]
    assert {outcome.verdict for outcome in outcomes} == {"ok"}
    assert Compared.num_compared > NUM_SEEDS
