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

from dora.core.types import GroupId
from dora.engine.batch_invariant import LogprobScorer
from dora.errors import RunError, StorageFullError, StreamError
from dora.model.config import ModelConfig
from dora.model.pretrained import load_pretrained
from dora.runtime.process.messages import (
    AccumulateGroup,
    AuxWorkerSpec,
    ColumnFilled,
    CriticUpdated,
    SaveCheckpoint,
    TrainerSpec,
    TrainStep,
    WeightsPublished,
    WorkerReady,
)
from dora.runtime.process.resources import use_device
from dora.runtime.process.worker_process import WorkerInbox, WorkerOutbox
from dora.stream.run_stream import GroupReader
from dora.stream.sample_db import StoredSample
from dora.trainer.checkpoint import load_checkpoint
from dora.trainer.critic import Critic, initial_critic_weights
from dora.trainer.learner import ComputeLogprobs
from dora.trainer.logprobs import GroupLogprobs
from dora.trainer.settings import Sample
from dora.weights.store import WeightStore

Rows = Sequence[NDArray[np.float32]]  # [tokens] of each answer of a group
_POLL_S = 0.01
_REDONE = "redone"  # a folder beside the versions
Shaped = Callable[[Sequence[Sequence[float]], Sequence[Sequence[int]]], list[list[float]]]


class GroupStream(Protocol):
    """A consumer's side of the stream, as `dora.stream.run_stream.GroupReader`."""

    def read_group(self, group: GroupId) -> list[StoredSample]:
        """The answers of a committed group."""

    def fill(self, group: GroupId, rows: Rows) -> None:
        """The column of this group."""


class ColumnQueue:
    """Fills the column of committed groups, step by step, as far as the weights are there."""

    def __init__(self, groups: GroupStream, last_step: float) -> None:
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
        self._groups.fill(group, compute(group, self._groups.read_group(group)))


class LogprobWorker:
    """Log-probs under weights that stay for a whole step, or for good."""

    def __init__(
        self,
        groups: GroupStream,
        logprobs: GroupLogprobs,
        sources: Callable[[int], Tensor | None] | None = None,
    ) -> None:
        """`sources` gives the version that a step begins with, or None where that step is over.

        Without it the weights never change.
        """
        self._columns = ColumnQueue(groups, float("inf") if sources is None else -1)
        self._logprobs, self._sources = logprobs, sources

    @property
    def can_work(self) -> bool:
        return self._columns.can_work

    def work(self) -> None:
        self._columns.work(self._compute)

    def handle(self, message: object) -> CriticUpdated | None:
        match message:
            case AccumulateGroup(step, group):
                self._columns.commit(step, group)
            case WeightsPublished(version) if self._sources is not None:
                if (flat := self._sources(version)) is not None:
                    self._logprobs.load_weights(flat)
                    self._columns.begin(version)
        return None

    def _compute(self, group: GroupId, stored: Sequence[StoredSample]) -> Rows:
        """The policy in training goes where engines sent its tokens, another one its own ways."""
        samples = [_sample(s) for s in stored]
        if self._sources is None:
            samples = [replace(s, routes=None) for s in samples]
        return [logprobs.numpy() for logprobs in self._logprobs(samples)]


class CriticWorker:
    """A critic: values of a step's groups as they are committed, and one lesson when the batch is whole."""

    def __init__(
        self, groups: GroupStream, critic: Critic, shaped: Shaped, folder: Path, num_steps_done: int = 0
    ) -> None:
        """`shaped` is `Scoring.shaped`. What a checkpoint keeps goes through a file in `folder`."""
        self._critic, self._num_steps_done = critic, num_steps_done
        self._shaped, self._folder = shaped, folder
        self._columns = ColumnQueue(groups, num_steps_done)
        self._foretold: dict[GroupId, tuple[list[Sample], list[float]]] = {}  # with their rewards

    @property
    def can_work(self) -> bool:
        return self._columns.can_work

    def work(self) -> None:
        self._columns.work(self._compute)

    def handle(self, message: object) -> CriticUpdated | None:
        match message:
            case AccumulateGroup(step, group):
                self._columns.commit(step, group)
            case TrainStep(step, groups) if step == self._num_steps_done:  # one that is repeated was learnt
                return CriticUpdated(step, self._learn(groups))
            case SaveCheckpoint():
                write_critic_state(self._folder, self._num_steps_done, self._critic)
        return None

    def _compute(self, group: GroupId, stored: Sequence[StoredSample]) -> Rows:
        samples = self._critic.predict_values([_sample(s) for s in stored])
        self._foretold[group] = samples, [s.reward for s in stored]
        return [np.array(s.values, np.float32) for s in samples]

    def _learn(self, groups: Sequence[GroupId]) -> dict[str, float]:
        """In the order of the groups' names, as the trainer puts a whole batch."""
        while self.can_work:
            self.work()
        told = [self._foretold.pop(group) for group in sorted(groups)]
        rewards = self._shaped(
            [own for _, own in told], [[s.num_loss_tokens for s in samples] for samples, _ in told]
        )
        self._critic.compute_advantages(
            [s for samples, _ in told for s in samples], [x for own in rewards for x in own]
        )
        metrics = self._critic.update(self._num_steps_done)
        self._critic.end_step()
        self._num_steps_done += 1
        self._columns.begin(self._num_steps_done)
        return metrics


