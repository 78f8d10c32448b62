"""Auxiliary workers of a trainer: each computes one column of the samples committed to a training step.

`reference`: log-probs of the policy that the loss is regularised towards, or of teachers. `proximal`:
log-probs of the policy before the step. `values`: predictions of a critic, which is also updated here. Each
group is computed by itself, so that its bits depend on the weights only. `aux_pool` is the driver's side.
"""

from __future__ import annotations

import heapq
import os
import time
from abc import ABC, abstractmethod
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
from dora.model.weights import Shapes
from dora.runtime.process.messages import (
    AccumulateGroup,
    AuxWorkerSpec,
    ColumnFilled,
    CriticUpdated,
    SaveCheckpoint,
    TeacherSpec,
    TrainerSpec,
    TrainStep,
    WeightsPublished,
    WorkerReady,
)
from dora.runtime.process.resources import use_device
from dora.runtime.process.worker_process import WorkerInbox, WorkerOutbox
from dora.runtime.training.accumulator import to_samples, token_rewards
from dora.stream.run_stream import GroupReader
from dora.stream.sample_db import StoredSample
from dora.trainer.continuation import load_start
from dora.trainer.critic import Critic, initial_critic_weights
from dora.trainer.learner import ComputeLogprobs
from dora.trainer.logprobs import GroupLogprobs
from dora.trainer.settings import Sample, TrainerSettings
from dora.trainer.teachers import ServerTeacher, Teacher, mean_teacher
from dora.weights.store import WeightStore

Rows = Sequence[NDArray[np.float32]]  # [tokens] of each sample of a group
ShapeRewards = Callable[[Sequence[Sequence[float]], Sequence[Sequence[int]]], list[list[float]]]

_POLL_S = 0.01
_REPLAY_DIR = "redone"  # in the folder of the published versions


class GroupStream(Protocol):
    """The sample stream as an aux worker sees it; see `dora.stream.run_stream.GroupReader`."""

    def read_group(self, group: GroupId) -> list[StoredSample]:
        """The samples of a committed group."""

    def fill(self, group: GroupId, rows: Rows) -> None:
        """Write the worker's column of a group."""


class ColumnWorker(ABC):
    """Computes a column of committed groups, in the order of their steps."""

    def __init__(self, groups: GroupStream, last_step: float) -> None:
        """Groups of steps up to `last_step` can be computed with the weights at hand."""
        self._groups, self._last_step = groups, last_step
        self._pending: list[tuple[int, int, GroupId]] = []  # heap of (step, number, group)
        self._num_committed = 0

    @property
    def can_compute(self) -> bool:
        """Whether a group can be computed now."""
        return bool(self._pending) and self._pending[0][0] <= self._last_step

    def compute_next(self) -> None:
        """Compute and write the column of the next group."""
        *_, group = heapq.heappop(self._pending)
        self._groups.fill(group, self._compute(group, self._groups.read_group(group)))

    def _commit(self, step: int, group: GroupId) -> None:
        """Add a group that is committed to `step`. A redone step may come after later ones."""
        heapq.heappush(self._pending, (step, self._num_committed, group))
        self._num_committed += 1

    @abstractmethod
    def _compute(self, group: GroupId, stored: Sequence[StoredSample]) -> Rows: ...


class LogprobWorker(ColumnWorker):
    """Computes log-probs under the weights that a step starts from, or under weights that never change."""

    def __init__(
        self,
        groups: GroupStream,
        logprobs: GroupLogprobs | Teacher,
        fetch_version: Callable[[int], Tensor | None] | None = None,
    ) -> None:
        """`fetch_version` gives the weights that a step starts from, or None if that step is over.

        Without it the weights never change.
        """
        super().__init__(groups, float("inf") if fetch_version is None else -1)
        self._logprobs, self._fetch_version = logprobs, fetch_version

    def handle(self, message: object) -> CriticUpdated | None:
        match message:
            case AccumulateGroup(step, group):
                self._commit(step, group)
            case WeightsPublished(version) if self._fetch_version is not None:
                if (flat := self._fetch_version(version)) is not None:
                    assert isinstance(self._logprobs, GroupLogprobs)
                    self._logprobs.load_weights(flat)
                    self._last_step = version
        return None

    def _compute(self, group: GroupId, stored: Sequence[StoredSample]) -> Rows:
        """The policy in training replays the engines' MoE routes; the reference policy uses its own."""
        rows = [to_samples(s) for s in stored]
        samples = [sample for row in rows for sample in row]
        if self._fetch_version is None:
            samples = [replace(s, routes=None) for s in samples]
        logprobs = iter(self._logprobs(samples))
        return [np.concatenate([next(logprobs).numpy() for _ in row]) for row in rows]


