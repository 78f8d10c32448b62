"""Turns what workers say into facts.

The payload of each is put into the sample store first, so that no fact names what is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dora.core.events import (
    Event,
    GroupScored,
    GroupUnscorable,
    Loaded,
    Progressed,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    Trained,
)
from dora.core.records import GroupId, RequestId
from dora.engine.sequence import Completion
from dora.runtime import messages as m
from dora.runtime.plan import Plan
from dora.stream.samples import FinishedSample, SampleStore, Trajectory

MAX_ENDED = 1000  # groups remembered after their end: what was given up arrives at once or never


class Teller:
    """Holds the token ids of unscored groups, so that nothing is read back from the store."""

    def __init__(self, plan: Plan, samples: SampleStore) -> None:
        self._plan, self._samples = plan, samples
        self._responses: dict[GroupId, dict[int, list[int]]] = {}
        self._ended: dict[GroupId, str] = {}
        self.progress: dict[int, dict[RequestId, int]] = {}  # engine -> tokens so far, by its last beat
        self.batch: tuple[GroupId, ...] = ()  # of the step under way
        self.num_tokens: dict[GroupId, int] = {}  # response tokens of finished, untrained groups
        self.rewards: dict[GroupId, tuple[float, ...]] = {}
        self.step_metrics: list[tuple[int, dict[str, float]]] = []  # told by the trainer, not yet read
        self.busy_row_s: dict[int, float] = {}  # engine -> as last told

    def responses(self, group: GroupId) -> list[list[int]]:
        """Token ids of a finished group, in sibling order; they are handed out once."""
        siblings = self._responses.pop(group)
        return [siblings[k] for k in sorted(siblings)]

    def peek(self, group: GroupId) -> dict[int, list[int]]:
        """Token ids of a group's finished siblings, before they are handed out."""
        return self._responses[group]

    def length(self, request: RequestId) -> int:
        """Tokens of an unfinished answer, as last told by any engine."""
        return max((progress.get(request, 0) for progress in self.progress.values()), default=0)

    def restore(self, group: GroupId, is_judged: bool, answers: Sequence[FinishedSample], size: int) -> None:
        """Take up a group of a run that goes on; what the rewarder is to be handed waits here again."""
        if not is_judged:
            self._responses[group] = {answer.sibling: answer.token_ids for answer in answers}
        rewards = [answer.reward for answer in answers if answer.reward is not None]
        if len(rewards) == size:  # also one that was judged and not told of any more
            self.rewards[group] = tuple(rewards)

    def end(self, group: GroupId, state: str) -> None:
        """The group ends untrained; siblings that still arrive get the same state."""
        self.recall_end(group, state)
        self._samples.mark([group], state)

    def recall_end(self, group: GroupId, state: str) -> None:
        """The same of a run that goes on, whose store says so already."""
        self._ended[group] = state
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        self.forget(group)

    def forget(self, group: GroupId) -> None:
        """Nothing of the group is waited for any more."""
        for kept in (self._responses, self.num_tokens, self.rewards):
            kept.pop(group, None)

    def told(self, engine: int, message: Any) -> Iterator[Event]:
        """Facts from an engine's message."""
        match message:
            case m.WeightsLoaded(version, digest):
                yield Loaded(engine, version, digest)
            case m.Completed(completions, busy_row_s):
                self.busy_row_s[engine] = busy_row_s
                yield from (self._finished(engine, completion) for completion in completions)
            case m.Refused(reasons):
                yield from (self._failed(engine, request, reason) for request, reason in reasons.items())
            case m.GivenUp(num_tokens):
                yield RequestsAborted(engine, tuple(num_tokens), sum(num_tokens.values()))
            case m.Beat(progress, busy_row_s, row_tokens_per_s, kv_share):
                self.busy_row_s[engine] = busy_row_s
                if progress or self.progress.get(engine):  # an engine that has become idle says so once
                    yield Progressed(engine, tuple(progress.items()), row_tokens_per_s, kv_share)
                self.progress[engine] = progress

    def scored(self, fact: GroupScored | GroupUnscorable) -> Event:
        """Store rewards and advantages before the fact is told; what is held out needs no advantages."""
        if fact.group.is_held_out:
            if self._plan.is_recorded(fact.group):
                self._store_judged(fact)
        elif isinstance(fact, GroupScored):
            lengths = [len(answer) for answer in self._samples.responses(fact.group)]
            advantages = self._plan.scoring.of_group(fact.rewards, lengths)
            self._samples.score(fact.group, fact.rewards, advantages)
            self.rewards[fact.group] = fact.rewards
        return fact

    def _store_judged(self, fact: GroupScored | GroupUnscorable) -> None:
        """A held-out prompt is at its end."""
        if isinstance(fact, GroupScored):
            self._samples.score(fact.group, fact.rewards, [None] * len(fact.rewards))
        failed = f"failed: {fact.reason}" if isinstance(fact, GroupUnscorable) else ""
        self._samples.mark([fact.group], failed or "evaluated")

    def trained(self, message: m.StepDone) -> Event:
        """The step's batch is consumed."""
        self._samples.mark(self.batch, "trained", message.step)
        self.step_metrics.append((message.step, message.metrics))
        told = message.metrics
        return Trained(message.step, told.get("off_policy/ess"), told.get("off_policy/kl_k3"))

    def _failed(self, engine: int, request: RequestId, reason: str) -> Event:
        """No order ends a held-out prompt, so it ends here; its other answers are of no use."""
        if request.is_held_out:
            self.end(request.group, f"failed: {reason}")
        return RequestFailed(engine, request, reason)

    def _finished(self, engine: int, completion: Completion) -> Event:
        request, group = completion.id, completion.id.group
        num_tokens = len(completion.token_ids)
        has_ended = group in self._ended
        if not has_ended:
            self._responses.setdefault(group, {})[request.sibling] = completion.token_ids
        if self._plan.is_recorded(group):
            self._store(completion)
            if not (has_ended or group.is_held_out):
                self.num_tokens[group] = self.num_tokens.get(group, 0) + num_tokens
        return RequestFinished(
            engine, request, completion.version, num_tokens, completion.chunks, completion.finish_reason
        )

    def _store(self, completion: Completion) -> None:
        request = completion.id
        trajectory = Trajectory(
            request,
            completion.version,
            completion.chunks[0].digest,
            self._plan.prompt_ids(request.group),
            completion.token_ids,
            completion.unfiltered_logprobs,  # the trainer's are not filtered either
            completion.routes,
        )
        self._samples.put(trajectory)
        if request.group in self._ended:
            self._samples.mark([request.group], self._ended[request.group])
