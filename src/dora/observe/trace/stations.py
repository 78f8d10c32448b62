"""The rest of the drawing: what the trainer does and waits for, what is judged, which versions live.

Counters beside them say how many groups are where, and what each step was trained on.
"""

from __future__ import annotations

import statistics

from dora.core.actions import (
    Action,
    Admit,
    Attest,
    BeginEvaluation,
    Commit,
    EndEvaluation,
    Fail,
    Filter,
    Publish,
    ReportStall,
    Retire,
    Score,
    SkipEvaluation,
    Stop,
    Train,
)
from dora.core.events import (
    Attested,
    Event,
    GroupScored,
    GroupUnscorable,
    Published,
    RequestFinished,
    Resumed,
    StepFailed,
    Trained,
    TrainerLost,
    TrainerReplaced,
)
from dora.core.records import GroupId
from dora.core.wording import nth
from dora.observe.trace.drawing import Emit, Ids, Process, Slice
from dora.observe.trace.engines import version_name


class Trainer:
    """Waits, trains, publishes; the names of the steps have no version, so each phase has one colour."""

    def __init__(self, emit: Emit, ids: Ids) -> None:
        self._process = Process(emit, ids, "trainer", rank=1)
        self._phase: Slice | None = None

    def read(self, t_s: float, record: Event | Action) -> None:
        match record:
            case Train(step, groups):
                num, names = nth(step), [str(group) for group in groups]
                self._begin(t_s, f"train step {num}", step=num, groups=names)
            case StepFailed(step, reason):
                self._process.mark(f"step {nth(step)} FAILED: {reason}", t_s)
                self._end(t_s, end=f"failed: {reason}")
            case Trained(_, ess, kl):
                self._end(t_s, ess=ess, kl=kl)
            case Publish(version):
                self._begin(t_s, f"publish {version}", version=version)
            case Published(version, digest):
                self._end(t_s, digest=digest)
                num = nth(version)  # the step that begins with it
                self._begin(t_s, f"wait for the batch of step {num}", step=num)
            case TrainerLost(reason):
                self._begin(t_s, "LOST: another one begins", reason=reason)
            case TrainerReplaced(from_step, redone):
                self._process.mark(f"REPLACED after step {from_step}, {len(redone)} to redo", t_s)
            case Attest(version):
                self._begin(t_s, f"make version {version} again", version=version)
            case Attested(version, digest):
                self._end(t_s, digest=digest)
            case ReportStall(step, group, requests, since_s):
                name = f"STALL: step {nth(step)} waits for group {group}"
                self._process.mark(name, t_s, requests=[str(each) for each in requests], since_s=since_s)
            case Resumed(from_step):
                self.close(t_s, "all processes had died")
                self._process.mark(f"RESUMED from step {from_step}", t_s)
            case Stop():
                self.close(t_s, "the run is over")
            case _:
                pass

    def close(self, t_s: float, why: str) -> None:
        self._end(t_s, end=why)

    def _begin(self, t_s: float, name: str, **args: object) -> None:
        self._end(t_s)
        self._phase = self._process.begin("phases", name, t_s, **args)

    def _end(self, t_s: float, **args: object) -> None:
        if self._phase is not None:
            self._process.end(self._phase, t_s, **args)
        self._phase = None


class Judging:
    """Groups that the rewarder has."""

    def __init__(self, emit: Emit, ids: Ids) -> None:
        self._process = Process(emit, ids, "rewarder", rank=2)
        self._judged: dict[GroupId, Slice] = {}

    def read(self, t_s: float, record: Event | Action) -> None:
        match record:
            case Score(group):
                self._end(t_s, group, end="asked again")
                self._judged[group] = self._process.begin("groups", f"judge {group}", t_s, group=str(group))
            case GroupScored(group, rewards):
                self._end(t_s, group, rewards=rewards)
            case GroupUnscorable(group, reason):
                self._end(t_s, group, end=f"failed: {reason}")
            case Resumed():
                self.close(t_s, "all processes had died")
            case _:
                pass

    def close(self, t_s: float, why: str) -> None:
        self._process.end_all(t_s, end=why)
        self._judged.clear()

    def _end(self, t_s: float, group: GroupId, **args: object) -> None:
        if (judged := self._judged.pop(group, None)) is not None:
            self._process.end(judged, t_s, **args)