class CriticWorker(ColumnWorker):
    """Predicts values of committed groups, and updates the critic once the batch of a step is complete."""

    def __init__(
        self,
        groups: GroupStream,
        critic: Critic,
        shape_rewards: ShapeRewards,
        folder: Path,
        num_steps_done: int = 0,
    ) -> None:
        """`shape_rewards`: see `AdvantageSettings`. The critic's state for a checkpoint goes to `folder`."""
        super().__init__(groups, num_steps_done)
        self._critic, self._num_steps_done = critic, num_steps_done
        self._shape_rewards, self._folder = shape_rewards, folder
        self._predicted: dict[GroupId, list[tuple[StoredSample, list[Sample]]]] = {}  # with values

    def handle(self, message: object) -> CriticUpdated | None:
        match message:
            case AccumulateGroup(step, group):
                self._commit(step, group)
            case TrainStep(step, groups) if step == self._num_steps_done:  # else the trainer repeats it
                return CriticUpdated(step, self._update(groups))
            case SaveCheckpoint():
                write_critic_state(self._folder, self._num_steps_done, self._critic)
        return None

    def _compute(self, group: GroupId, stored: Sequence[StoredSample]) -> Rows:
        rows = [to_samples(s) for s in stored]
        samples = iter(self._critic.predict_values([sample for row in rows for sample in row]))
        predicted = [(s, [next(samples) for _ in row]) for s, row in zip(stored, rows, strict=True)]
        self._predicted[group] = predicted
        return [np.array([v for s in row for v in s.values or ()], np.float32) for _, row in predicted]

    def _update(self, groups: Sequence[GroupId]) -> dict[str, float]:
        """Update the critic with the groups in sorted order, in which the trainer adds a whole batch."""
        while self.can_compute:
            self.compute_next()
        predicted = [self._predicted.pop(group) for group in sorted(groups)]
        rewards = self._shape_rewards(
            [[stored.reward for stored, _ in group] for group in predicted],
            [[len(stored.token_ids) for stored, _ in group] for group in predicted],
        )
        responses = [response for group in predicted for response in group]
        shaped = [reward for group in rewards for reward in group]
        self._critic.compute_advantages(
            [samples for _, samples in responses],
            [token_rewards(stored, reward) for (stored, _), reward in zip(responses, shaped, strict=True)],
        )
        metrics = self._critic.update(self._num_steps_done)
        self._critic.end_step()
        self._last_step = self._num_steps_done = self._num_steps_done + 1
        return metrics


AuxWorker = LogprobWorker | CriticWorker


def run_aux_worker(outbox: WorkerOutbox, inbox: WorkerInbox, spec: AuxWorkerSpec) -> None:
    """Handle the trainer's requests that concern an aux worker, and compute its column in between."""
    torch.set_num_threads(1)
    outbox.start_heartbeat()
    worker = _make_worker(spec, _ReportingReader(spec, outbox))
    outbox.send(WorkerReady())
    while True:
        for message in inbox.receive(0.0 if worker.can_compute else None):
            if (reply := worker.handle(message)) is not None:
                outbox.send(reply)
        if worker.can_compute:
            worker.compute_next()


class _ReportingReader(GroupReader):
    """The sample stream of an aux worker; reports each filled group to the driver."""

    def __init__(self, spec: AuxWorkerSpec, outbox: WorkerOutbox) -> None:
        super().__init__(spec.trainer.stream, spec.column, spec.trainer.column_timeout_s)
        self._column, self._outbox = spec.column, outbox

    def fill(self, group: GroupId, rows: Rows) -> None:
        """The group is released after the report, because a restarted worker must find unreported groups."""
        try:
            super().fill(group, rows)
        except StorageFullError:
            raise
        except StreamError:
            pass  # filled already by a worker that crashed before its report
        except RunError:
            return  # the storage was lost: the worker is restarted and fills the group again
        self._outbox.send(ColumnFilled(self._column, group))
        self.commit([group])


