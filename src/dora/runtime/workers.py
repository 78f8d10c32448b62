"""What runs inside the worker processes: an engine, the trainer, a rewarder.

Each is a loop over its inbox; heavy imports happen here and not in the driver.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora.runtime.messages import (
    Accumulate,
    Beat,
    CancelMove,
    Completed,
    CriticSpec,
    DropWeights,
    EngineSpec,
    GivenUp,
    GiveUp,
    Judge,
    Judged,
    Leave,
    LoadRefused,
    LoadWeights,
    PauseRows,
    PublishWeights,
    Ready,
    Receive,
    Refused,
    ResumeRows,
    RewarderSpec,
    RowsPaused,
    RushRows,
    Save,
    Saved,
    SaveRefused,
    Send,
    StepDone,
    StepRefused,
    Submit,
    TrainerSpec,
    TrainStep,
    WeightsLoaded,
    WeightsPublished,
)
from dora.runtime.process import BEAT_S, Inbox, Outbox

if TYPE_CHECKING:
    from torch import Tensor

    from dora.engine.engine import Engine
    from dora.model.config import ModelConfig
    from dora.trainer.critic import Critic
    from dora.trainer.trainer import Trainer
    from dora.weights.store import Recent, WeightStore

IDLE_WAIT_S = 0.25
MOVE_WAIT_S = 0.001  # of an engine with nothing to decode, but a move under way


def run_engine(outbox: Outbox, inbox: Inbox, spec: EngineSpec) -> None:
    """Step while there is work; between steps, do what the driver says and take moves further."""
    import torch

    from dora.handover.engine import MovingEngine
    from dora.weights.store import WeightStore

    torch.set_num_threads(1)
    store = WeightStore(spec.weights, spec.dtype)
    engine = _make_engine(spec)
    mover = engine if isinstance(engine, MovingEngine) else None
    outbox.send(Ready(engine.kernels, spec.pool if mover else None))
    beats = _beats(engine)
    while True:
        wait_s = 0.0 if engine.can_step else MOVE_WAIT_S if mover and mover.num_moves else IDLE_WAIT_S
        replies: list[object] = []
        for message in inbox.take(wait_s):
            if isinstance(message, Leave):
                return
            if (reply := _obey(engine, store, message)) is not None:
                replies.append(reply)
        if mover and mover.num_moves:
            replies += mover.poll_moves()
        if replies:
            outbox.send(*replies)
        if engine.can_step and (completions := engine.step()):
            outbox.send(Completed(completions, engine.busy_row_s))
        if (beat := next(beats)) is not None:
            outbox.send(beat)


def _make_engine(spec: EngineSpec) -> Engine:
    """On a GPU KV is not where other engines can read it, and requests stay where they are."""
    from dora.data.tokenizer import Tokenizer
    from dora.engine.engine import Engine
    from dora.engine.interleaving import Interleaving
    from dora.handover.engine import MovingEngine
    from dora.model.folder import load_config
    from dora.runtime.devices import use_device

    kind: Callable[..., Engine] = partial(MovingEngine, pool=spec.pool)
    if (device := use_device(spec.device)) != "cpu":
        kind = partial(Engine, device=device)
    return kind(
        load_config(spec.model),
        max_rows=spec.max_rows,
        max_context=spec.max_context,
        version_slots=spec.version_slots,
        kernels=spec.kernels,
        pace_s=spec.pace_s,
        interleaving=Interleaving(spec.tail_interval, urgent_age=spec.max_staleness),
        detokenize=Tokenizer(spec.model).decode if spec.reads_text else None,
        returns_routes=spec.returns_routes,
        exact=spec.exact,
        dtype=spec.dtype,
    )


def _obey(engine: Engine, store: WeightStore, message: Any) -> object | None:
    """Do what an engine is told; what there is to say at once."""
    from dora.engine.sequence import EngineError

    match message:
        case LoadWeights(version):
            try:
                return WeightsLoaded(version, engine.load(version, store.fetch(version)))
            except (EngineError, OSError, RuntimeError) as error:  # torch cannot map a damaged file
                return LoadRefused(version, str(error))
        case DropWeights(version):
            if version in engine.versions:  # a load that was refused has left nothing
                engine.drop(version)
        case Submit(requests):
            try:
                engine.submit(requests)
            except EngineError as error:
                return Refused(error.refused)
        case GiveUp(requests):
            return GivenUp(engine.abort(requests))
        case Receive() | Send() | CancelMove():
            return _obey_move(engine, message)
        case RushRows(ids):
            engine.rush(ids)
        case PauseRows():
            engine.pause()
            return RowsPaused()
        case ResumeRows():
            engine.resume()
    return None


def _obey_move(engine: Engine, message: Receive | Send | CancelMove) -> object | None:
    """The same for the words of a move; engines that cannot move requests hear none."""
    from dora.handover.engine import MovingEngine

    assert isinstance(engine, MovingEngine), f"{message} to an engine whose requests stay"
    match message:
        case Receive():
            return engine.receive(message)
        case Send():
            return engine.send(message)
        case CancelMove(move):
            engine.cancel_move(move)
    return None


def _beats(engine: Engine) -> Iterator[Beat | None]:
    """A beat whenever one is due, else None."""
    next_s, num_decoded, busy_row_s = 0.0, 0, 0.0
    while True:
        if time.monotonic() < next_s:
            yield None
            continue
        next_s = time.monotonic() + BEAT_S
        num_gained, gained_in_s = engine.num_decoded - num_decoded, engine.busy_row_s - busy_row_s
        num_decoded, busy_row_s = engine.num_decoded, engine.busy_row_s
        pace = num_gained / gained_in_s if num_gained else 0.0
        yield Beat(engine.progress(), busy_row_s, pace, engine.kv_share)


def run_trainer(outbox: Outbox, inbox: Inbox, spec: TrainerSpec) -> None:
    """Train and publish on order; while there is none, work on what the next step has already."""
    import torch

    from dora.runtime.gathering import Gathering
    from dora.stream.feed import GroupReader
    from dora.trainer.speed import Speed
    from dora.weights.store import Recent, WeightStore

    torch.set_num_threads(1)
    outbox.beat()
    store = WeightStore(spec.weights, spec.published_dtype)
    recent = Recent(store, spec.max_staleness + 1)
    trainer = _make_trainer(spec, recent)
    reader = GroupReader(spec.stream)
    gathering = Gathering(trainer, reader.group, recent.digest, spec.scoring, spec.streams)
    speed = Speed(torch.device(spec.device), spec.settings.dtype, spec.peak_tflops, spec.num_ranks)
    outbox.send(Ready())
    while True:
        for message in inbox.take(0.0 if gathering.can_work else None):
            match message:
                case Accumulate(step, group):
                    gathering.commit(step, group)
                case TrainStep(step, groups):
                    try:
                        with speed.measured():
                            metrics = gathering.train(step, groups)
                    except Exception as error:  # out of memory, or no finite gradient
                        outbox.send(StepRefused(step, f"{type(error).__name__}: {error}"))
                    else:
                        reader.commit(groups)
                        outbox.send(StepDone(step, metrics | speed.end_step(metrics["actor/tflop"])))
                case PublishWeights(version):
                    digest = store.publish(version, trainer.flat)
                    outbox.send(WeightsPublished(version, digest))
                    recent.add(version, digest)
                    gathering.begin(version)
                case Save():
                    outbox.send(_save(trainer, spec.model, message))
        if gathering.can_work:  # at most one micro-batch: an order must not wait for longer
            with speed.measured():
                gathering.work()


def _make_trainer(spec: TrainerSpec, recent: Recent) -> Trainer:
    """At the beginning, or where a checkpoint says; the KL term pulls to the beginning in both cases."""
    from dora.model.folder import load_folder
    from dora.runtime.devices import use_device
    from dora.trainer.checkpoint import load_checkpoint
    from dora.trainer.trainer import Trainer

    device = use_device(spec.device)
    config, start = load_folder(spec.model)
    if spec.num_ranks > 1:
        return _make_sharded(spec, config, start, recent)
    start, score = start.to(device), None
    if spec.exact is not None:
        from dora.engine.exact import Scorer

        exact, temperature = spec.exact, spec.settings.temperature
        score = Scorer(config, exact.max_context, temperature, exact.kernels, exact.dtype)
    critic = None if spec.critic is None else _make_critic(spec.critic, device)
    if spec.checkpoint is None:
        return Trainer(config, start, spec.settings, None, score, recent, critic=critic)
    _, flat, state, _ = load_checkpoint(spec.checkpoint)
    if spec.settings.lora is not None:  # adapters are to the weights that the run began with
        flat = start.clone()
    trainer = Trainer(config, flat.to(device), spec.settings, start, score, recent, critic=critic)
    trainer.load_state_dict(state)
    return trainer


def _make_critic(spec: CriticSpec, device: str) -> Critic:
    """At its beginning; a trainer that goes on from a checkpoint takes the critic with it."""
    from dora.model.folder import load_folder
    from dora.trainer.critic import Critic, initial_critic

    config, start = load_folder(spec.model)
    return Critic(config, initial_critic(config, start).to(device), spec.settings)


def _make_sharded(spec: TrainerSpec, config: ModelConfig, start: Tensor, recent: Recent) -> Trainer:
    """The same as rank 0 of several: whole weights stay on the CPU, shards are on every rank's device."""
    from dora.runtime.ranks import join
    from dora.trainer.checkpoint import load_checkpoint
    from dora.trainer.ranks import Ranks
    from dora.trainer.trainer import Trainer

    flat, state = start, None
    if spec.checkpoint is not None:
        _, flat, state, _ = load_checkpoint(spec.checkpoint)
    learner = Ranks(join(spec), config, flat, spec.settings, start)
    trainer = Trainer(config, flat, spec.settings, None, None, recent, learner)
    if state is not None:
        trainer.load_state_dict(state)
    return trainer


