"""Which player a run has: whoever its configuration names as the other side of its episodes.

A run whose answers are single turns has none.
"""

from __future__ import annotations

from collections.abc import Callable

from dora.runtime.agents import Agents
from dora.runtime.environments import Environments
from dora.runtime.plan import Plan
from dora.runtime.players import Player
from dora.runtime.process import Told


def make_player(plan: Plan, told: Told, notice: Callable[[str], None]) -> Player | None:
    """It speaks into `told`; `notice` gets sentences for the person watching."""
    if plan.config.env.is_played:
        return Environments(plan, told, notice)
    return Agents(plan, told, notice) if plan.config.service.agents else None
