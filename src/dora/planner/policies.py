"""Update policies of several systems, as limits of the production orchestrator and options of the simulator.

`laminar` and `oversample_drop` schedule by rules that the orchestrator does not have, and use schedulers of
their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

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
            options=SimulatorOptions(streams_groups=True, longest_first=True),
        ),
        UpdatePolicy(
            "asyncflow",
            1,
            is_single_version=True,
            defers_loads=True,
            options=SimulatorOptions(streams_groups=True),
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


def make_limits(
    policy: UpdatePolicy,
    batch_size: int,
    group_size: int,
    num_steps: int,
    max_staleness: int,
    *,
    slack: int,
    ablations: tuple[str, ...],
    rebalance_interval_s: float,
) -> Limits:
    """The orchestrator's limits under a policy. Raises InputError if the policy does not support S or an
    ablation.
    """
    if max_staleness < 0:
        raise InputError(f"S = {max_staleness} must be at least 0")
    fixed = policy.max_staleness
    if fixed is not None and max_staleness != fixed:
        raise InputError(f"S = {max_staleness}: policy {policy.name} has S = {fixed} by definition")
    unknown = [part for part in ablations if part not in DORA_ABLATIONS]
    if unknown or (ablations and policy.name != "dora"):
        raise InputError(
            f"without {', '.join(ablations)}: only policy dora has these parts; the parts are "
            f"{', '.join(DORA_ABLATIONS)}"
        )
    return Limits(
        num_steps=num_steps,
        batch_size=batch_size,
        group_size=group_size,
        max_staleness=max_staleness,
        batches_per_version=_batches_per_version(policy, max_staleness),
        slack=slack,
        defers_loads=policy.defers_loads,
        is_static=policy.breaks_c1,
        breaks_c1=policy.breaks_c1,
        prioritize_stragglers=not policy.breaks_c1,  # systems with inflight updates do not prioritise
        rebalance_interval_s=rebalance_interval_s,
        ablations=tuple(part for part in ABLATIONS if part in ablations),
    )


def _batches_per_version(policy: UpdatePolicy, max_staleness: int) -> int | None:
    if not policy.is_single_version:
        return None
    return 1 if policy.max_staleness is not None else max_staleness + 1


def make_options(
    policy: UpdatePolicy, base: SimulatorOptions, ablations: tuple[str, ...]
) -> SimulatorOptions:
    """The simulator's options under a policy; `base` has the times."""
    own = policy.options
    return replace(
        base,
        streams_groups=own.streams_groups or base.streams_groups,
        recomputes_kv=own.recomputes_kv,
        longest_first=own.longest_first,
        version_slots=max(own.version_slots, base.version_slots),
        migrates_kv=KV_ABLATION not in ablations,
    )
