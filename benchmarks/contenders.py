"""The contenders: every update policy at every bound, each with its best settings.

`OWN` has the best settings of `policies.py --search` (results/policies_search.json). If two choices differ by
noise only, it has the faster one. Paced engines have a fixed number and fixed rows, as accelerators have.
Unpaced, a policy has two cores with one thread per process and chooses both. An unpaced step lasts as long as
its rows need: an idle row costs nothing, but the weights of a second version do. DORA's best is then one
version slot, with which an engine finishes a version's requests before it loads the next version. A paced
step lasts equally long for several versions and for one, as on accelerators that reading weights does not
limit. Both choices are compared: `dora, several slots` unpaced and `dora, one slot` paced are the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from workloads import Changes, Workload

RIVALS = {"sync": 0, "sync, streamed": 0, "one_step": 1, "drain": 4, "partial": 4, "inflight": 4}
FIXED = ("sync", "sync, streamed", "one_step")  # policies that define their bound
BREAKS_C1 = ("partial", "inflight")
BOUNDS = (1, 2, 4)
MIGRATING = {"orchestrator.rebalance_interval_s": 0.1}  # for answers that last seconds
UNSTREAMED = {"trainer.streaming": "false"}
ONE_SLOT: Changes = {"engine.version_slots": 1}  # the default is one for each version that may be live
ALONE, PAIR = {"engine.num_engines": 1}, {"engine.num_engines": 2}
WIDE: Changes = {**ALONE, "engine.max_num_seqs": 32}  # all answers of a batch at once

# By whether engines are paced and by policy.
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
        "sync": {**MIGRATING, **UNSTREAMED},
        "sync, streamed": MIGRATING,
        "one_step": MIGRATING,
        "drain": {**MIGRATING, "orchestrator.batches_per_version": 5},
        "partial": {"orchestrator.weight_sync_interval": 3},
        "inflight": {},
        "dora": MIGRATING,
    },
}
OTHERS: Mapping[bool, Mapping[str, Changes]] = {  # of DORA, at S = 4
    False: {"dora, several slots": WIDE},
    True: {"dora, one slot": {**MIGRATING, **ONE_SLOT}},
}
FREE_UNPACED = ("engine.num_engines", "engine.max_num_seqs", "engine.version_slots")
ENGINES: Sequence[Changes] = tuple(
    {**engines, "engine.max_num_seqs": rows} for engines, rows in ((ALONE, 16), (ALONE, 32), (PAIR, 16))
)


@dataclass(frozen=True)
class Contender:
    """A policy at one bound, with its own settings."""

    name: str
    max_staleness: int
    own: Changes = field(default_factory=dict)

    def settings(self) -> dict[str, object]:
        """Configuration keys and values."""
        policy = self.name.partition(",")[0]
        named = {"orchestrator.update_policy": policy, "orchestrator.max_staleness": self.max_staleness}
        return {**named, **self.own}

    def settings_text(self) -> str:
        """Its own settings, as in the tables."""
        return ", ".join(f"{key.partition('.')[2]} {value}" for key, value in self.own.items())


def best_contender(workload: Workload, name: str, max_staleness: int) -> Contender:
    """A policy with its best settings, limited by its bound. The demo keeps the example's settings."""
    own = dict({**OWN[workload.is_paced], **OTHERS[workload.is_paced]}[name])
    if workload.is_example:
        own = {key: value for key, value in own.items() if key not in FREE_UNPACED}
    return bounded(Contender(name, max_staleness, own))


def bounded(contender: Contender) -> Contender:
    """Limit the settings that keep a version for longer than the bound allows."""
    longest = {
        "orchestrator.batches_per_version": contender.max_staleness + 1,
        "orchestrator.weight_sync_interval": max(1, contender.max_staleness),
    }
    cut = {
        key: min(int(str(contender.own[key])), most) for key, most in longest.items() if key in contender.own
    }
    return replace(contender, own={**contender.own, **cut})


def contenders_for(workload: Workload, bounds: Sequence[int]) -> list[Contender]:
    """Every policy at every bound that it supports; `drain` at S = 1 is `one_step`."""
    fixed = [best_contender(workload, name, RIVALS[name]) for name in FIXED]
    free = [(name, s) for s in bounds for name in ("drain", *BREAKS_C1, "dora") if (name, s) != ("drain", 1)]
    others = (
        []
        if workload.is_example
        else [best_contender(workload, name, 4) for name in OTHERS[workload.is_paced]]
    )
    return fixed + [best_contender(workload, name, s) for name, s in free] + others


def choices(workload: Workload, name: str) -> list[Contender]:
    """The choices of a policy at its own bound, for --search."""
    engines: Sequence[Changes] = ({},) if workload.is_paced else ENGINES
    own: Sequence[Changes] = ({},)
    if name == "drain":
        own = [{"orchestrator.batches_per_version": number} for number in (4, 5)]
    elif name in BREAKS_C1:
        own = [{"orchestrator.weight_sync_interval": number} for number in (1, 3)]
    elif name == "dora":
        own = [ONE_SLOT, {**ONE_SLOT, "orchestrator.weight_sync_interval": 3}, {}]
    base = {} if not workload.is_paced or name in BREAKS_C1 else MIGRATING
    streamed = UNSTREAMED if name == "sync" else {}
    bound = {**RIVALS, "dora": 4}[name]
    return [
        Contender(name, bound, {**base, **streamed, **count, **mine}) for count in engines for mine in own
    ]


def parts(workload: Workload) -> dict[str, Contender]:
    """DORA's parts, added to `sync` one by one on paced engines, after the looser bound."""
    assert workload.is_paced, "the ablation needs several engines that hold one version each"
    deferred = {"orchestrator.weight_sync_interval": 3}
    return {
        "sync": best_contender(workload, "sync", 0),
        "+ streaming": best_contender(workload, "sync, streamed", 0),
        "+ a bound of 4, by draining": best_contender(workload, "drain", 4),
        "+ versions": Contender("dora", 4, {**ONE_SLOT, "orchestrator.placement": "static"}),
        "+ migration": best_contender(workload, "dora, one slot", 4),
        "+ grouped decode": best_contender(workload, "dora", 4),
        "+ deferred load": Contender("dora", 4, {**MIGRATING, **deferred}),
        "+ elastic trainer": Contender("dora", 4, {**MIGRATING, **deferred, "trainer.elastic": "true"}),
    }
