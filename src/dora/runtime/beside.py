"""Stations beside the trainer: each makes one column of the groups that are committed to a step.

`reference` are log-probs of the policy that the loss compares with, `proximal` those of the policy
before the step, `values` what a critic foretells; the critic also learns here, while the trainer does.
A group is computed by itself, so that its bits depend on nothing but the weights. `stationed` has the
driver's side.
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.core.records import GroupId
from dora.engine.exact import Scorer
from dora.errors import NoRoomError, RunError, StreamError
from dora.model.config import ModelConfig
from dora.model.folder import load_folder
from dora.runtime.devices import use_device
from dora.runtime.messages import (
    Accumulate,
    Filled,
    Learnt,
    Ready,
    Save,
    StationSpec,
    TrainerSpec,
    TrainStep,
    WeightsPublished,
)
from dora.runtime.process import Inbox, Outbox
from dora.stream.feed import GroupReader
from dora.stream.samples import StoredSample
from dora.trainer.checkpoint import load_checkpoint
from dora.trainer.critic import Critic, initial_critic
from dora.trainer.learner import Score
from dora.trainer.logprobs import GroupLogprobs
from dora.trainer.settings import Sample
from dora.weights.store import WeightStore

Rows = Sequence[NDArray[np.float32]]  # [tokens] of each answer of a group
_POLL_S = 0.01
_REDONE = "redone"  # a folder beside the versions
Shaped = Callable[[Sequence[Sequence[float]], Sequence[Sequence[int]]], list[list[float]]]


class Groups(Protocol):
    """A consumer's side of the stream, as `dora.stream.feed.GroupReader`."""

    def group(self, group: GroupId) -> list[StoredSample]:
        """The answers of a committed group."""

    def fill(self, group: GroupId, rows: Rows) -> None:
        """The column of this group."""


class Columns:
    """Fills the column of committed groups, step by step, as far as the weights are there."""

    def __init__(self, groups: Groups, last_step: float) -> None:
        """Groups of steps up to `last_step` can be computed with the weights that are here."""
        self._groups, self._last_step = groups, last_step
        self._waiting: list[tuple[int, int, GroupId]] = []  # heap of (step, number, group)
        self._num_committed = 0

    def commit(self, step: int, group: GroupId) -> None:
        """The group belongs to the step's batch; one of a step that is redone may come after later ones."""
        heapq.heappush(self._waiting, (step, self._num_committed, group))
        self._num_committed += 1

    def begin(self, step: int) -> None:
        """The weights that this step begins with are here."""
        self._last_step = step

    @property
    def can_work(self) -> bool:
        """Whether there is a group to compute."""
        return bool(self._waiting) and self._waiting[0][0] <= self._last_step

    def work(self, compute: Callable[[GroupId, list[StoredSample]], Rows]) -> None:
        """Compute the next group."""
        *_, group = heapq.heappop(self._waiting)
        self._groups.fill(group, compute(group, self._groups.group(group)))


class LogprobStation:
    """Log-probs under weights that stay for a whole step, or for good."""

    def __init__(
        self, groups: Groups, logprobs: GroupLogprobs, sources: Callable[[int], Tensor | None] | None = None
    ) -> None:
        """`sources` gives the version that a step begins with, or None where that step is over.

        Without it the weights never change.
        """
        self._columns = Columns(groups, float("inf") if sources is None else -1)
        self._logprobs, self._sources = logprobs, sources

    @property
    def can_work(self) -> bool:
        return self._columns.can_work

    def work(self) -> None:
        self._columns.work(self._compute)

    def obey(self, message: object) -> Learnt | None:
        match message:
            case Accumulate(step, group):
                self._columns.commit(step, group)
            case WeightsPublished(version) if self._sources is not None:
                if (flat := self._sources(version)) is not None:
                    self._logprobs.use(flat)
                    self._columns.begin(version)
        return None

    def _compute(self, group: GroupId, stored: Sequence[StoredSample]) -> Rows:
        """The policy in training goes where engines sent its tokens, another one its own ways."""
        samples = [_sample(s) for s in stored]
        if self._sources is None:
            samples = [replace(s, routes=None) for s in samples]
        return [logprobs.numpy() for logprobs in self._logprobs(samples)]


class CriticStation:
    """A critic: values of a step's groups as they are committed, and one lesson when the batch is whole."""

    def __init__(
        self, groups: Groups, critic: Critic, shaped: Shaped, folder: Path, num_steps_done: int = 0
    ) -> None:
        """`shaped` is `Scoring.shaped`. What a checkpoint keeps goes through a file in `folder`."""
        self._critic, self._num_steps_done = critic, num_steps_done
        self._shaped, self._folder = shaped, folder
        self._columns = Columns(groups, num_steps_done)
        self._foretold: dict[GroupId, tuple[list[Sample], list[float]]] = {}  # with their rewards

    @property
    def can_work(self) -> bool:
        return self._columns.can_work

    def work(self) -> None:
        self._columns.work(self._compute)

    def obey(self, message: object) -> Learnt | None:
        match message:
            case Accumulate(step, group):
                self._columns.commit(step, group)
            case TrainStep(step, groups) if step == self._num_steps_done:  # one that is repeated was learnt
                return Learnt(step, self._learn(groups))
            case Save():
                write_critic(self._folder, self._num_steps_done, self._critic)
        return None

    def _compute(self, group: GroupId, stored: Sequence[StoredSample]) -> Rows:
        samples = self._critic.foretell([_sample(s) for s in stored])
        self._foretold[group] = samples, [s.reward for s in stored]
        return [np.array(s.values, np.float32) for s in samples]

    def _learn(self, groups: Sequence[GroupId]) -> dict[str, float]:
        """In the order of the groups' names, as the trainer puts a whole batch."""
        while self.can_work:
            self.work()
        told = [self._foretold.pop(group) for group in sorted(groups)]
        rewards = self._shaped(
            [own for _, own in told], [[s.num_drawn for s in samples] for samples, _ in told]
        )
        self._critic.judge([s for samples, _ in told for s in samples], [x for own in rewards for x in own])
        metrics = self._critic.learn(self._num_steps_done)
        self._critic.end_step()
        self._num_steps_done += 1
        self._columns.begin(self._num_steps_done)
        return metrics


