"""Turns what workers say into facts.

The payload of each is put into the sample store first, so that no fact names what is not there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
from dora.runtime.occupancy import Use
from dora.runtime.plan import Plan
from dora.stream.samples import FinishedSample, SampleStore, Source, Trajectory
from dora.trainer.corrections import KL_BY_AGE
from dora.trainer.scoring import why_unscorable

TaskRewards = Mapping[str, Sequence[float]]  # task -> sibling by sibling
MAX_ENDED = 1000  # groups remembered after their end: what was given up arrives at once or never


class Teller:
    """Holds the answers to held-out prompts until they are judged; all others are in the stream."""

    def __init__(self, plan: Plan, samples: SampleStore) -> None:
        self._plan, self._samples = plan, samples
        self._held_out: dict[GroupId, dict[int, list[int]]] = {}
        self._ended: dict[GroupId, str] = {}
        self.progress: dict[int, dict[RequestId, int]] = {}  # engine -> tokens so far, by its last beat
        self.batch: tuple[GroupId, ...] = ()  # of the step under way
        self.num_tokens: dict[GroupId, int] = {}  # that the model drew for finished, untrained groups
        self.rewards: dict[GroupId, tuple[float, ...]] = {}
        self.task_rewards: dict[GroupId, TaskRewards] = {}  # what these sum up, where there are several tasks
        self.earned: dict[RequestId, float] = {}  # by episodes of groups that are not scored
        self.step_metrics: list[tuple[int, dict[str, float]]] = []  # told by the trainer, not yet read
        self.uses: dict[int, Use] = {}  # engine -> as last told
        self.num_recomputed: dict[int, int] = {}  # likewise: tokens

    def held_out(self, group: GroupId) -> list[list[int]]:
        """Token ids of the answers to a held-out prompt; they are handed out once. Empty for a group."""
        siblings = self._held_out.pop(group, {})
        return [siblings[k] for k in sorted(siblings)]

    def peek(self, group: GroupId) -> dict[int, list[int]]:
        """The same by sibling, before they are handed out."""
        return self._held_out[group]

    def length(self, request: RequestId) -> int:
        """Tokens of an unfinished answer, as last told by any engine."""
        return max((progress.get(request, 0) for progress in self.progress.values()), default=0)

    def restore(self, group: GroupId, is_judged: bool, answers: Sequence[FinishedSample], size: int) -> None:
        """Take up a group of a run that goes on; held-out answers that are to be judged wait here again."""
        if group.is_held_out and not is_judged:
            self._held_out[group] = {answer.sibling: answer.token_ids for answer in answers}
        told = [(answer, answer.reward) for answer in answers if answer.reward is not None]
        if not is_judged:
            self.earned |= {RequestId(*group, a.sibling): reward for a, reward in told if not a.is_judged}
        rewards = [reward for answer, reward in told if answer.is_judged]
        if len(rewards) == size:  # also one that was judged and not told of any more
            self.rewards[group] = tuple(rewards)
            self.recall_tasks(group, answers)

    def recall_tasks(self, group: GroupId, answers: Sequence[FinishedSample]) -> None:
        """What the rewards of a judged group of a run that goes on sum up."""
        tasks = answers[0].task_rewards
        self.task_rewards[group] = {task: tuple(a.task_rewards[task] for a in answers) for task in tasks}

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
        for kept in (self._held_out, self.num_tokens, self.rewards, self.task_rewards):
            kept.pop(group, None)
        self.earned = {request: reward for request, reward in self.earned.items() if request.group != group}

    def told(self, engine: int, message: Any) -> Iterator[Event]:
        """Facts from an engine's message."""
        match message:
            case m.WeightsLoaded(version, digest, stop_s):
                yield Loaded(engine, version, digest, stop_s)
            case m.Completed(completions, use):
                self.uses[engine] = use
                yield from (self._finished(engine, completion) for completion in completions)
            case m.Refused(reasons):
                yield from (self.failed(engine, request, reason) for request, reason in reasons.items())
            case m.GivenUp(num_tokens):
                yield RequestsAborted(engine, tuple(num_tokens), sum(num_tokens.values()))
            case m.Beat(progress, use, row_tokens_per_s, kv_share, num_recomputed):
                self.uses[engine], self.num_recomputed[engine] = use, num_recomputed
                if progress or self.progress.get(engine):  # an engine that has become idle says so once
                    yield Progressed(engine, tuple(progress.items()), row_tokens_per_s, kv_share)
                self.progress[engine] = progress

    def scored_by_itself(self, group: GroupId) -> Event | None:
        """The fact that a group is scored, if its episodes earned rewards; if only some did, it fails."""
        rule = self._plan.evaluation if group.is_held_out else None
        num_answers = self._plan.limits.group_size if rule is None else rule.num_answers
        rewards = [self.earned.pop(RequestId(*group, k), None) for k in range(num_answers)]
        found = tuple(reward for reward in rewards if reward is not None)
        if not found:
            return None
        self.held_out(group)
        if len(found) == num_answers:
            return self.scored(GroupScored(group, found))
        mixed = f"{len(found)} of {num_answers} answers came with rewards of their own, the others without"
        return self.scored(GroupUnscorable(group, mixed))

    def scored(self, fact: GroupScored | GroupUnscorable, by_task: TaskRewards | None = None) -> Event:
        """Store what is judged before the fact is told, and remember the rewards of what may be trained.

        Rewards that cannot be compared make it another fact: the group fails.
        """
        if isinstance(fact, GroupScored) and (reason := why_unscorable(fact.rewards)):
            fact = GroupUnscorable(fact.group, reason)
        if self._plan.is_recorded(fact.group):
            self.store_judged(fact, by_task)
        if isinstance(fact, GroupScored) and not fact.group.is_held_out:
            self.rewards[fact.group] = fact.rewards
            self.task_rewards[fact.group] = by_task or {}
        return fact

    def store_judged(self, fact: GroupScored | GroupUnscorable, by_task: TaskRewards | None = None) -> None:
        """Rewards, and advantages where there are any: a held-out prompt has none, and is at its end."""
        group, samples = fact.group, self._samples
        if group.is_held_out:
            if isinstance(fact, GroupScored):
                samples.score(group, fact.rewards, [None] * len(fact.rewards))
            failed = f"failed: {fact.reason}" if isinstance(fact, GroupUnscorable) else ""
            samples.mark([group], failed or "evaluated")
        elif isinstance(fact, GroupScored):
            advantages = self._plan.scoring.of_group(fact.rewards, samples.num_drawn(group))
            samples.score(group, fact.rewards, advantages, by_task)

    def trained(self, message: m.StepDone) -> Event:
        """The step's batch is consumed."""
        self._samples.mark(self.batch, "trained", message.step)
        self.step_metrics.append((message.step, message.metrics))
        told, step = message.metrics, message.step
        ages = [(key.removeprefix(KL_BY_AGE), kl) for key, kl in told.items() if key.startswith(KL_BY_AGE)]
        kls = tuple((step - int(age), kl) for age, kl in ages)
        return Trained(step, told.get("off_policy/ess"), told.get("off_policy/kl_k3"), kls)

    def failed(self, engine: int, request: RequestId, reason: str) -> Event:
        """No order ends a held-out prompt, so it ends here; its other answers are of no use."""
        if request.is_held_out:
            self.end(request.group, f"failed: {reason}")
        return RequestFailed(engine, request, reason)

    def _finished(self, engine: int, completion: Completion) -> Event:
        request, group = completion.id, completion.id.group
        num_tokens = len(completion.token_ids)
        has_ended = group in self._ended
        if group.is_held_out and not has_ended:
            self._held_out.setdefault(group, {})[request.sibling] = completion.token_ids
        if self._plan.is_recorded(group):
            self._store(completion)
            if not (has_ended or group.is_held_out):
                self.num_tokens[group] = self.num_tokens.get(group, 0) + _num_drawn(completion)
        return RequestFinished(
            engine, request, completion.version, num_tokens, completion.chunks, completion.finish_reason
        )

    def _store(self, completion: Completion) -> None:
        request = completion.id
        logprobs, loss_mask = completion.unfiltered_logprobs, None  # the trainer's are not filtered either
        if _num_drawn(completion) < len(logprobs):
            loss_mask = [int(not math.isnan(x)) for x in logprobs]
            logprobs = [x if is_drawn else 0.0 for x, is_drawn in zip(logprobs, loss_mask, strict=True)]
        source = Source.of(completion.chunks)
        trajectory = Trajectory(
            request,
            source.version,
            source.weight_digest,
            completion.prompt_ids,
            completion.token_ids,
            logprobs,
            completion.routes,
            loss_mask,
            self.earned.get(request),
            source.segments,
        )
        self._samples.put(trajectory)
        if request.group in self._ended:
            self._samples.mark([request.group], self._ended[request.group])


def _num_drawn(completion: Completion) -> int:
    """Tokens that the model drew; those that an episode's other side said have no log-prob: NaN."""
    logprobs = completion.logprobs
    if not math.isnan(sum(logprobs)):  # quicker than to look at each
        return len(logprobs)
    return sum(not math.isnan(x) for x in logprobs)