class Versions:
    """The versions in the weight store, and the evaluations that they answer."""

    def __init__(self, emit: Emit, ids: Ids) -> None:
        self._process = Process(emit, ids, "versions in the weight store", rank=3)
        self._stored: dict[int, Slice] = {}
        self._evaluation: Slice | None = None

    def read(self, t_s: float, record: Event | Action) -> None:
        match record:
            case Published(version, digest):
                self._retire(t_s, version, end="published again")
                name = version_name(version)
                self._stored[version] = self._process.begin("versions", name, t_s, digest=digest)
            case Retire(version):
                self._retire(t_s, version)
            case BeginEvaluation(version):
                name = f"evaluation of {version_name(version)}"
                self._evaluation = self._process.begin("evaluations", name, t_s, version=version)
            case EndEvaluation() if self._evaluation is not None:
                self._process.end(self._evaluation, t_s)
                self._evaluation = None
            case SkipEvaluation(version, under_way):
                name = f"no evaluation of version {version}: that of {under_way} is not over"
                self._process.mark(name, t_s)
            case Resumed(_, kept):
                for version in self._stored.keys() - {version for version, _ in kept}:
                    self._retire(t_s, version, end="all processes had died")
            case _:
                pass

    def close(self, t_s: float, why: str) -> None:
        self._process.end_all(t_s, end=why)

    def _retire(self, t_s: float, version: int, **args: object) -> None:
        if (stored := self._stored.pop(version, None)) is not None:
            self._process.end(stored, t_s, **args)


class Groups:
    """Counters: how many groups are where, and what the steps were trained on."""

    def __init__(self, emit: Emit, ids: Ids) -> None:
        self._process = Process(emit, ids, "run", rank=0)
        self._version: dict[GroupId, int] = {}  # of groups under way
        self._tokens: dict[GroupId, int] = {}
        self._rewards: dict[GroupId, float] = {}  # mean of the scored ones
        self._committed: set[GroupId] = set()
        self._trained_tokens = 0
        self._last: dict[tuple[str, str], float] = {}  # counter -> value drawn last

    def read(self, t_s: float, record: Event | Action) -> None:
        match record:
            case Admit(group, _, version):
                self._version[group] = version
            case RequestFinished(_, request, _, num_tokens) if request.group in self._version:
                group = request.group
                self._tokens[group] = self._tokens.get(group, 0) + num_tokens
            case GroupScored(group, rewards) if group in self._version:
                self._rewards[group] = statistics.fmean(rewards)
            case Commit(group):
                self._committed.add(group)
            case Filter(group, reason) | Fail(group, reason):
                self._process.mark(f"group {group} {type(record).__name__.lower()}ed: {reason}", t_s)
                self._forget(group)
            case Train(step, groups) if self._version.keys() >= {*groups}:
                self._train(t_s, step, groups)
            case Resumed(from_step):
                self._process.mark(f"RESUMED from step {from_step}", t_s)
            case _:
                return
        self._draw(t_s)

    def _train(self, t_s: float, step: int, groups: tuple[GroupId, ...]) -> None:
        """A step that is repeated or redone has been counted already, and its groups are forgotten."""
        ages = [step - self._version[group] for group in groups]
        self._trained_tokens += sum(self._tokens.get(group, 0) for group in groups)
        self._process.count("staleness", "mean of the step", t_s, statistics.fmean(ages))
        self._process.count("staleness", "most of the step", t_s, max(ages))
        rewards = [self._rewards[group] for group in groups if group in self._rewards]
        if rewards:
            self._process.count("reward", "mean of the step", t_s, statistics.fmean(rewards))
        self._process.count("tokens", "trained", t_s, self._trained_tokens)
        for group in groups:
            self._forget(group)

    def _forget(self, group: GroupId) -> None:
        for kept in (self._version, self._tokens, self._rewards):
            kept.pop(group, None)
        self._committed.discard(group)

    def _draw(self, t_s: float) -> None:
        """Only what has changed."""
        values = {
            ("groups", "not judged"): len(self._version) - len(self._rewards),
            ("groups", "judged, in no batch"): len(self._rewards) - len(self._committed),
            ("groups", "in the next batch"): len(self._committed),
            ("versions", "of groups under way"): len({*self._version.values()}),
        }
        for name, value in values.items():
            if self._last.get(name) != value:
                self._process.count(*name, t_s, value)
        self._last |= values