Station = LogprobStation | CriticStation


def run_station(outbox: Outbox, inbox: Inbox, spec: StationSpec) -> None:
    """Compute what was committed, and do what the trainer is told as far as it concerns this station."""
    torch.set_num_threads(1)
    outbox.beat()
    station = _make(spec, _Reported(spec, outbox))
    outbox.send(Ready())
    while True:
        for message in inbox.take(0.0 if station.can_work else None):
            if (reply := station.obey(message)) is not None:
                outbox.send(reply)
        if station.can_work:
            station.work()


class _Reported:
    """The stream's side of a station that tells the driver which groups are done."""

    def __init__(self, spec: StationSpec, outbox: Outbox) -> None:
        self._column, self._outbox = spec.column, outbox
        self._reader = GroupReader(spec.trainer.stream, spec.column, spec.trainer.column_wait_s)

    def group(self, group: GroupId) -> list[StoredSample]:
        return self._reader.group(group)

    def fill(self, group: GroupId, rows: Rows) -> None:
        """Let go of it last: what has not been told of must be there for a successor."""
        try:
            self._reader.fill(group, rows)
        except NoRoomError:
            raise
        except StreamError:
            pass  # who died here before may have filled it
        except RunError:
            return  # the storage has ended, and a successor fills it again
        self._outbox.send(Filled(self._column, group))
        self._reader.commit([group])


def _make(spec: StationSpec, groups: Groups) -> Station:
    device, trainer = use_device(spec.device), spec.trainer
    if spec.column == "values":
        critic, num_steps_done = make_critic(trainer, device), 0
        if trainer.checkpoint is not None:
            _, _, state, num_steps_done = load_checkpoint(trainer.checkpoint)
            critic.flat.copy_(state["critic"]["flat"])
            critic.load_state_dict(state["critic"]["optimizer"])
        return CriticStation(groups, critic, trainer.scoring.shaped, trainer.weights, num_steps_done)
    config, start = load_folder(trainer.model)
    if spec.column == "reference":
        logprobs = GroupLogprobs(config, trainer.settings, device)
        logprobs.use(start)
        return LogprobStation(groups, logprobs)
    logprobs = GroupLogprobs(config, trainer.settings, device, make_score(trainer, config))
    published, redone = WeightStore(trainer.weights, trainer.published_dtype), redone_store(trainer)

    def begun_with(version: int) -> Tensor | None:
        """A step that is redone begins with bytes of its own."""
        again = None if redone is None else redone.find(version)
        return published.find(version) if again is None else again

    return LogprobStation(groups, logprobs, begun_with)


def redone_store(spec: TrainerSpec) -> WeightStore | None:
    """Where a proximal station finds the version with which a step begins that is redone, if there is one."""
    if "proximal" not in spec.columns:
        return None
    folder = spec.weights / _REDONE
    folder.mkdir(exist_ok=True)
    return WeightStore(folder, spec.published_dtype)


def make_critic(spec: TrainerSpec, device: str) -> Critic:
    """At its beginning; who goes on from a checkpoint puts it where it was."""
    assert spec.critic is not None
    config, start = load_folder(spec.critic.model)
    return Critic(config, initial_critic(config, start).to(device), spec.critic.settings)


def make_score(spec: TrainerSpec, config: ModelConfig) -> Score | None:
    """In exact mode, log-probs as engines compute them."""
    if (engine := spec.exact) is None:
        return None
    temperature = spec.settings.temperature
    return Scorer(config, engine.max_context, temperature, engine.kernels, engine.dtype)


def write_critic(folder: Path, step: int, critic: Critic) -> None:
    """Leave what a checkpoint of that step needs of a critic to the trainer, who writes it."""
    path = _critic_file(folder, step)
    draft = path.with_suffix(".draft")
    torch.save({"flat": critic.flat, "optimizer": critic.state_dict()}, draft)
    os.replace(draft, path)


def take_critic(folder: Path, step: int, wait_s: float) -> dict[str, Any]:
    """What `write_critic` has left, which is then gone. Raises RunError if it does not come."""
    path, until_s = _critic_file(folder, step), time.monotonic() + wait_s
    while not path.exists():
        if time.monotonic() > until_s:
            raise RunError(f"the critic has not told for {wait_s:g} s what step {step} has left of it")
        time.sleep(_POLL_S)
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    path.unlink()
    return found


def _critic_file(folder: Path, step: int) -> Path:
    return folder / f"critic-{step}.pt"


def _sample(stored: StoredSample) -> Sample:
    routes, mask = stored.routes, stored.loss_mask
    return Sample(stored.prompt_ids, stored.token_ids, stored.logprobs, 0.0, routes=routes, loss_mask=mask)
