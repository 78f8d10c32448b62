"""The driver's record of samples: turns worker messages into events and keeps what unfinished groups need.

A sample is written to the sample store before the event that names it is returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora.core import events
from dora.core.types import GroupId, RequestId
from dora.engine.request import Completion
from dora.envs.episode import EpisodeEnded
from dora.metrics.rollout import EngineUsage
from dora.runtime.process import messages as m
from dora.runtime.rollout.partial_outputs import FILE_NAME, PartialOutputs
from dora.runtime.run_setup import RunSetup
from dora.stream.sample_db import (
    FinishedSample,
    HeldOutResponse,
    SampleStore,
    Trajectory,
    answer_source,
    count_turns,
)
from dora.trainer.advantage import invalid_rewards_reason
from dora.trainer.metrics import KL_BY_STALENESS

TaskRewards = Mapping[str, Sequence[float]]  # task -> reward of each sibling
MAX_DISCARDED_GROUPS = 1000  # kept, for responses that finish late; older ones are dropped


class SampleBook:
    """The driver's record of samples, rewards and engines, which the orchestrator's state does not have.

    Responses to held-out prompts are kept here until they are scored; others go to the sample stream.
    """

    def __init__(self, setup: RunSetup, samples: SampleStore) -> None:
        self._setup, self._samples = setup, samples
        self._held_out: dict[GroupId, dict[int, HeldOutResponse]] = {}  # by sibling
        self._discarded: dict[GroupId, str] = {}  # group -> its final state
        self.unrecorded: set[RequestId] = set()  # stored, and their event is not in the journal yet
        self.progress: dict[int, dict[RequestId, int]] = {}  # engine -> tokens of each unfinished response
        self.batch: tuple[GroupId, ...] = ()  # of the training step in progress
        # Tokens that the policy generated, by sibling, of untrained groups.
        self.num_tokens: dict[GroupId, dict[int, int]] = {}
        self.num_turns: dict[GroupId, dict[int, int]] = {}  # the same, if responses are episodes
        self.rewards: dict[GroupId, tuple[float, ...]] = {}  # of scored, untrained groups
        # Their terms, if there are several reward tasks; of a held-out prompt until its event is handled.
        self.task_rewards: dict[GroupId, TaskRewards] = {}
        self.episode_rewards: dict[RequestId, float] = {}  # of episodes whose group is not scored
        self._ended: dict[RequestId, EpisodeEnded] = {}  # episodes that are not stored
        self.partial_outputs = PartialOutputs(setup.out / FILE_NAME)
        self.failed_episodes: set[RequestId] = set()  # by environment or agent, until `RequestFailed`
        self.step_metrics: list[tuple[int, dict[str, float]]] = []  # from the trainer, not yet consumed
        self.engine_usage: dict[int, EngineUsage] = {}  # engine -> as last reported
        self.num_recomputed: dict[int, int] = {}  # engine -> tokens, as last reported

    def source_name(self, group: GroupId) -> str | None:
        """The source of a group's prompt; None if there is one dataset."""
        return self._setup.source_name(group)

    # engines

    def events_from(self, engine: int, message: Any) -> Iterator[events.Event]:
        """Yield the events that follow from an engine's message."""
        match message:
            case m.WeightsLoaded(version, digest, stop_s):
                yield events.Loaded(engine, version, digest, stop_s)
            case m.RequestsCompleted(completions, usage):
                self.engine_usage[engine] = usage
                yield from (self._finish_request(engine, completion) for completion in completions)
            case m.RequestsRejected(reasons):
                yield from (self.fail_request(engine, request, reason) for request, reason in reasons.items())
            case m.AbortsCompleted(num_tokens):
                yield events.RequestsAborted(engine, tuple(num_tokens), sum(num_tokens.values()))
            case m.EngineReport(progress, usage, row_tokens_per_s, kv_usage, num_recomputed):
                self.engine_usage[engine], self.num_recomputed[engine] = usage, num_recomputed
                if progress or self.progress.get(engine):  # an engine that becomes idle reports that once
                    yield events.ProgressReported(engine, tuple(progress.items()), row_tokens_per_s, kv_usage)
                self.progress[engine] = progress

    def fail_request(self, engine: int, request: RequestId, reason: str) -> events.Event:
        """Handle the failure of a request. No action discards a held-out prompt, so this method discards it
        with its other responses.
        """
        if request.is_held_out:
            self.discard_group(request.group, f"failed: {reason}")
        is_engine = request not in self.failed_episodes
        self.failed_episodes.discard(request)
        return events.RequestFailed(engine, request, reason, "engine" if is_engine else "environment")

    def _finish_request(self, engine: int, completion: Completion) -> events.Event:
        request, group = completion.id, completion.id.group
        self.failed_episodes.discard(request)
        ended = self._ended.pop(request, None)
        if ended is not None and ended.cut and completion.finish_reason == "stop":
            completion = replace(completion, finish_reason=ended.cut)
        is_discarded = group in self._discarded
        if group.is_held_out and not is_discarded:
            response = HeldOutResponse(completion.token_ids, completion.finish_reason)
            self._held_out.setdefault(group, {})[request.sibling] = response
        # Whether the policy generated each token: observation tokens have a log-prob of NaN.
        is_generated = ~np.isnan(completion.unfiltered_logprobs)
        num_generated = int(np.count_nonzero(is_generated))
        loss_mask = is_generated.astype(np.uint8) if num_generated < len(is_generated) else None
        payload = self._store(completion, loss_mask, () if ended is None else ended.turn_rewards)
        self.unrecorded.add(request)
        if not (is_discarded or group.is_held_out):
            self.num_tokens.setdefault(group, {})[request.sibling] = num_generated
            if self._setup.config.has_episodes:
                num_turns = count_turns(loss_mask, len(completion.prompt_ids), completion.branches)
                self.num_turns.setdefault(group, {})[request.sibling] = num_turns
        return events.RequestFinished(
            engine,
            request,
            completion.version,
            len(completion.token_ids),
            completion.chunks,
            completion.finish_reason,
            payload,
        )

    def _store(
        self, completion: Completion, loss_mask: NDArray[np.uint8] | None, turn_rewards: Sequence[float]
    ) -> str:
        """Store a response; returns the digest of its row. Without `loss_mask` all tokens are generated."""
        group = completion.id.group
        logprobs = completion.unfiltered_logprobs  # the trainer applies no filters either
        if loss_mask is not None:
            logprobs = np.where(loss_mask > 0, logprobs, np.float32(0))
        version, weight_digest, segments = answer_source(completion.chunks)
        payload = self._samples.put(
            Trajectory(
                completion.id,
                version,
                weight_digest,
                completion.prompt_ids,
                completion.token_ids,
                logprobs,
                completion.routes if self._setup.config.trainer.routing_replay else None,
                loss_mask,
                self.episode_rewards.get(completion.id),
                segments,
                completion.branches or None,
                completion.finish_reason,
                turn_rewards,
            )
        )
        if group in self._discarded:
            self._samples.set_state([group], self._discarded[group])
        return payload

    # scoring

    def pop_held_out_answers(self, group: GroupId) -> list[HeldOutResponse]:
        """Remove and return the responses to a held-out prompt, in sibling order; [] for any other group."""
        siblings = self._held_out.pop(group, {})
        return [siblings[k] for k in sorted(siblings)]

    def end_episode(self, ended: EpisodeEnded) -> None:
        """Keep the end of an episode until its tokens arrive, and its reward until its group is scored."""
        request = ended.episode.request
        self._ended[request] = ended
        if ended.reward is not None:
            self.episode_rewards[request] = ended.reward

    def forget_episode(self, request: RequestId) -> None:
        """The episode starts again."""
        self.episode_rewards.pop(request, None)
        self._ended.pop(request, None)

    def score_from_episodes(self, group: GroupId) -> events.Event | None:
        """Score a finished group with the rewards of its episodes; None if they have none.

        Scoring fails if only some of them have one.
        """
        rule = self._setup.evaluation if group.is_held_out else None
        num_answers = self._setup.limits.group_size if rule is None else rule.num_answers
        found = [self.episode_rewards.pop(RequestId(*group, k), None) for k in range(num_answers)]
        rewards = tuple(reward for reward in found if reward is not None)
        if not rewards:
            return None
        self.pop_held_out_answers(group)
        if len(rewards) == num_answers:
            return self.record_scores(events.GroupScored(group, rewards))
        reason = f"{len(rewards)} of {num_answers} episodes returned a reward; all or none of a group must"
        return self.record_scores(events.ScoringFailed(group, reason))

    def record_scores(
        self, event: events.GroupScored | events.ScoringFailed, task_rewards: TaskRewards | None = None
    ) -> events.Event:
        """Store the scores of a group and return the event to report: ScoringFailed for unusable rewards."""
        if isinstance(event, events.GroupScored) and (reason := invalid_rewards_reason(event.rewards)):
            event = events.ScoringFailed(event.group, reason)
        self.store_scores(event, task_rewards)
        if isinstance(event, events.GroupScored):
            self.task_rewards[event.group] = task_rewards or {}
            if not event.group.is_held_out:
                self.rewards[event.group] = event.rewards
        return event

    def store_scores(
        self, event: events.GroupScored | events.ScoringFailed, task_rewards: TaskRewards | None = None
    ) -> None:
        """Write the scores of a group to the sample store. A held-out prompt gets no advantages, and ends."""
        group, samples = event.group, self._samples
        if group.is_held_out:
            if isinstance(event, events.GroupScored):
                samples.score(group, event.rewards, [None] * len(event.rewards), task_rewards)
            state = f"failed: {event.reason}" if isinstance(event, events.ScoringFailed) else "evaluated"
            samples.set_state([group], state)
        elif isinstance(event, events.GroupScored):
            settings = self._setup.config.advantage_settings
            has_penalty = settings.overlong_buffer_tokens > 0  # else no advantage depends on a length
            lengths = samples.response_lengths(group) if has_penalty else [0] * len(event.rewards)
            advantages = settings.group_advantages(event.rewards, lengths)
            samples.score(group, event.rewards, advantages, task_rewards)

    # training, and groups that are not trained

    def record_step(self, message: m.StepCompleted) -> events.Event:
        """Mark the batch of a training step as trained."""
        step, metrics = message.step, message.metrics
        self._samples.set_state(self.batch, "trained", step)
        self.step_metrics.append((step, metrics))
        kl_by_version = tuple(
            (step - int(key.removeprefix(KL_BY_STALENESS)), kl)
            for key, kl in metrics.items()
            if key.startswith(KL_BY_STALENESS)
        )
        return events.Trained(
            step, metrics.get("off_policy/ess"), metrics.get("off_policy/kl_k3"), kl_by_version
        )

    def discard_group(self, group: GroupId, state: str) -> None:
        """End a group untrained, in a final state. Its siblings that finish later get the same state."""
        self.mark_discarded(group, state)
        self._samples.set_state([group], state)

    def mark_discarded(self, group: GroupId, state: str) -> None:
        """As `discard_group`, for a resumed run, whose sample store has the state already."""
        self._discarded[group] = state
        if len(self._discarded) > MAX_DISCARDED_GROUPS:
            del self._discarded[next(iter(self._discarded))]
        self.forget_group(group)

    def forget_group(self, group: GroupId) -> None:
        """Drop everything kept for a group."""
        for kept in (self._held_out, self.num_tokens, self.num_turns, self.rewards, self.task_rewards):
            kept.pop(group, None)
        for request in [r for r in (*self.episode_rewards, *self._ended) if r.group == group]:
            self.forget_episode(request)

    # a resumed run

    def restore_group(
        self, group: GroupId, is_scored: bool, samples: Sequence[FinishedSample], group_size: int
    ) -> None:
        """Restore an unfinished group from its stored samples. `is_scored`: by the journal."""
        if group.is_held_out and not is_scored:
            self._held_out[group] = {
                s.sibling: HeldOutResponse(s.token_ids, s.finish_reason) for s in samples
            }
        rewarded = [(sample, sample.reward) for sample in samples if sample.reward is not None]
        if not is_scored:
            self.episode_rewards |= {
                RequestId(*group, sample.sibling): reward
                for sample, reward in rewarded
                if not sample.is_scored
            }
        rewards = [reward for sample, reward in rewarded if sample.is_scored]
        if len(rewards) == group_size:  # the store may have scores whose event was not recorded
            self.rewards[group] = tuple(rewards)
            self.restore_task_rewards(group, samples)

    def restore_task_rewards(self, group: GroupId, samples: Sequence[FinishedSample]) -> None:
        """Restore the rewards by task of a scored group."""
        tasks = samples[0].task_rewards
        self.task_rewards[group] = {task: tuple(s.task_rewards[task] for s in samples) for task in tasks}
