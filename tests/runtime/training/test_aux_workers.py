"""Aux workers fill the columns of committed groups with the weights of their step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.runtime.tiny import MODEL
from tests.runtime.training.test_accumulator import SETTINGS, branched, episodes, stored
from tests.trainer.batches import at_the_end

from dora.core.types import GroupId
from dora.errors import RunError
from dora.model.weights import initial_weights
from dora.runtime.process.messages import AccumulateGroup, SaveCheckpoint, TrainStep, WeightsPublished
from dora.runtime.training.accumulator import to_sample, to_samples
from dora.runtime.training.aux_workers import AuxWorker, CriticWorker, LogprobWorker, Rows, pop_critic_state
from dora.stream.sample_db import StoredSample
from dora.trainer.advantage import AdvantageSettings
from dora.trainer.checkpoint_folders import KeptCheckpoints
from dora.trainer.critic import Critic, CriticSettings, initial_critic_weights
from dora.trainer.logprobs import GroupLogprobs
from dora.trainer.settings import Sample

GROUPS = tuple(GroupId(0, row) for row in range(4))
START = initial_weights(MODEL, seed=0)


class Stream:
    """A sample stream that has every group."""

    def __init__(self) -> None:
        self.filled: dict[GroupId, list[np.ndarray]] = {}

    def read_group(self, group: GroupId) -> list[StoredSample]:
        return stored(group)

    def fill(self, group: GroupId, rows: Rows) -> None:
        assert group not in self.filled, "a column is written twice"
        assert all(row.dtype == np.float32 for row in rows)
        self.filled[group] = [*rows]


def samples(group: GroupId) -> list[Sample]:
    return [to_sample(s) for s in stored(group)]


def logprobs(flat: torch.Tensor) -> GroupLogprobs:
    made = GroupLogprobs(MODEL, SETTINGS, "cpu")
    made.load_weights(flat)
    return made


def critic() -> Critic:
    return Critic(MODEL, initial_critic_weights(MODEL, START), CriticSettings(lr=1e-2, num_steps=9))


def send(worker: AuxWorker, *messages: object) -> list[object]:
    """Send messages, then compute all columns that can be computed; returns the replies."""
    replies = [worker.handle(message) for message in messages]
    while worker.can_compute:
        worker.compute_next()
    return [reply for reply in replies if reply is not None]


def expected(flat: torch.Tensor, group: GroupId) -> list[list[float]]:
    return [own.tolist() for own in logprobs(flat)(samples(group))]


def numbers(rows: Sequence[np.ndarray]) -> list[list[float]]:
    return [row.tolist() for row in rows]


def test_fixed_weights_need_no_version() -> None:
    stream = Stream()
    worker = LogprobWorker(stream, logprobs(START))
    send(worker, AccumulateGroup(5, GROUPS[1]), WeightsPublished(3, "digest"), AccumulateGroup(5, GROUPS[0]))
    assert {g: numbers(rows) for g, rows in stream.filled.items()} == {
        g: expected(START, g) for g in GROUPS[:2]
    }


def test_proximal_logprobs_are_those_of_the_version_that_a_step_starts_from() -> None:
    stream, versions = Stream(), {0: START, 1: START * 1.1}
    worker = LogprobWorker(stream, GroupLogprobs(MODEL, SETTINGS, "cpu"), versions.__getitem__)
    send(worker, AccumulateGroup(0, GROUPS[0]))
    assert not stream.filled
    send(worker, WeightsPublished(0, "digest"), AccumulateGroup(1, GROUPS[1]), AccumulateGroup(1, GROUPS[2]))
    assert [*stream.filled] == [GROUPS[0]]
    send(worker, WeightsPublished(1, "digest"), AccumulateGroup(1, GROUPS[3]))
    assert numbers(stream.filled[GROUPS[0]]) == expected(START, GROUPS[0])
    for group in GROUPS[1:]:
        assert numbers(stream.filled[group]) == expected(START * 1.1, group)


def test_a_worker_started_after_a_step_waits_for_the_next_one() -> None:
    stream = Stream()
    worker = LogprobWorker(stream, logprobs(START), {1: START * 1.1}.get)
    send(worker, WeightsPublished(0, "digest"), WeightsPublished(1, "digest"), AccumulateGroup(1, GROUPS[0]))
    assert numbers(stream.filled[GROUPS[0]]) == expected(START * 1.1, GROUPS[0])


def test_a_redone_step_is_computed_before_later_steps_that_were_committed_earlier() -> None:
    stream = Stream()
    worker = LogprobWorker(stream, GroupLogprobs(MODEL, SETTINGS, "cpu"), lambda version: START)
    send(worker, AccumulateGroup(3, GROUPS[0]), AccumulateGroup(2, GROUPS[2]), AccumulateGroup(2, GROUPS[1]))
    send(worker, WeightsPublished(2, "digest"))
    assert [*stream.filled] == [GROUPS[2], GROUPS[1]]


def test_a_critic_predicts_values_of_committed_groups_and_is_updated_with_the_batch(
    tmp_path: Path,
) -> None:
    """Values of the next step come after the update, which equals that of a critic in the trainer."""
    stream, reference = Stream(), critic()
    settings = AdvantageSettings("gae", max_tokens=6, overlong_buffer_tokens=2)
    worker = CriticWorker(stream, critic(), settings.shape_rewards, tmp_path)
    send(worker, AccumulateGroup(0, GROUPS[1]), AccumulateGroup(0, GROUPS[0]), AccumulateGroup(1, GROUPS[2]))
    assert [*stream.filled] == [GROUPS[1], GROUPS[0]]
    (reply,) = send(worker, TrainStep(0, GROUPS[1::-1]))
    predicted = [s for group in GROUPS[:2] for s in reference.predict_values(samples(group))]
    reference.compute_advantages(*at_the_end(predicted, [1.0, 0.25 - 0.5] * 2))
    assert reply.metrics == reference.update(0)  # type: ignore[attr-defined]
    assert numbers(stream.filled[GROUPS[2]]) == [
        s.values for s in reference.predict_values(samples(GROUPS[2]))
    ]


def test_observations_count_towards_the_overlong_penalty_of_a_critic(tmp_path: Path) -> None:
    class Episodes(Stream):
        def read_group(self, group: GroupId) -> list[StoredSample]:
            return episodes(group)

    settings = AdvantageSettings("gae", max_tokens=6, overlong_buffer_tokens=2)
    worker, reference = CriticWorker(Episodes(), critic(), settings.shape_rewards, tmp_path), critic()
    (reply,) = send(worker, AccumulateGroup(0, GROUPS[0]), TrainStep(0, GROUPS[:1]))
    reference.compute_advantages(*at_the_end([to_sample(s) for s in episodes(GROUPS[0])], [1.0, 0.25 - 0.5]))
    assert reply.metrics == reference.update(0)  # type: ignore[attr-defined]


def test_a_critic_scores_each_sequence_of_an_episode_with_branches(tmp_path: Path) -> None:
    class Branched(Stream):
        def read_group(self, group: GroupId) -> list[StoredSample]:
            return [branched([0.0, 0.25, 0.0, 0.75])]

    stream, reference = Branched(), critic()
    worker = CriticWorker(stream, critic(), AdvantageSettings("gae").shape_rewards, tmp_path)
    tree = to_samples(branched())
    for step in range(2):  # so that values are not 0
        (reply,) = send(worker, AccumulateGroup(step, GROUPS[step]), TrainStep(step, GROUPS[step : step + 1]))
        predicted = reference.predict_values(tree)
        values = [value for s in predicted for value in s.values or ()]
        assert numbers(stream.filled[GROUPS[step]]) == [pytest.approx(values)]
        reference.compute_advantages([predicted], [[0.0, 0.0, 0.25, 0.0, 0.75]])
        assert reply.metrics == reference.update(step)  # type: ignore[attr-defined]


def test_a_repeated_step_updates_the_critic_once(tmp_path: Path) -> None:
    worker = CriticWorker(Stream(), critic(), AdvantageSettings("gae").shape_rewards, tmp_path)
    request = TrainStep(0, GROUPS[:1])
    assert len(send(worker, AccumulateGroup(0, GROUPS[0]), request, request)) == 1


def test_a_critic_continues_from_the_state_that_it_left_for_a_checkpoint(tmp_path: Path) -> None:
    worker = CriticWorker(Stream(), first := critic(), AdvantageSettings("gae").shape_rewards, tmp_path)
    save = SaveCheckpoint(tmp_path, "{}", tmp_path, KeptCheckpoints(1), False)
    send(worker, AccumulateGroup(0, GROUPS[0]), TrainStep(0, GROUPS[:1]), save)
    state, other = pop_critic_state(tmp_path, 1, timeout_s=0.0), critic()
    other.flat.copy_(state["flat"])
    other.load_state_dict(state["optimizer"])
    stream = Stream()
    later = CriticWorker(stream, other, AdvantageSettings("gae").shape_rewards, tmp_path, num_steps_done=1)
    for each in (worker, later):
        send(each, AccumulateGroup(1, GROUPS[1]), TrainStep(1, GROUPS[1:2]))
    assert torch.equal(first.flat, other.flat)
    assert not list(tmp_path.iterdir())
    with pytest.raises(RunError, match=r"did not save its state after step 1 within 0\.01 s"):
        pop_critic_state(tmp_path, 1, timeout_s=0.01)
