"""The processes of a trainer: rank 0, which handles the driver's requests, and followers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dora.core.types import GroupId
from dora.engine.interface import TrainingEngine
from dora.model.config import ModelConfig
from dora.model.pretrained import load_config, load_pretrained
from dora.model.weights import parameter_shapes
from dora.runtime.process import backends
from dora.runtime.process.messages import (
    AccumulateGroup,
    PublishWeights,
    SaveCheckpoint,
    StepCompleted,
    StepRejected,
    TrainerSpec,
    TrainStep,
    WeightsPublished,
    WorkerReady,
)
from dora.runtime.process.resources import use_device
from dora.runtime.process.worker_process import WorkerInbox, WorkerOutbox
from dora.runtime.training.accumulator import Accumulator, ComputeAdvantages, to_sample
from dora.runtime.training.aux_workers import (
    make_critic,
    make_exact_logprobs,
    pop_critic_state,
    replay_store,
)
from dora.runtime.training.checkpoints import CheckpointWriter, ExtraFiles, TrainerState
from dora.stream.run_stream import GroupReader
from dora.stream.sample_db import StoredSample
from dora.trainer.continuation import load_start
from dora.trainer.critic import with_advantages
from dora.trainer.lora import peft_files
from dora.trainer.optimizer import host_copy
from dora.trainer.perf import StepTimer
from dora.trainer.trainer import Sample, Trainer
from dora.weights.store import RecentVersions, WeightStore
from dora.weights.version_file import DTYPES

if TYPE_CHECKING:
    from dora.trainer.distributed import RankGroup

RENDEZVOUS_FILE = "ranks"  # beside the weights: where the ranks of a trainer meet


def run_trainer(outbox: WorkerOutbox, inbox: WorkerInbox, spec: TrainerSpec) -> None:
    """Rank 0: train and publish on request; in between, accumulate gradients of committed groups."""
    torch.set_num_threads(1)
    outbox.start_heartbeat()
    worker = _TrainerWorker(spec, outbox)
    outbox.send(WorkerReady())
    while True:
        for message in inbox.receive(0.0 if worker.can_accumulate else None):
            worker.handle(message)
        if worker.can_accumulate:
            worker.accumulate()


class _TrainerWorker:
    """A trainer with the sample stream and the weight store."""

    def __init__(self, spec: TrainerSpec, outbox: WorkerOutbox) -> None:
        self._spec, self._outbox = spec, outbox
        shapes = parameter_shapes(load_config(spec.model))
        store = WeightStore(spec.weights, spec.published_dtype, shapes)
        self._versions = RecentVersions(store, spec.max_staleness + 1, replay_store(spec, shapes))
        self._trainer = _make_trainer(spec, self._versions)
        self._reader = GroupReader(spec.stream, wait_s=spec.column_timeout_s)
        self._accumulator = Accumulator(
            self._trainer,
            self._reader.read_group,
            self._versions.digest,
            spec.advantage_settings,
            spec.streams_gradients,
            _advantage_function(spec, self._trainer),
            spec.masks_truncated,
        )
        self._checkpoints = CheckpointWriter(spec.model, outbox.send)
        device = torch.device(spec.device)
        self._timer = StepTimer(device, spec.settings.dtype, spec.peak_tflops, spec.num_ranks)

    @property
    def can_accumulate(self) -> bool:
        """See `Accumulator`."""
        return self._accumulator.can_accumulate

    def accumulate(self) -> None:
        """Compute at most one micro-batch, so that a request does not wait longer than that."""
        with self._timer.measure():
            self._accumulator.accumulate()

    def handle(self, message: object) -> None:
        """Execute a request of the driver, and send the reply if it has one."""
        match message:
            case AccumulateGroup(step, group):
                self._accumulator.commit(step, group)
            case TrainStep(step, groups):
                self._outbox.send(self._train(step, groups))
            case PublishWeights(version, is_stored):
                publish = self._versions.publish if is_stored else self._versions.keep_replayed
                self._outbox.send(WeightsPublished(version, publish(version, self._published_weights())))
                self._accumulator.start_step(version)
            case SaveCheckpoint():
                copy_state = partial(_copy_state, self._trainer, self._spec)
                self._checkpoints.start(message, self._trainer.num_steps_done, copy_state)

    def _published_weights(self) -> Tensor:
        """Ranks round what they send; a trainer of another backend has its weights in fp32 only."""
        if isinstance(self._trainer, Trainer):
            return self._trainer.published_weights(DTYPES[self._spec.published_dtype])
        return self._trainer.flat

    def _train(self, step: int, groups: Sequence[GroupId]) -> StepCompleted | StepRejected:
        try:
            with self._timer.measure():
                metrics = self._accumulator.train(step, groups)
        except Exception as error:  # out of memory, or the gradient is not finite
            return StepRejected(step, f"{type(error).__name__}: {error}")
        self._reader.commit(groups)
        return StepCompleted(step, metrics | self._timer.end_step(metrics.get("actor/tflop", 0.0)))


def _make_trainer(spec: TrainerSpec, versions: RecentVersions) -> TrainingEngine:
    """A trainer as `spec` has it; the reference policy is always that of `spec.model`."""
    if spec.backend is not None:
        return backends.make_trainer(spec)
    device = use_device(spec.device)
    config, start = load_pretrained(spec.model)
    if spec.num_ranks > 1:
        return _make_sharded_trainer(spec, config, start, versions)
    start, exact_logprobs = start.to(device), make_exact_logprobs(spec, config)
    critic = None if spec.critic is None or "values" in spec.columns else make_critic(spec, device)
    saved = load_start(spec.checkpoint, spec.continued)
    if saved is None:
        return Trainer(config, start, spec.settings, None, exact_logprobs, versions.get, critic=critic)
    flat = saved[0] if spec.settings.lora is None else start.clone()
    trainer = Trainer(
        config, flat.to(device), spec.settings, start, exact_logprobs, versions.get, critic=critic
    )
    _load_state(trainer, saved, spec)
    return trainer


def _make_sharded_trainer(
    spec: TrainerSpec, config: ModelConfig, start: Tensor, versions: RecentVersions
) -> Trainer:
    """Rank 0 of several. The whole weights [numel] stay on the CPU, shards are on the device of each rank."""
    from dora.trainer.distributed import DistributedLearner

    saved = load_start(spec.checkpoint, spec.continued, reads_shards=bool(spec.rank_address))
    flat = start if saved is None or spec.settings.lora is not None else saved[0]
    learner = DistributedLearner(_join_ranks(spec), config, flat, spec.settings, start)
    critic = None if spec.critic is None or "values" in spec.columns else make_critic(spec, spec.device)
    trainer = Trainer(config, flat, spec.settings, None, None, versions.get, learner, critic)
    if saved is not None:
        _load_state(trainer, saved, spec)
    return trainer


def _load_state(trainer: Trainer, saved: tuple[Tensor, dict[str, Any], int], spec: TrainerSpec) -> None:
    """Load weights and state of a checkpoint in a trainer that starts with them.

    With LoRA it starts with the weights of `spec.model`, to which adapters are relative. Other ranks or
    another device may have merged them with other rounding, and a version keeps its bytes.
    """
    flat, state, _ = saved
    trainer.load_state_dict(state)
    if spec.settings.lora is not None:
        trainer.replace_weights(flat)


def _advantage_function(spec: TrainerSpec, trainer: TrainingEngine) -> ComputeAdvantages | None:
    """Advantages from values, if there is a critic in this process or beside it."""
    if spec.critic is None:
        return None
    if isinstance(trainer, Trainer) and trainer.critic is not None:
        return trainer.critic.compute_advantages
    gamma, lam = spec.critic.settings.gamma, spec.critic.settings.lam
    return lambda responses, rewards: with_advantages(responses, rewards, gamma, lam).samples


def _copy_state(trainer: TrainingEngine, spec: TrainerSpec, shards_folder: Path) -> TrainerState:
    """The trainer's state for a checkpoint, in host memory."""
    step, shards = trainer.num_steps_done, None
    flat = trainer.flat.detach().to("cpu", copy=True)
    if isinstance(trainer, Trainer):
        state, shards = trainer.save_state(shards_folder)
    else:
        state = host_copy(trainer.state_dict())
    return TrainerState(step, flat, state, shards, partial(_finish_state, spec, step))


