"""Who is compared: every update policy at every bound, each with what it is free to choose at its best.

`OWN` is what `policies.py --search` found (results/policies_search.json): where two choices are as fast as
each other but for noise, the faster. Where engines are paced, their number and rows are given, as
accelerators are; else a policy has two cores, one thread a process, and chooses. There a step takes as long
as its rows need, an idle row costs nothing and a second version's weights do: DORA's best is one version
slot, so that each version's last answers are waited for. Paced, a step takes as long for several versions as
for one, which is what accelerators do as far as reading weights is not what limits them. So DORA's other
choice stands beside it: `dora, several slots` unpaced, `dora, one slot` paced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from workloads import Changes, Workload

RIVALS = {"sync": 0, "sync, streamed": 0, "one_step": 1, "drain": 4, "partial": 4, "inflight": 4}
FIXED = ("sync", "sync, streamed", "one_step")  # their bound is theirs by definition
BREAKS_C1 = ("partial", "inflight")
BOUNDS = (1, 2, 4)
MOVING = {"orchestrator.rebalance_interval_s": 0.1}  # how often moves are weighed, where answers take seconds
UNSTREAMED = {"trainer.streaming": "false"}
ONE_SLOT: Changes = {"engine.version_slots": 1}  # without it an engine has one for each version that may live
ALONE, PAIR = {"engine.num_engines": 1}, {"engine.num_engines": 2}
WIDE: Changes = {**ALONE, "engine.max_num_seqs": 32}  # all answers of a batch at once

# By whether engines are paced, and by policy.
OWN: Mapping[bool, Mapping[str, Changes]] = {
    False: {
        "sync": {**WIDE, **UNSTREAMED},
        "sync, streamed": WIDE,
        "one_step": WIDE,
        "drain": {**WIDE, "orchestrator.batches_per_version": 4},
        "partial": {**WIDE, "orchestrator.weight_sync_interval": 3},
        "inflight": WIDE,
        "dora": {**WIDE, **ONE_SLOT},
    },
    True: {
        "sync": {**MOVING, **UNSTREAMED},
        "sync, streamed": MOVING,
        "one_step": MOVING,
        "drain": {**MOVING, "orchestrator.batches_per_version": 5},
        "partial": {"orchestrator.weight_sync_interval": 3},
        "inflight": {},
        "dora": MOVING,
    },
}
OTHERS: Mapping[bool, Mapping[str, Changes]] = {  # beside DORA's own, at S = 4
    False: {"dora, several slots": WIDE},
    True: {"dora, one slot": {**MOVING, **ONE_SLOT}},
}
FREE_UNPACED = ("engine.num_engines", "engine.max_num_seqs", "engine.version_slots")
ENGINES: Sequence[Changes] = tuple(
    {**engines, "engine.max_num_seqs": rows} for engines, rows in ((ALONE, 16), (ALONE, 32), (PAIR, 16))
)


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

    def told(self) -> str:
        """What it has chosen, as the tables say it."""
        return ", ".join(f"{key.partition('.')[2]} {value}" for key, value in self.own.items())


def contender(workload: Workload, name: str, max_staleness: int) -> Contender:
    """With its own best settings; what a tight bound does not allow is cut, and the demo stays as it is."""
    own = dict({**OWN[workload.is_paced], **OTHERS[workload.is_paced]}[name])
    if workload.is_example:
        own = {key: value for key, value in own.items() if key not in FREE_UNPACED}
    return bounded(Contender(name, max_staleness, own))


def bounded(who: Contender) -> Contender:
    """No version is kept for longer than the bound allows."""
    longest = {
        "orchestrator.batches_per_version": who.max_staleness + 1,
        "orchestrator.weight_sync_interval": max(1, who.max_staleness),
    }
    cut = {key: min(int(str(who.own[key])), most) for key, most in longest.items() if key in who.own}
    return replace(who, own={**who.own, **cut})


def entrants(workload: Workload, bounds: Sequence[int]) -> list[Contender]:
    """Every policy at every bound that it can have; `drain` at S = 1 is `one_step`."""
    fixed = [contender(workload, name, RIVALS[name]) for name in FIXED]
    free = [(name, s) for s in bounds for name in ("drain", *BREAKS_C1, "dora") if (name, s) != ("drain", 1)]
    others = (
        [] if workload.is_example else [contender(workload, name, 4) for name in OTHERS[workload.is_paced]]
    )
    return fixed + [contender(workload, name, s) for name, s in free] + others


def choices(workload: Workload, name: str) -> list[Contender]:
    """What a policy may be at its own bound, for `--search`."""
    engines: Sequence[Changes] = ({},) if workload.is_paced else ENGINES
    own: Sequence[Changes] = ({},)
    if name == "drain":
        own = [{"orchestrator.batches_per_version": number} for number in (4, 5)]
    elif name in BREAKS_C1:
        own = [{"orchestrator.weight_sync_interval": number} for number in (1, 3)]
    elif name == "dora":
        own = [ONE_SLOT, {**ONE_SLOT, "orchestrator.weight_sync_interval": 3}, {}]
    base = {} if not workload.is_paced or name in BREAKS_C1 else MOVING
    streamed = UNSTREAMED if name == "sync" else {}
    bound = {**RIVALS, "dora": 4}[name]
    return [Contender(name, bound, {**base, **streamed, **here, **mine}) for here in engines for mine in own]


def parts(workload: Workload) -> dict[str, Contender]:
    """DORA's parts, added to `sync` one by one, on paced engines; the bound is loosened before them."""
    assert workload.is_paced, "a ladder needs several engines that hold one version each"
    deferred = {"orchestrator.weight_sync_interval": 3}
    return {
        "sync": contender(workload, "sync", 0),
        "+ streaming": contender(workload, "sync, streamed", 0),
        "+ a bound of 4, by draining": contender(workload, "drain", 4),
        "+ versions": Contender("dora", 4, {**ONE_SLOT, "orchestrator.placement": "static"}),
        "+ migration": contender(workload, "dora, one slot", 4),
        "+ grouped decode": contender(workload, "dora", 4),
        "+ deferred load": Contender("dora", 4, {**MOVING, **deferred}),
        "+ elastic trainer": Contender("dora", 4, {**MOVING, **deferred, "trainer.elastic": "true"}),
    }
