"""Evaluate one version on the held-out prompts before or after training, while nothing else runs.

The orchestrator runs evaluations during training. Engines hold no version when an evaluation is over, which
is the state that the orchestrator assumes at its start.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from dora.core.actions import Action, DecodeOnly, Drop, Generate, Load, ResumeEngine, Score
from dora.core.events import (
    EngineJoined,
    EngineLost,
    EngineRemoved,
    Event,
    GroupScored,
    Loaded,
    LoadFailed,
    RequestFailed,
    RequestFinished,
    ScoringFailed,
)
from dora.core.types import GroupId, RequestId
from dora.errors import RunError
from dora.metrics.evaluation import EvaluationResult
from dora.runtime.run_setup import RunSetup
from dora.stream.sample_db import TokenIds

NUM_EXAMPLES = 2


class EvaluationExecutor(Protocol):
    """What an evaluation needs of the executor."""

    @property
    def setup(self) -> RunSetup: ...

    @property
    def engines(self) -> list[int]: ...

    @property
    def runs_episodes(self) -> bool: ...

    @property
    def first_scoring_failure(self) -> str: ...

    @property
    def has_migrations(self) -> bool: ...

    def abort_migrated(self) -> None: ...

    def poll(self) -> None: ...

    def execute(self, action: Action, /) -> None: ...

    def next_event(self, until: float | None) -> Event | None: ...

    def held_out_answers(self, group: GroupId) -> Mapping[int, TokenIds]:
        """Token ids of the responses to a held-out prompt so far, by sibling."""


def evaluate(
    executor: EvaluationExecutor,
    version: int,
    held: Mapping[int, Iterable[int]],
    between_events: Callable[[], None] = lambda: None,
) -> EvaluationResult | None:
    """Evaluate a published version; returns None if there are no held-out prompts.

    `held` are the versions that each engine holds or is loading now; `between_events` as in the main loop.
    """
    if executor.setup.held_out is None:
        return None
    while executor.has_migrations:  # left over from training
        between_events()
        executor.poll()
    executor.abort_migrated()
    engines = executor.engines
    for engine in engines:
        for old in sorted(held.get(engine, ())):
            executor.execute(Drop(engine, old))
        for action in (ResumeEngine(engine), DecodeOnly(engine, ()), Load(engine, version)):
            executor.execute(action)
    result = _EvaluationRun(executor, version, engines).run(between_events)
    for engine in engines:
        executor.execute(Drop(engine, version))
    return result


class _EvaluationRun:
    """The progress of one evaluation."""

    def __init__(self, executor: EvaluationExecutor, version: int, engines: Iterable[int]) -> None:
        rule = executor.setup.evaluation
        assert rule is not None
        self._executor, self._engines = executor, {*engines}
        is_greedy = executor.setup.config.eval.greedy
        self._result = EvaluationResult(version, rule.num_prompts, rule.num_answers, is_greedy)
        self._waiting = deque(rule.request_id(version, index) for index in range(rule.num_requests))
        self._running: dict[int, set[RequestId]] = {}
        self._ended: Counter[GroupId] = Counter()  # finished or failed responses by prompt
        self._num_failed = 0
        self._failed_episodes: dict[GroupId, str] = {}  # prompts with a failed episode, and why

    def run(self, between_events: Callable[[], None]) -> EvaluationResult:
        """Run until every prompt is scored and every engine has answered its load."""
        while self._num_scored < self._result.num_prompts or self._engines > self._running.keys():
            self._dispatch()
            between_events()
            if (event := self._executor.next_event(None)) is not None:
                self._on_event(event)
        return self._result

    def _dispatch(self) -> None:
        config = self._executor.setup.config
        for engine, running in self._running.items():
            count = min(config.kind_of_engine(engine).max_num_seqs - len(running), len(self._waiting))
            if count > 0:
                requests = tuple(self._waiting.popleft() for _ in range(count))
                running.update(requests)
                self._executor.execute(Generate(engine, self._result.version, requests))

    def _on_event(self, event: Event) -> None:
        match event:
            case Loaded(engine, version) if version == self._result.version:
                self._running.setdefault(engine, set())
            case LoadFailed(engine, version):
                self._executor.execute(Load(engine, version))
            case EngineJoined(engine) if engine not in self._engines:  # replaces a lost engine
                self._engines.add(engine)
                for action in (ResumeEngine(engine), Load(engine, self._result.version)):
                    self._executor.execute(action)
            case EngineLost(engine) | EngineRemoved(engine):
                self._engines.discard(engine)
                self._waiting.extendleft(self._running.pop(engine, ()))
            case RequestFinished(engine, request) if self._is_own(request.group):
                self._running[engine].discard(request)
                self._result.update(event)
                self._end(request.group)
            case GroupScored(group) if self._is_own(group):
                self._result.update(event)
            case ScoringFailed(group, reason) if self._is_own(group):
                self._fail(self._executor.first_scoring_failure or reason)
            case RequestFailed(engine, request, reason) if self._is_own(request.group):
                self._running[engine].discard(request)
                if not self._executor.runs_episodes:
                    raise RunError(f"evaluation request {request} was refused: {reason}")
                self._failed_episodes.setdefault(request.group, reason)
                self._end(request.group)
            case _:
                pass  # left over from training

    @property
    def _num_scored(self) -> int:
        return len(self._result.rewards) + self._num_failed

    def _is_own(self, group: GroupId) -> bool:
        """Whether a group belongs to this evaluation; others are left over from training."""
        return group.epoch == -1 - self._result.version

    def _fail(self, reason: str) -> None:
        """A prompt without a reward counts as 0. Raises RunError if too many have none."""
        self._num_failed += 1
        limit = self._executor.setup.config.reward.max_failed_fraction
        if self._num_failed > max(1.0, limit * self._result.num_prompts):
            raise RunError(
                f"{self._num_failed} of {self._result.num_prompts} evaluation prompts could not be scored, "
                f"more than reward.max_failed_fraction = {limit:g} allows; the first failure:\n"
                f"{reason.rstrip()}"
            )

    def _end(self, group: GroupId) -> None:
        """An answer has finished or failed; score the prompt once it has all its responses."""
        self._ended[group] += 1
        if self._ended[group] < self._result.num_responses:
            return
        if group in self._failed_episodes:
            self._fail(self._failed_episodes[group])
            return
        if group.row < NUM_EXAMPLES:
            setup = self._executor.setup
            answer = setup.tokenizer.decode(
                self._executor.held_out_answers(group)[self._result.shown_sibling]
            )
            self._result.shown[group] = (str(setup.source_of(group).prompt(group.row)), answer)
        self._executor.execute(Score(group))
