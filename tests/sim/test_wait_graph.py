"""In many worlds, at any time, each wait ends at a worker that works, and an idle trainer waits for one."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from dora.core.actions import Action
from dora.core.events import Event
from dora.core.orchestrator import Orchestrator
from dora.core.state import State
from dora.core.wait_graph import find_root_causes, find_waits
from dora.runtime.main_loop import run_main_loop
from dora.sim.random_config import draw_world_config
from dora.sim.world import World

WORKER = re.compile(r"trainer|rewards|dataset|engines|engine \d+")


def check_waits(state: State) -> None:
    """Every wait has a root cause."""
    found = find_waits(state)
    assert found or state.is_stopped, "the run is not stopped, and nothing waits"
    assert len({(wait.waiter, wait.target) for wait in found}) == len(found), found
    for wait in found:
        causes = find_root_causes([wait, *found])
        assert causes, f"{wait} is part of a cycle: {found}"
        assert all(WORKER.fullmatch(cause) for cause in causes), f"{wait} ends at {causes}: {found}"
    is_behind = state.is_trainer_lost or state.redo_batches
    is_idle = not is_behind and state.training_step is None and state.publishing_version is None
    if is_idle and state.newest_published is not None and not state.is_training_done:
        assert any(wait.waiter == "trainer" for wait in found), found


@pytest.mark.parametrize("seed", range(40))
def test_every_wait_has_a_root_cause(seed: int) -> None:
    config = draw_world_config(seed)
    world, orchestrator, num_events = World(config, seed), Orchestrator(config.limits), 0

    def record(now: float, event: Event | None, actions: Sequence[Action]) -> None:
        nonlocal num_events
        num_events += 1
        if num_events == config.faults.heal_after_events:
            world.heal()
        check_waits(orchestrator.snapshot())

    run_main_loop(orchestrator, world, record)
