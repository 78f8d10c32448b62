"""Update policies, as what the one loop is told: limits for the production orchestrator, manners of stations.

Three systems schedule by rules that the orchestrator has not: `laminar` and `oversample_drop` bring a mind of
their own, behind the same door.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dora.core.orchestrator import Orchestrator
from dora.core.records import ABLATIONS, Limits
from dora.errors import InputError
from dora.sim.forecast.laminar import Laminar
from dora.sim.forecast.manner import Manner
from dora.sim.forecast.player import Mind
from dora.sim.forecast.rounds import Rounds


@dataclass(frozen=True)
class Policy:
    """How one system runs; `max_staleness` None: what the user asks for."""

    name: str
    max_staleness: int | None
    is_colocated: bool = False  # engines and trainer take turns on all devices
    one_version: bool = False  # alive at a time
    breaks_c1: bool = False  # answers go on with newer weights
    is_deferred: bool = False  # engines load one after another, each once it has a free row
    manner: Manner = field(default_factory=Manner)
    mind: Callable[[Limits], Mind] = Orchestrator
    is_bounded: bool = True  # S holds


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("sync", 0, is_colocated=True, one_version=True),
        Policy("sync_split", 0, one_version=True),
        Policy("one_step", 1, one_version=True),
        Policy("stream_gen", 1, one_version=True, manner=Manner(is_streamed=True, guesses=True)),
        Policy("asyncflow", 1, one_version=True, is_deferred=True, manner=Manner(is_streamed=True)),
        Policy("drain", None, one_version=True),
        Policy("partial", None, is_colocated=True, breaks_c1=True, manner=Manner(refills=True, slots=2)),
        Policy("inflight", None, breaks_c1=True, manner=Manner(slots=2)),
        Policy("oversample_drop", 0, is_colocated=True, mind=Rounds),
        Policy("laminar", None, mind=Laminar, is_bounded=False),
        Policy("dora", None),
    )
}
KV = "kv"  # the one part of DORA that is left out in the stations, not in the orchestrator
PARTS = (*ABLATIONS, KV)


def policy_of(name: str) -> Policy:
    """Raises InputError for a policy that is not known."""
    if name not in POLICIES:
        raise InputError(f"policy {name!r} is not known; policies are {', '.join(POLICIES)}")
    return POLICIES[name]


def limits_of(
    policy: Policy,
    sizes: tuple[int, int],
    num_steps: int,
    max_staleness: int,
    *,
    slack: int = 0,
    without: tuple[str, ...] = (),
    interval_s: float = 10.0,
) -> Limits:
    """What a policy asks of the orchestrator. Raises InputError where S or a part does not go with it."""
    if max_staleness < 0:
        raise InputError(f"S = {max_staleness} must be at least 0")
    fixed = policy.max_staleness
    if fixed is not None and max_staleness != fixed:
        raise InputError(f"S = {max_staleness}: policy {policy.name} has S = {fixed} by its definition")
    unknown = [part for part in without if part not in PARTS]
    if unknown or (without and policy.name != "dora"):
        raise InputError(f"without {', '.join(without)}: the parts of policy dora are {', '.join(PARTS)}")
    batch_size, group_size = sizes
    return Limits(
        num_steps=num_steps,
        batch_size=batch_size,
        group_size=group_size,
        max_staleness=max_staleness,
        batches_per_version=_batches(policy, max_staleness),
        slack=slack,
        is_deferred=policy.is_deferred,
        is_static=policy.breaks_c1,
        breaks_c1=policy.breaks_c1,
        rush=not policy.breaks_c1,  # systems of that kind hold no row back
        rebalance_interval_s=interval_s,
        without=tuple(part for part in without if part != KV),
    )


def _batches(policy: Policy, max_staleness: int) -> int | None:
    if not policy.one_version:
        return None
    return 1 if policy.max_staleness is not None else max_staleness + 1


def manner_of(policy: Policy, base: Manner, without: tuple[str, ...] = ()) -> Manner:
    """How stations work under a policy; `base` has the times."""
    own = policy.manner
    return replace(
        base,
        is_streamed=own.is_streamed or base.is_streamed,
        refills=own.refills,
        guesses=own.guesses,
        slots=max(own.slots, base.slots),
        reuses_kv=KV not in without,
    )