def _save(trainer: Trainer, model: Path, order: Save) -> Saved | SaveRefused:
    """Write a checkpoint; a disk without room is no reason to end."""
    from dora.model.folder import load_config
    from dora.trainer.checkpoint import VERSIONS, keep_newest, save_checkpoint
    from dora.trainer.lora import adapter_files

    step = trainer.num_steps_done
    path = order.folder / f"step-{step}"
    beside: dict[str, str | bytes | Path] = {"core.json": order.core}
    try:
        state, config = trainer.state_dict(), load_config(model)
        if (lora := trainer.settings.lora) is not None:
            beside |= adapter_files(config, lora, state["optimizer"]["adapters"], str(model))
        beside |= {f"{VERSIONS}/{file.name}": file for file in order.versions.iterdir()}
        save_checkpoint(path, config, trainer.flat, state, step, model, beside=beside, fsync=order.fsync)
        keep_newest(order.folder, order.keep_last)
    except Exception as error:  # OSError, or what safetensors and torch make of one
        shutil.rmtree(path.with_name(path.name + ".draft"), ignore_errors=True)
        return SaveRefused(step, f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(order.versions, ignore_errors=True)
    return Saved(path)


def run_rewarder(outbox: Outbox, inbox: Inbox, spec: RewarderSpec) -> None:
    """Judge one group after the other, and tell each reward at once, so that a hang can be placed."""
    from dora.data.tokenizer import Tokenizer
    from dora.rewards.base import Answer, judge, load_reward

    function, tokenizer = load_reward(spec.function), Tokenizer(spec.model)
    outbox.send(Ready())
    while True:
        for message in inbox.take(None):
            match message:
                case Judge(group, prompt, fields, responses):
                    answers = [Answer(tokenizer.decode(token_ids), token_ids) for token_ids in responses]
                    for sibling, outcome in enumerate(judge(function, prompt, answers, fields)):
                        outbox.send(Judged(group, sibling, outcome))
                        if outcome.reward is None:
                            break  # the group has failed; the driver is at the next one
