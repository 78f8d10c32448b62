"""Who is compared: every update policy at every bound, each with what it is free to choose at its best.

`OWN` comes from the orchestrator in virtual time, with costs that were measured, and from a few tries;
`policies.py --search` tries `CHOICES` one after another. Where engines are paced, their number and their rows
are given, as accelerators are; else a policy has two cores, one thread a process, and chooses. There a step
takes as long as its rows need, an idle row costs nothing and a second version's weights do: the one engine
of `dora` holds one version, and a version's last answers are waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from workloads import Changes, Workload

RIVALS = {"sync": 0, "sync, streamed": 0, "one_step": 1, "drain": 4, "partial": 4, "inflight": 4}
FIXED = ("sync", "sync, streamed", "one_step")  # their bound is theirs by definition
BREAKS_C1 = ("partial", "inflight")
BOUNDS = (1, 2, 4)
MOVING = {"orchestrator.rebalance_interval_s": 0.1}  # how often moves are weighed, where answers take seconds
UNSTREAMED = {"trainer.streaming": "false"}
ALONE, PAIR = {"engine.num_engines": 1}, {"engine.num_engines": 2}

# By whether engines are paced, and by policy.
OWN: Mapping[bool, Mapping[str, Changes]] = {
    False: {
        "sync": {**PAIR, "engine.max_rows": 16, **UNSTREAMED},
        "sync, streamed": {**PAIR, "engine.max_rows": 16},
        "one_step": {**ALONE, "engine.max_rows": 32},
        "drain": {**ALONE, "engine.max_rows": 16, "orchestrator.batches_per_version": 5},
        "partial": {**ALONE, "engine.max_rows": 16},
        "inflight": {**ALONE, "engine.max_rows": 16},
        "dora": {**ALONE, "engine.max_rows": 16, "engine.version_slots": 1},
    },
    True: {
        "sync": {**MOVING, **UNSTREAMED},
        "sync, streamed": MOVING,
        "one_step": MOVING,
        "drain": {**MOVING, "orchestrator.batches_per_version": 5},
        "partial": {},
        "inflight": {},
        "dora": MOVING,
    },
}
GIVEN_WHEN_PACED = ("engine.num_engines", "engine.max_rows", "orchestrator.rush")
CHOICES: Mapping[str, tuple[object, ...]] = {
    "engine.num_engines": (1, 2),
    "engine.max_rows": (8, 16, 32),
    "trainer.num_ranks": (1, 2),
    "orchestrator.rush": ("true", "false"),
    "orchestrator.batches_per_version": (1, 2, 3, 4, 5),
    "orchestrator.load_interval": (1, 2, 3, 5),
    "engine.version_slots": (1, 2, 5),
    "engine.tail_interval": (1, 3),
}
ONLY_OF = {
    "orchestrator.batches_per_version": ("drain",),
    "orchestrator.load_interval": ("dora", *BREAKS_C1),
    "engine.version_slots": ("dora",),
    "engine.tail_interval": ("dora",),
}


@dataclass(frozen=True)
class Contender:
    """A policy at one bound; `own`: what it has chosen."""

    name: str
    max_staleness: int
    own: Changes = field(default_factory=dict)

    def settings(self) -> dict[str, object]:
        """Configuration keys and values."""
        policy = self.name.partition(",")[0]
        named = {"orchestrator.update_policy": policy, "orchestrator.max_staleness": self.max_staleness}
        return {**named, **self.own}


def contender(workload: Workload, name: str, max_staleness: int) -> Contender:
    """With its own best settings; what a tight bound does not allow is cut, and the demo stays as it is."""
    own = dict(OWN[workload.is_paced][name])
    if workload.is_example:
        own = {key: value for key, value in own.items() if key not in GIVEN_WHEN_PACED}
    for key in ("orchestrator.batches_per_version", "orchestrator.load_interval"):
        if key in own:
            own[key] = min(int(str(own[key])), max_staleness + 1)
    return Contender(name, max_staleness, own)


def entrants(workload: Workload, bounds: Sequence[int]) -> list[Contender]:
    """Every policy at every bound that it can have; `drain` at S = 1 is `one_step`."""
    fixed = [contender(workload, name, RIVALS[name]) for name in FIXED]
    free = [(name, s) for s in bounds for name in ("drain", *BREAKS_C1, "dora") if (name, s) != ("drain", 1)]
    return fixed + [contender(workload, name, s) for name, s in free]


def parts(workload: Workload) -> dict[str, Contender]:
    """DORA's parts, added to `sync` one by one, on paced engines."""
    assert workload.is_paced, "a ladder needs several engines that hold one version each"
    one_slot, deferred = {"engine.version_slots": 1}, {"orchestrator.load_interval": 3}
    return {
        "sync": contender(workload, "sync", 0),
        "+ streaming": contender(workload, "sync, streamed", 0),
        "+ versions": Contender("dora", 4, {**one_slot, "orchestrator.placement": "static"}),
        "+ migration": Contender("dora", 4, {**one_slot, **MOVING}),
        "+ grouped decode": Contender("dora", 4, MOVING),
        "+ deferred load": Contender("dora", 4, {**MOVING, **deferred}),
        "+ elastic trainer": Contender("dora", 4, {**MOVING, **deferred, "trainer.elastic": "true"}),
    }


def is_free(workload: Workload, name: str, key: str) -> bool:
    """Whether a policy may choose this."""
    if workload.is_paced and key in GIVEN_WHEN_PACED:
        return False
    return name in ONLY_OF.get(key, (name,))
