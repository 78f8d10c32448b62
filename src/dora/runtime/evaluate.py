"""Answer the held-out prompts on the engines, with one version, while nothing else runs.

Each prompt is answered twice: greedily, and sampled as in training. The engines hold nothing
when it is over, so that the orchestrator starts from what it knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dora.core.actions import Drop, Generate, Load, Resume, Rush, Score
from dora.core.events import (
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
from dora.data.dataset import Prompt
from dora.errors import RunError
from dora.runtime.lengths import percentile
from dora.runtime.local import LocalHands
from dora.runtime.plan import EVALUATION, GREEDY, SAMPLED

NUM_EXAMPLES = 2


@dataclass
class Evaluation:
    """Mean rewards on the held-out prompts; one that cannot be scored counts as 0."""

    version: int
    num_prompts: int
    rewards: dict[GroupId, tuple[float, ...]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)  # of sampled answers, tokens
    examples: list[tuple[Prompt, str, GroupId]] = field(default_factory=list)  # prompt, sampled answer

    @property
    def greedy(self) -> float:
        return sum(r[GREEDY] for r in self.rewards.values()) / self.num_prompts

    @property
    def sampled(self) -> float:
        return sum(r[SAMPLED] for r in self.rewards.values()) / self.num_prompts

    def length_percentile(self, share: float) -> int:
        """Length (tokens) of sampled answers that `share` of them do not exceed."""
        return int(percentile(self.lengths, share))


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
        assert hands.plan.held_out is not None
        num_prompts = len(hands.plan.held_out)
        self._hands, self._engines = hands, {*engines}
        self._result = Evaluation(version, num_prompts)
        self._waiting = deque(
            RequestId(EVALUATION, i, k) for i in range(num_prompts) for k in (GREEDY, SAMPLED)
        )
        self._running: dict[int, set[RequestId]] = {}
        self._finished: dict[GroupId, int] = {}
        self._num_failed = 0

    def run(self) -> Evaluation:
        """To the last reward, and until every engine has answered its load: no fact is left behind."""
        while len(self._result.rewards) < self._result.num_prompts or self._engines > self._running.keys():
            self._dispatch()
            event = self._hands.next_fact(None)
            assert event is not None
            self._hear(event)
        return self._result

    def _dispatch(self) -> None:
        rows = self._hands.plan.config.engine.max_rows
        for engine, running in self._running.items():
            count = min(rows - len(running), len(self._waiting))
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
            case EngineLost(engine) | EngineLeft(engine):
                self._engines.discard(engine)
                self._waiting.extendleft(self._running.pop(engine, ()))
            case RequestFinished(engine, request, _, num_tokens) if request.epoch == EVALUATION:
                self._running[engine].discard(request)
                self._finish(request, num_tokens)
            case GroupScored(group, rewards):
                self._result.rewards[group] = rewards
            case GroupUnscorable(group):
                self._result.rewards[group] = (0.0, 0.0)
                self._fail(group)
            case RequestFailed(_, request, reason):
                raise RunError(f"evaluation request {request} was refused: {reason}")
            case _:
                pass  # what the training run left behind

    def _fail(self, group: GroupId) -> None:
        """An answer without a reward counts as 0, but not too many of them."""
        self._num_failed += 1
        share = self._hands.plan.config.reward.max_failed_share
        if self._num_failed > max(1.0, share * self._result.num_prompts):
            raise RunError(
                f"{self._num_failed} of {self._result.num_prompts} evaluation prompts could not be scored, "
                f"more than reward.max_failed_share = {share:g} allows; the first failure:\n"
                f"{self._hands.rewarder.first_failure.rstrip()}"
            )

    def _finish(self, request: RequestId, num_tokens: int) -> None:
        group = request.group
        if request.sibling == SAMPLED:
            self._result.lengths.append(num_tokens)
        self._finished[group] = self._finished.get(group, 0) + 1
        if self._finished[group] < 2:
            return
        if group.row < NUM_EXAMPLES:
            plan = self._hands.plan
            answer = plan.tokenizer.decode(self._hands.teller.peek(group)[SAMPLED])
            self._result.examples.append((plan.source_of(group).prompt(group.row), answer, group))
        self._hands.perform(Score(group))
