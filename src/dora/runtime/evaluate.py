"""Answer the held-out prompts on the engines, with one version, while nothing else runs.

That is before and after training; evaluations beside it are the orchestrator's. The engines hold nothing
when it is over, so that the orchestrator starts from what it knows.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping

from dora.core.actions import Drop, Generate, Load, Resume, Rush, Score
from dora.core.events import (
    EngineJoined,
    EngineLeft,
    EngineLost,
    Event,
    GroupScored,
    GroupUnscorable,
    Loaded,
    LoadFailed,
    RequestFailed,
    RequestFinished,
)
from dora.core.records import GroupId, RequestId
from dora.errors import RunError
from dora.fleets import kind_of
from dora.runtime.held_out import Evaluation
from dora.runtime.local import LocalHands

NUM_EXAMPLES = 2


def evaluate(hands: LocalHands, version: int, held: Mapping[int, Iterable[int]]) -> Evaluation | None:
    """Evaluate a published version; None without held-out prompts.

    `held` are the versions each engine holds or is loading now.
    """
    if hands.plan.held_out is None:
        return None
    hands.settle()
    engines = hands.engines
    for engine in engines:
        for old in sorted(held.get(engine, ())):
            hands.perform(Drop(engine, old))
        for order in (Resume(engine), Rush(engine, ()), Load(engine, version)):
            hands.perform(order)
    result = _Round(hands, version, engines).run()
    for engine in engines:
        hands.perform(Drop(engine, version))
    return result


class _Round:
    """One evaluation under way."""

    def __init__(self, hands: LocalHands, version: int, engines: Iterable[int]) -> None:
        rule = hands.plan.evaluation
        assert rule is not None
        self._hands, self._engines = hands, {*engines}
        is_greedy = hands.plan.config.eval.greedy
        self._result = Evaluation(version, rule.num_prompts, rule.num_answers, is_greedy)
        self._waiting = deque(rule.request(version, index) for index in range(rule.num_requests))
        self._running: dict[int, set[RequestId]] = {}
        self._ended: Counter[GroupId] = Counter()  # answers to a prompt that no engine works on any more
        self._num_failed = 0
        self._broken: dict[GroupId, str] = {}  # prompts of which an episode has failed, and why

    def run(self) -> Evaluation:
        """To the last reward, and until every engine has answered its load: no fact is left behind."""
        while self._num_judged < self._result.num_prompts or self._engines > self._running.keys():
            self._dispatch()
            event = self._hands.next_fact(None)
            assert event is not None
            self._hear(event)
        return self._result

    def _dispatch(self) -> None:
        config = self._hands.plan.config
        for engine, running in self._running.items():
            count = min(kind_of(config, engine).max_rows - len(running), len(self._waiting))
            if count > 0:
                requests = tuple(self._waiting.popleft() for _ in range(count))
                running.update(requests)
                self._hands.perform(Generate(engine, self._result.version, requests))

    def _hear(self, event: Event) -> None:
        match event:
            case Loaded(engine, version) if version == self._result.version:
                self._running.setdefault(engine, set())
            case LoadFailed(engine, version):
                self._hands.perform(Load(engine, version))
            case EngineJoined(engine) if engine not in self._engines:  # in the place of a lost one
                self._engines.add(engine)
                for order in (Resume(engine), Load(engine, self._result.version)):
                    self._hands.perform(order)
            case EngineLost(engine) | EngineLeft(engine):
                self._engines.discard(engine)
                self._waiting.extendleft(self._running.pop(engine, ()))
            case RequestFinished(engine, request) if self._is_mine(request.group):
                self._running[engine].discard(request)
                self._result.hear(event)
                self._end(request.group)
            case GroupScored(group) if self._is_mine(group):
                self._result.hear(event)
            case GroupUnscorable(group, reason) if self._is_mine(group):
                self._fail(self._hands.rewarding.first_failure or reason)
            case RequestFailed(engine, request, reason) if self._is_mine(request.group):
                self._running[engine].discard(request)
                if self._hands.episodes.player is None:
                    raise RunError(f"evaluation request {request} was refused: {reason}")
                self._broken.setdefault(request.group, reason)
                self._end(request.group)
            case _:
                pass  # what the training run left behind

    @property
    def _num_judged(self) -> int:
        return len(self._result.rewards) + self._num_failed

    def _is_mine(self, group: GroupId) -> bool:
        """Others are what the training run left behind."""
        return group.epoch == -1 - self._result.version

    def _fail(self, reason: str) -> None:
        """An answer without a reward counts as 0, but not too many of them."""
        self._num_failed += 1
        share = self._hands.plan.config.reward.max_failed_share
        if self._num_failed > max(1.0, share * self._result.num_prompts):
            raise RunError(
                f"{self._num_failed} of {self._result.num_prompts} evaluation prompts could not be scored, "
                f"more than reward.max_failed_share = {share:g} allows; the first failure:\n"
                f"{reason.rstrip()}"
            )

    def _end(self, group: GroupId) -> None:
        """An answer has left its engine for good; a prompt with all its answers is judged, or has failed."""
        self._ended[group] += 1
        if self._ended[group] < self._result.num_answers:
            return
        if group in self._broken:
            self._fail(self._broken[group])
            return
        if group.row < NUM_EXAMPLES:
            plan = self._hands.plan
            answer = plan.tokenizer.decode(self._hands.teller.peek(group)[self._result.shown_sibling])
            self._result.shown[group] = (str(plan.source_of(group).prompt(group.row)), answer)
        self._hands.perform(Score(group))