AuxWorker = LogprobWorker | CriticWorker


def run_aux_worker(outbox: WorkerOutbox, inbox: WorkerInbox, spec: AuxWorkerSpec) -> None:
    """Compute what was committed, and do what the trainer is told as far as it concerns this station."""
    torch.set_num_threads(1)
    outbox.start_heartbeat()
    station = _make(spec, _Reported(spec, outbox))
    outbox.send(WorkerReady())
    while True:
        for message in inbox.receive(0.0 if station.can_work else None):
            if (reply := station.handle(message)) is not None:
                outbox.send(reply)
        if station.can_work:
            station.work()


class _Reported:
    """The stream's side of a station that tells the driver which groups are done."""

    def __init__(self, spec: AuxWorkerSpec, outbox: WorkerOutbox) -> None:
        self._column, self._outbox = spec.column, outbox
        self._reader = GroupReader(spec.trainer.stream, spec.column, spec.trainer.column_timeout_s)

    def read_group(self, group: GroupId) -> list[StoredSample]:
        return self._reader.read_group(group)

    def fill(self, group: GroupId, rows: Rows) -> None:
        """Let go of it last: what has not been told of must be there for a successor."""
        try:
            self._reader.fill(group, rows)
        except StorageFullError:
            raise
        except StreamError:
            pass  # who died here before may have filled it
        except RunError:
            return  # the storage has ended, and a successor fills it again
        self._outbox.send(ColumnFilled(self._column, group))
        self._reader.commit([group])


def _make(spec: AuxWorkerSpec, groups: GroupStream) -> AuxWorker:
    device, trainer = use_device(spec.device), spec.trainer
    if spec.column == "values":
        critic, num_steps_done = make_critic(trainer, device), 0
        if trainer.checkpoint is not None:
            _, _, state, num_steps_done = load_checkpoint(trainer.checkpoint)
            critic.flat.copy_(state["critic"]["flat"])
            critic.load_state_dict(state["critic"]["optimizer"])
        return CriticWorker(
            groups, critic, trainer.advantage_settings.shape_rewards, trainer.weights, num_steps_done
        )
    config, start = load_pretrained(trainer.model)
    if spec.column == "reference":
        logprobs = GroupLogprobs(config, trainer.settings, device)
        logprobs.load_weights(start)
        return LogprobWorker(groups, logprobs)
    logprobs = GroupLogprobs(config, trainer.settings, device, make_exact_logprobs(trainer, config))
    published, redone = WeightStore(trainer.weights, trainer.published_dtype), replay_store(trainer)

    def begun_with(version: int) -> Tensor | None:
        """A step that is redone begins with bytes of its own."""
        again = None if redone is None else redone.fetch_if_stored(version)
        return published.fetch_if_stored(version) if again is None else again

    return LogprobWorker(groups, logprobs, begun_with)


def replay_store(spec: TrainerSpec) -> WeightStore | None:
    """Where a proximal station finds the version with which a step begins that is redone, if there is one."""
    if "proximal" not in spec.columns:
        return None
    folder = spec.weights / _REDONE
    folder.mkdir(exist_ok=True)
    return WeightStore(folder, spec.published_dtype)


def make_critic(spec: TrainerSpec, device: str) -> Critic:
    """At its beginning; who goes on from a checkpoint puts it where it was."""
    assert spec.critic is not None
    config, start = load_pretrained(spec.critic.model)
    return Critic(config, initial_critic_weights(config, start).to(device), spec.critic.settings)


def make_exact_logprobs(spec: TrainerSpec, config: ModelConfig) -> ComputeLogprobs | None:
    """In exact mode, log-probs as engines compute them."""
    if (engine := spec.exact_engine) is None:
        return None
    temperature = spec.settings.temperature
    return LogprobScorer(config, engine.max_context, temperature, engine.kernels, engine.dtype)


def write_critic_state(folder: Path, step: int, critic: Critic) -> None:
    """Leave what a checkpoint of that step needs of a critic to the trainer, who writes it."""
    path = _critic_file(folder, step)
    draft = path.with_suffix(".draft")
    torch.save({"flat": critic.flat, "optimizer": critic.state_dict()}, draft)
    os.replace(draft, path)


def pop_critic_state(folder: Path, step: int, timeout_s: float) -> dict[str, Any]:
    """What `write_critic` has left, which is then gone. Raises RunError if it does not come."""
    path, until_s = _critic_file(folder, step), time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > until_s:
            raise RunError(f"the critic has not told for {timeout_s:g} s what step {step} has left of it")
        time.sleep(_POLL_S)
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    path.unlink()
    return found


def _critic_file(folder: Path, step: int) -> Path:
    return folder / f"critic-{step}.pt"


def _sample(stored: StoredSample) -> Sample:
    routes, mask = stored.routes, stored.loss_mask
    return Sample(stored.prompt_ids, stored.token_ids, stored.logprobs, 0.0, routes=routes, loss_mask=mask)
