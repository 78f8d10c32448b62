"""What runs inside the worker processes: an engine, the trainer, a rewarder.

Each is a loop over its inbox; heavy imports happen here and not in the driver.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora.runtime.messages import (
    Accumulate,
    Beat,
    CancelMove,
    Completed,
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
    from dora.handover.engine import MovingEngine
    from dora.trainer.trainer import Trainer
    from dora.weights.store import Recent, WeightStore

IDLE_WAIT_S = 0.25
MOVE_WAIT_S = 0.001  # of an engine with nothing to decode, but a move under way


def run_engine(outbox: Outbox, inbox: Inbox, spec: EngineSpec) -> None:
    """Step while there is work; between steps, do what the driver says and take moves further."""
    import torch

    from dora.data.tokenizer import Tokenizer
    from dora.engine.interleaving import Interleaving
    from dora.handover.engine import MovingEngine
    from dora.model.folder import load_config
    from dora.weights.store import WeightStore

    torch.set_num_threads(1)
    store = WeightStore(spec.weights)
    engine = MovingEngine(
        load_config(spec.model),
        max_rows=spec.max_rows,
        max_context=spec.max_context,
        version_slots=spec.version_slots,
        kernels=spec.kernels,
        pace_s=spec.pace_s,
        interleaving=Interleaving(spec.tail_interval, urgent_age=spec.max_staleness),
        pool=spec.pool,
        detokenize=Tokenizer(spec.model).decode if spec.reads_text else None,
        returns_routes=spec.returns_routes,
        exact=spec.exact,
    )
    outbox.send(Ready(engine.kernels, spec.pool))
    beats = _beats(engine)
    while True:
        wait_s = 0.0 if engine.can_step else MOVE_WAIT_S if engine.num_moves else IDLE_WAIT_S
        replies: list[object] = []
        for message in inbox.take(wait_s):
            if isinstance(message, Leave):
                return
            if (reply := _obey(engine, store, message)) is not None:
                replies.append(reply)
        if engine.num_moves:
            replies += engine.poll_moves()
        if replies:
            outbox.send(*replies)
        if engine.can_step and (completions := engine.step()):
            outbox.send(Completed(completions, engine.busy_row_s))
        if (beat := next(beats)) is not None:
            outbox.send(beat)


def _obey(engine: MovingEngine, store: WeightStore, message: Any) -> object | None:
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
        case Receive():
            return engine.receive(message)
        case Send():
            return engine.send(message)
        case CancelMove(move):
            engine.cancel_move(move)
        case RushRows(ids):
            engine.rush(ids)
        case PauseRows():
            engine.pause()
            return RowsPaused()
        case ResumeRows():
            engine.resume()
    return None


def _beats(engine: MovingEngine) -> Iterator[Beat | None]:
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
    from dora.weights.store import Recent, WeightStore

    torch.set_num_threads(1)
    outbox.beat()
    store = WeightStore(spec.weights)
    recent = Recent(store, spec.max_staleness + 1)
    trainer = _make_trainer(spec, recent)
    reader = GroupReader(spec.stream)
    gathering = Gathering(trainer, reader.group, spec.scoring, spec.streams)
    outbox.send(Ready())
    while True:
        for message in inbox.take(0.0 if gathering.can_work else None):
            match message:
                case Accumulate(step, group):
                    gathering.commit(step, group)
                case TrainStep(step, groups):
                    try:
                        metrics = gathering.train(step, groups)
                    except Exception as error:  # out of memory, or no finite gradient
                        outbox.send(StepRefused(step, f"{type(error).__name__}: {error}"))
                    else:
                        reader.commit(groups)
                        outbox.send(StepDone(step, metrics))
                case PublishWeights(version):
                    outbox.send(WeightsPublished(version, store.publish(version, trainer.flat)))
                    recent.add(version)
                    gathering.begin(version)
                case Save():
                    outbox.send(_save(trainer, spec.model, message))
        if gathering.can_work:  # at most one micro-batch: an order must not wait for longer
            gathering.work()


def _make_trainer(spec: TrainerSpec, recent: Recent) -> Trainer:
    """At the beginning, or where a checkpoint says; the KL term pulls to the beginning in both cases."""
    from dora.model.folder import load_folder
    from dora.trainer.checkpoint import load_checkpoint
    from dora.trainer.trainer import Trainer

    config, start = load_folder(spec.model)
    score = None
    if spec.exact is not None:
        from dora.engine.exact import Scorer

        score = Scorer(config, spec.exact.max_context, spec.settings.temperature, spec.exact.kernels)
    if spec.checkpoint is None:
        return Trainer(config, start, spec.settings, None, score, recent)
    _, flat, state, _ = load_checkpoint(spec.checkpoint)
    trainer = Trainer(config, flat, spec.settings, start, score, recent)
    trainer.load_state_dict(state)
    return trainer


def _save(trainer: Trainer, model: Path, order: Save) -> Saved | SaveRefused:
    """Write a checkpoint; a disk without room is no reason to end."""
    from dora.model.folder import load_config
    from dora.trainer.checkpoint import VERSIONS, keep_newest, save_checkpoint

    step = trainer.num_steps_done
    path = order.folder / f"step-{step}"
    beside: dict[str, str | Path] = {"core.json": order.core}
    try:
        state, config = trainer.state_dict(), load_config(model)
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