def _finish_state(spec: TrainerSpec, step: int, state: dict[str, Any]) -> ExtraFiles:
    """Add the state of a critic in another process; returns the adapter files."""
    files = ExtraFiles()
    if (lora := spec.settings.lora) is not None:
        adapters, model = state["optimizer"]["adapters"], spec.model
        files |= peft_files(load_config(model), lora, adapters, str(model))
    if spec.column_timeout_s is not None and "values" in spec.columns:
        state["critic"] = pop_critic_state(spec.weights, step, spec.column_timeout_s)
    return files


def run_follower(outbox: WorkerOutbox, inbox: WorkerInbox, spec: TrainerSpec) -> None:
    """Every other rank: hold a shard of the policy and make the calls that rank 0 sends, until killed.

    The driver sends nothing; `inbox` only ends the process with the driver.
    """
    from dora.trainer.distributed import ShardedRank, follow_rank0

    torch.set_num_threads(1)
    outbox.start_heartbeat()
    ranks, config = _join_ranks(spec), load_config(spec.model)
    if ranks.spans_nodes:  # rank 0 sends all columns
        rank = ShardedRank(ranks, config, spec.settings)
    else:
        read_samples = partial(_read_columns, GroupReader(spec.stream))
        rank = ShardedRank(ranks, config, spec.settings, read_samples=read_samples)
    outbox.send(WorkerReady())
    follow_rank0(ranks, rank)


def _join_ranks(spec: TrainerSpec) -> RankGroup:
    """Join the other ranks of the trainer, on the device of this one."""
    from dora.trainer.distributed import (
        RankGroup,  # takes seconds to import: only trainers of several ranks do
    )

    use_device(spec.device)
    rendezvous = spec.rank_address or spec.weights / RENDEZVOUS_FILE
    return RankGroup(rendezvous, spec.rank, spec.num_ranks, torch.device(spec.device), spec.rank_timeout_s)


def _read_columns(reader: GroupReader, samples: Sequence[Sample]) -> list[Sample]:
    """Add the columns that rank 0 did not send, from the stream's rows that rank 0 has leased."""
    requests = [s.stream_row for s in samples if s.stream_row is not None]
    stored = iter(reader.read_rows(requests) if requests else [])
    return [s if s.stream_row is None else _with_columns(s, next(stored)) for s in samples]


def _with_columns(sample: Sample, stored: StoredSample) -> Sample:
    columns = to_sample(stored)
    return replace(
        sample,
        prompt_ids=columns.prompt_ids,
        token_ids=columns.token_ids,
        logprobs=columns.logprobs,
        routes=columns.routes,
        loss_mask=columns.loss_mask,
    )