def _make_worker(spec: AuxWorkerSpec, groups: GroupStream) -> AuxWorker:
    device, trainer = use_device(spec.device), spec.trainer
    if spec.column == "values":
        critic, num_steps_done = make_critic(trainer, device), 0
        if (saved := load_start(trainer.checkpoint, trainer.continued)) is not None:
            _, state, num_steps_done = saved
            critic.flat.copy_(state["critic"]["flat"])
            critic.load_state_dict(state["critic"]["optimizer"])
        return CriticWorker(
            groups, critic, trainer.advantage_settings.shape_rewards, trainer.weights, num_steps_done
        )
    config, start = load_pretrained(trainer.model)
    if spec.column == "reference":
        if trainer.teachers is not None:
            return LogprobWorker(groups, _make_teachers(trainer.teachers, trainer.settings, device))
        reference = GroupLogprobs(config, trainer.settings, device)
        reference.load_weights(start)
        return LogprobWorker(groups, reference)
    logprobs = GroupLogprobs(config, trainer.settings, device, make_exact_logprobs(trainer, config))
    published, replayed = WeightStore(trainer.weights, trainer.published_dtype), replay_store(trainer)

    def fetch_version(version: int) -> Tensor | None:
        """A redone step starts from the redone version, which may differ from the published one."""
        redone = None if replayed is None else replayed.fetch_if_stored(version)
        return published.fetch_if_stored(version) if redone is None else redone

    return LogprobWorker(groups, logprobs, fetch_version)


def _make_teachers(spec: TeacherSpec, settings: TrainerSettings, device: str) -> Teacher:
    teachers: list[Teacher] = [ServerTeacher(server, spec.timeout_s) for server in spec.servers]
    for folder in spec.folders:
        config, flat = load_pretrained(folder)
        teachers.append(own := GroupLogprobs(config, settings, device))
        own.load_weights(flat)
    return mean_teacher(teachers)


def replay_store(spec: TrainerSpec, shapes: Shapes | None = None) -> WeightStore | None:
    """Where the trainer leaves versions of redone steps for the proximal worker; None without one.

    The trainer gives the `shapes` of the tensors, as it publishes.
    """
    if "proximal" not in spec.columns:
        return None
    folder = spec.weights / _REPLAY_DIR
    folder.mkdir(exist_ok=True)
    return WeightStore(folder, spec.published_dtype, shapes)


def make_critic(spec: TrainerSpec, device: str) -> Critic:
    """The critic in its initial state, whatever `spec.checkpoint` is."""
    assert spec.critic is not None
    config, start = load_pretrained(spec.critic.model)
    return Critic(config, initial_critic_weights(config, start).to(device), spec.critic.settings)


def make_exact_logprobs(spec: TrainerSpec, config: ModelConfig) -> ComputeLogprobs | None:
    """A function that computes log-probs as the engines do; None without exact mode."""
    if (engine := spec.exact_engine) is None:
        return None
    temperature = spec.settings.temperature
    return LogprobScorer(config, engine.max_context, temperature, engine.kernels, engine.dtype)


def write_critic_state(folder: Path, step: int, critic: Critic) -> None:
    """Write the critic's state after `step` to `folder`; the trainer adds it to its checkpoint."""
    path = _critic_file(folder, step)
    draft = path.with_suffix(".draft")
    torch.save({"flat": critic.flat, "optimizer": critic.state_dict()}, draft)
    os.replace(draft, path)


def pop_critic_state(folder: Path, step: int, timeout_s: float) -> dict[str, Any]:
    """Wait for the file of `write_critic_state`, read and remove it. Raises RunError after `timeout_s`."""
    path, until_s = _critic_file(folder, step), time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > until_s:
            raise RunError(f"the critic did not save its state after step {step} within {timeout_s:g} s")
        time.sleep(_POLL_S)
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    path.unlink()
    return state


def _critic_file(folder: Path, step: int) -> Path:
    return folder / f"critic-{step}.pt"
