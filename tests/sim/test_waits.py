"""In every moment of many worlds each wait leads to a station that works, and an idle trainer has one."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from dora.core.actions import Action
from dora.core.events import Event
from dora.core.orchestrator import Orchestrator
from dora.core.state import State
from dora.core.waits import owners, waits
from dora.runtime.drive import drive
from dora.sim.models import draw_config
from dora.sim.world import World

STATION = re.compile(r"trainer|rewards|dataset|engines|engine \d+")


def check(state: State) -> None:
    """Every wait has an owner."""
    found = waits(state)
    assert found or state.stopped, "the run goes on, and nobody waits"
    assert len({(wait.who, wait.on) for wait in found}) == len(found), found
    for wait in found:
        ends = owners([wait, *found])
        assert ends, f"{wait} is part of a circle: {found}"
        assert all(STATION.fullmatch(end) for end in ends), f"{wait} ends at {ends}: {found}"
    is_behind = state.is_trainer_lost or state.redo
    is_idle = not is_behind and state.training is None and state.publishing is None
    if is_idle and state.newest is not None and not state.is_trained:
        assert any(wait.who == "trainer" for wait in found), found


@pytest.mark.parametrize("seed", range(40))
def test_every_wait_has_an_owner(seed: int) -> None:
    config = draw_config(seed)
    world, core, num_facts = World(config, seed), Orchestrator(config.limits), 0

    def look(now: float, event: Event | None, orders: Sequence[Action]) -> None:
        nonlocal num_facts
        num_facts += 1
        if num_facts == config.faults.heal_after:
            world.heal()
        check(core.snapshot())

    drive(core, world, look)
