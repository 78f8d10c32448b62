"""Stations beside the trainer fill columns of committed groups, with the weights of the step they are for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.runtime.training.test_accumulator import SETTINGS, stored
from tests.runtime.tiny import MODEL

from dora.core.types import GroupId
from dora.errors import RunError
from dora.model.weights import initial_weights
from dora.runtime.process.messages import AccumulateGroup, SaveCheckpoint, TrainStep, WeightsPublished
from dora.runtime.training.aux_workers import AuxWorker, CriticWorker, LogprobWorker, Rows, pop_critic_state
from dora.stream.sample_db import StoredSample
from dora.trainer.advantage import AdvantageSettings
from dora.trainer.critic import Critic, CriticSettings, initial_critic_weights
from dora.trainer.logprobs import GroupLogprobs
from dora.trainer.settings import Sample

GROUPS = tuple(GroupId(0, row) for row in range(4))
START = initial_weights(MODEL, seed=0)


class Shelf:
    """A stream of answers that are there whenever they are asked for."""

    def __init__(self) -> None:
        self.filled: dict[GroupId, list[np.ndarray]] = {}

    def read_group(self, group: GroupId) -> list[StoredSample]:
        return stored(group)

    def fill(self, group: GroupId, rows: Rows) -> None:
        assert group not in self.filled, "a column is written once"
        assert all(row.dtype == np.float32 for row in rows)
        self.filled[group] = [*rows]


def answers(group: GroupId) -> list[Sample]:
    return [Sample(s.prompt_ids, s.token_ids, s.logprobs, 0.0) for s in stored(group)]


def logprobs(flat: torch.Tensor) -> GroupLogprobs:
    made = GroupLogprobs(MODEL, SETTINGS, "cpu")
    made.load_weights(flat)
    return made


def critic() -> Critic:
    return Critic(MODEL, initial_critic_weights(MODEL, START), CriticSettings(lr=1e-2, num_steps=9))


def tell(station: AuxWorker, *messages: object) -> list[object]:
    """Say all that, then let it work as long as it can; its replies."""
    replies = [station.handle(message) for message in messages]
    while station.can_work:
        station.work()
    return [reply for reply in replies if reply is not None]


def expected(flat: torch.Tensor, group: GroupId) -> list[list[float]]:
    return [own.tolist() for own in logprobs(flat)(answers(group))]


def numbers(rows: Sequence[np.ndarray]) -> list[list[float]]:
    return [row.tolist() for row in rows]


def test_weights_that_never_change_need_no_version() -> None:
    shelf = Shelf()
    station = LogprobWorker(shelf, logprobs(START))
    tell(station, AccumulateGroup(5, GROUPS[1]), WeightsPublished(3, "digest"), AccumulateGroup(5, GROUPS[0]))
    assert {g: numbers(rows) for g, rows in shelf.filled.items()} == {
        g: expected(START, g) for g in GROUPS[:2]
    }


def test_log_probs_before_a_step_are_those_of_the_version_it_begins_with() -> None:
    shelf, versions = Shelf(), {0: START, 1: START * 1.1}
    station = LogprobWorker(shelf, GroupLogprobs(MODEL, SETTINGS, "cpu"), versions.__getitem__)
    tell(station, AccumulateGroup(0, GROUPS[0]))
    assert not shelf.filled
    tell(station, WeightsPublished(0, "digest"), AccumulateGroup(1, GROUPS[1]), AccumulateGroup(1, GROUPS[2]))
    assert [*shelf.filled] == [GROUPS[0]]
    tell(station, WeightsPublished(1, "digest"), AccumulateGroup(1, GROUPS[3]))
    assert numbers(shelf.filled[GROUPS[0]]) == expected(START, GROUPS[0])
    for group in GROUPS[1:]:
        assert numbers(shelf.filled[group]) == expected(START * 1.1, group)


def test_a_station_that_comes_too_late_for_a_step_waits_for_the_next_one() -> None:
    shelf = Shelf()
    station = LogprobWorker(shelf, logprobs(START), {1: START * 1.1}.get)
    tell(station, WeightsPublished(0, "digest"), WeightsPublished(1, "digest"), AccumulateGroup(1, GROUPS[0]))
    assert numbers(shelf.filled[GROUPS[0]]) == expected(START * 1.1, GROUPS[0])


def test_a_step_that_is_redone_goes_before_those_that_were_committed_earlier() -> None:
    shelf = Shelf()
    station = LogprobWorker(shelf, GroupLogprobs(MODEL, SETTINGS, "cpu"), lambda version: START)
    tell(station, AccumulateGroup(3, GROUPS[0]), AccumulateGroup(2, GROUPS[2]), AccumulateGroup(2, GROUPS[1]))
    tell(station, WeightsPublished(2, "digest"))
    assert [*shelf.filled] == [GROUPS[2], GROUPS[1]]


def test_a_critic_foretells_what_is_committed_and_learns_from_the_whole_batch(tmp_path: Path) -> None:
    """Values of the next step come after the lesson, which is that of a critic in the trainer."""
    shelf, alone = Shelf(), critic()
    scoring = AdvantageSettings("gae", max_tokens=6, overlong_buffer_tokens=2)
    station = CriticWorker(shelf, critic(), scoring.shape_rewards, tmp_path)
    tell(station, AccumulateGroup(0, GROUPS[1]), AccumulateGroup(0, GROUPS[0]), AccumulateGroup(1, GROUPS[2]))
    assert [*shelf.filled] == [GROUPS[1], GROUPS[0]]
    (learnt,) = tell(station, TrainStep(0, GROUPS[1::-1]))
    told = [s for group in GROUPS[:2] for s in alone.predict_values(answers(group))]
    alone.compute_advantages(told, [1.0, 0.25 - 0.5] * 2)
    assert learnt.metrics == alone.update(0)  # type: ignore[attr-defined]
    assert numbers(shelf.filled[GROUPS[2]]) == [s.values for s in alone.predict_values(answers(GROUPS[2]))]


def test_a_step_that_is_repeated_is_learnt_once(tmp_path: Path) -> None:
    station = CriticWorker(Shelf(), critic(), AdvantageSettings("gae").shape_rewards, tmp_path)
    order = TrainStep(0, GROUPS[:1])
    assert len(tell(station, AccumulateGroup(0, GROUPS[0]), order, order)) == 1


def test_a_critic_goes_on_from_what_it_left_for_a_checkpoint(tmp_path: Path) -> None:
    station = CriticWorker(Shelf(), whole := critic(), AdvantageSettings("gae").shape_rewards, tmp_path)
    save = SaveCheckpoint(tmp_path, "{}", tmp_path, 1, False)
    tell(station, AccumulateGroup(0, GROUPS[0]), TrainStep(0, GROUPS[:1]), save)
    state, other = pop_critic_state(tmp_path, 1, timeout_s=0.0), critic()
    other.flat.copy_(state["flat"])
    other.load_state_dict(state["optimizer"])
    shelf = Shelf()
    later = CriticWorker(shelf, other, AdvantageSettings("gae").shape_rewards, tmp_path, num_steps_done=1)
    for one in (station, later):
        tell(one, AccumulateGroup(1, GROUPS[1]), TrainStep(1, GROUPS[1:2]))
    assert torch.equal(whole.flat, other.flat)
    assert not list(tmp_path.iterdir())
    with pytest.raises(RunError, match=r"not told for 0\.01 s what step 1 has left of it"):
        pop_critic_state(tmp_path, 1, timeout_s=0.01)
