"""Time by activity: the phases of each training step, stalls at a deadline, recovery after crashes.

The source is events, actions and the orchestrator's state.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dora.core.actions import Action, Fail, Score
from dora.core.events import (
    EngineJoined,
    EngineLost,
    Event,
    GroupScored,
    RequestFinished,
    Resumed,
    ScoringFailed,
    TrainerLost,
)
from dora.core.state import State
from dora.core.types import GroupId, RequestId

NUM_LONGEST = 10  # stalls named in the summary

# The trainer is in one of these phases at a time, so they add up to the step; the others overlap with them.
_TRAINER_PHASES = ("wait_for_batch", "train", "publish")
_OVERLAPPING_PHASES = ("rollout", "reward")


class StepTiming:
    """Phase times of each step and of the run; counts of engines, versions, requests and groups at a step's
    end.
    """

    def __init__(self) -> None:
        self.total_s = defaultdict[str, float](float)  # by phase, in the run
        self._now_s = 0.0
        self._phases: tuple[str, ...] = ("wait_for_batch",)  # at the moment
        self._spent_s = defaultdict[str, float](float)  # by phase, in this step
        self._scoring: set[GroupId] = set()
        self._first_finish_s: dict[GroupId, float] = {}  # of the first sibling of an unfinished group
        self._spreads_s: list[float] = []  # from the first to the last sibling's finish, in this step

    def start(self, now: float) -> None:
        """The time before does not count."""
        self._now_s = now

    def advance(self, now: float) -> None:
        """Account for the time until `now` in the current phases."""
        for phase in self._phases:
            self._spent_s[phase] += now - self._now_s
            self.total_s[phase] += now - self._now_s
        self._now_s = now

    def update(self, now: float, event: Event | None, actions: Sequence[Action], state: State) -> None:
        """Account for an event and its actions, after the state has changed."""
        if isinstance(event, RequestFinished) and event.request.group in state.groups:
            self._first_finish_s.setdefault(event.request.group, now)
        elif isinstance(event, GroupScored | ScoringFailed):
            self._scoring.discard(event.group)
        for action in actions:
            if isinstance(action, Score):
                self._scoring.add(action.group)
                if action.group in self._first_finish_s:  # not a held-out prompt
                    self._spreads_s.append(now - self._first_finish_s.pop(action.group))
            elif isinstance(action, Fail):
                self._scoring.discard(action.group)
                self._first_finish_s.pop(action.group, None)
        trainer_phase = (
            "train"
            if state.training_step is not None
            else "wait_for_batch"
            if state.publishing_version is None
            else "publish"
        )
        is_exposed = bool(state.num_unfinished) and trainer_phase == "wait_for_batch"
        self._phases = (
            trainer_phase,
            *(["rollout"] if state.num_unfinished else []),
            *(["exposed_rollout"] if is_exposed else []),
            *(["reward"] if self._scoring else []),
        )

    def end_step(self, state: State) -> dict[str, float]:
        """The metrics of the step that ends; the next one starts."""
        spent, spreads = self._spent_s, self._spreads_s
        self._spent_s, self._spreads_s = defaultdict(float), []
        engines = state.engines.values()
        num_ready = len(state.ready_groups) + len(state.committed) + sum(map(len, state.batches.values()))
        num_running = sum(len(engine.requests) for engine in engines)
        phases = (*_TRAINER_PHASES, *_OVERLAPPING_PHASES)
        step_s = sum(spent[phase] for phase in _TRAINER_PHASES)
        return {f"timing_s/{phase}": round(spent[phase], 4) for phase in phases} | {
            "timing_s/group_spread_mean": round(sum(spreads) / max(1, len(spreads)), 4),
            "timing_s/group_spread_max": round(max(spreads, default=0.0), 4),
            "trainer/idle_ratio": round(spent["wait_for_batch"] / max(1e-9, step_s), 4),
            "rollout/num_engines": len(state.engines),
            "rollout/num_versions": len(state.num_unfinished),
            "rollout/num_requests_running": num_running,
            "rollout/num_requests_waiting": len(state.requests) - num_running,
            "rollout/kv_cache_usage_max": max((engine.kv_usage for engine in engines), default=0.0),
            "data/num_skipped": state.num_skipped,
            "groups/num_admitted": state.num_admitted,
            "groups/num_filtered": state.num_filtered,
            "groups/num_failed": state.num_failed,
            "rollout/num_retries": state.num_retries,
            "groups/num_ready": num_ready,
        }


class Stall(NamedTuple):
    """One wait of the trainer for a group at its deadline."""

    step: int
    group: GroupId
    requests: tuple[RequestId, ...]  # unfinished when the stall started; none if the scores were missing
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "group": str(self.group),
            "requests": [str(request) for request in self.requests],
            "seconds": round(self.seconds, 3),
        }


class StallTracker:
    """The stalls of a run."""

    def __init__(self) -> None:
        self._ended: list[Stall] = []
        self._current: Stall | None = None
        self._stall_s = 0.0  # of all stalls before the current one

    def update(self, state: State) -> None:
        """Check whether a stall has started or ended."""
        current = self._current
        if current is not None and state.stall_group != current.group:
            self._ended.append(current._replace(seconds=state.stall_s - self._stall_s))
            self._current = None
        self._stall_s = state.stall_s
        if self._current is None and state.stall_group is not None:
            requests = tuple(sorted(state.groups[state.stall_group].unfinished))
            self._current = Stall(state.next_step, state.stall_group, requests, 0.0)

    def longest(self) -> list[Stall]:
        """The longest stalls that have ended, longest first."""
        return heapq.nlargest(NUM_LONGEST, self._ended, key=lambda stall: stall.seconds)


@dataclass
class RecoveryTimes:
    """Crashes of the trainer, and the time until trainers and engines had recovered."""

    trainer_failures: int = 0
    trainer_s: list[float] = field(default_factory=list)  # from each crash until all lost steps were redone
    engine_s: list[float] = field(default_factory=list)  # from each loss until the replacement joined
    _trainer_lost_s: float | None = None  # when
    _engine_lost_s: dict[int, float] = field(default_factory=dict)  # engine -> when
    _in_step_s: float = 0.0

    def update(self, now: float, event: Event | None, state: State) -> None:
        """Account for an event, after the state has changed."""
        match event:
            case EngineLost(engine):
                self._engine_lost_s[engine] = now
            case EngineJoined(replaces=int(engine)) if engine in self._engine_lost_s:
                self.engine_s.append(now - self._engine_lost_s.pop(engine))
            case TrainerLost():
                self.trainer_failures += 1
                if self._trainer_lost_s is None:  # else it crashed again before it had recovered
                    self._trainer_lost_s = now
            case Resumed():
                self._trainer_lost_s = None
                self._engine_lost_s.clear()
            case _:
                pass
        if self._trainer_lost_s is not None and not _is_trainer_recovering(state):
            self.trainer_s.append(now - self._trainer_lost_s)
            self._in_step_s += self.trainer_s[-1]
            self._trainer_lost_s = None

    def end_step(self) -> dict[str, float]:
        """The metrics of the step that ends; the next one starts."""
        spent_s, self._in_step_s = self._in_step_s, 0.0
        return {"timing_s/recovery": round(spent_s, 4)}

    def to_json(self) -> dict[str, Any]:
        """The recoveries in the summary."""
        return {
            "trainer_failures": self.trainer_failures,
            "trainer_recovery_s_max": _max(self.trainer_s),
            "engine_recovery_s_max": _max(self.engine_s),
        }


def _is_trainer_recovering(state: State) -> bool:
    """Whether lost steps are still to be redone, or the digest of a redone version is due."""
    publishing, newest = state.publishing_version, state.newest_published
    is_digest_due = publishing is not None and newest is not None and publishing <= newest
    return state.is_trainer_lost or bool(state.redo_batches) or is_digest_due


def _max(times_s: list[float]) -> float | None:
    return round(max(times_s), 3) if times_s else None
