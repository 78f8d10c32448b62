"""Update policies of several systems, as limits of the production orchestrator and options of the simulator.

`laminar` and `oversample_drop` schedule by rules that the orchestrator does not have, and use schedulers of
their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dora.core.orchestrator import Orchestrator
from dora.core.types import ABLATIONS, Limits
from dora.errors import InputError
from dora.planner.other_systems import LaminarScheduler, RollPackerScheduler
from dora.planner.simulator import RolloutScheduler, SimulatorOptions

KV_ABLATION = "kv"  # migrations without KV: the one ablation of the simulator, not of the orchestrator
DORA_ABLATIONS = (*ABLATIONS, KV_ABLATION)


@dataclass(frozen=True)
class UpdatePolicy:
    """The update policy of one system. `max_staleness` is None where the user chooses it."""

    name: str
    max_staleness: int | None
    is_colocated: bool = False  # engines and trainer share all devices
    is_single_version: bool = False  # one version alive at a time
    breaks_c1: bool = False  # running requests continue with newer weights
    defers_loads: bool = False  # engines load one after another, each once it has a free row
    options: SimulatorOptions = field(default_factory=SimulatorOptions)
    scheduler: Callable[[Limits], RolloutScheduler] = Orchestrator
    is_bounded: bool = True  # the policy keeps the bound S

    @property
    def oversamples(self) -> bool:
        """Whether the policy starts more groups than it trains."""
        return self.scheduler is RollPackerScheduler


POLICIES: dict[str, UpdatePolicy] = {
    policy.name: policy
    for policy in (
        UpdatePolicy("sync", 0, is_colocated=True, is_single_version=True),
        UpdatePolicy("sync_split", 0, is_single_version=True),
        UpdatePolicy("one_step", 1, is_single_version=True),
        UpdatePolicy(
            "stream_gen",
            1,
            is_single_version=True,
            options=SimulatorOptions(min_stream_tokens=0, longest_first=True),
        ),
        UpdatePolicy(
            "asyncflow",
            1,
            is_single_version=True,
            defers_loads=True,
            options=SimulatorOptions(min_stream_tokens=0),
        ),
        UpdatePolicy("drain", None, is_single_version=True),
        UpdatePolicy(
            "partial",
            None,
            is_colocated=True,
            breaks_c1=True,
            options=SimulatorOptions(recomputes_kv=True, version_slots=2),
        ),
        UpdatePolicy("inflight", None, breaks_c1=True, options=SimulatorOptions(version_slots=2)),
        UpdatePolicy("oversample_drop", 0, is_colocated=True, scheduler=RollPackerScheduler),
        UpdatePolicy("laminar", None, scheduler=LaminarScheduler, is_bounded=False),
        UpdatePolicy("dora", None),
    )
}


def get_policy(name: str) -> UpdatePolicy:
    """A policy by its name. Raises InputError if there is none."""
    if name not in POLICIES:
        raise InputError(f"unknown policy {name!r}; policies: {', '.join(POLICIES)}")
    return POLICIES[name]
