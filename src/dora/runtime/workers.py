"""What runs inside the worker processes: an engine, the trainer, a rewarder.

Each is a loop over its inbox; heavy imports happen here and not in the driver.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dora.runtime.messages import (
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
    from dora.engine.engine import Engine
    from dora.weights.store import WeightStore

IDLE_WAIT_S = 0.25
MOVE_WAIT_S = 0.001  # of an engine with nothing to decode, but a move under way


def run_engine(outbox: Outbox, inbox: Inbox, spec: EngineSpec) -> None:
    """Step while there is work; between steps, do what the driver says and take moves further."""
    import torch

    from dora.engine.engine import Engine
    from dora.engine.interleaving import Interleaving
    from dora.model.folder import load_config
    from dora.weights.store import WeightStore

    torch.set_num_threads(1)
    store = WeightStore(spec.weights)
    engine = Engine(
        load_config(spec.model),
        max_rows=spec.max_rows,
        max_context=spec.max_context,
        version_slots=spec.version_slots,
        kernels=spec.kernels,
        pace_s=spec.pace_s,
        interleaving=Interleaving(spec.tail_interval, urgent_age=spec.max_staleness),
        pool=spec.pool,
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
    """Train and publish on order."""
    import torch

    from dora.model.folder import load_folder
    from dora.stream.samples import SampleReader
    from dora.trainer.checkpoint import save_checkpoint
    from dora.trainer.trainer import Sample, Trainer
    from dora.weights.store import WeightStore

    torch.set_num_threads(1)
    outbox.beat()
    config, flat = load_folder(spec.model)
    trainer = Trainer(config, flat, spec.settings)
    samples, store = SampleReader(spec.samples), WeightStore(spec.weights)
    outbox.send(Ready())
    while True:
        for message in inbox.take(None):
            match message:
                case TrainStep(step, groups):
                    batch = [
                        Sample(s.prompt_ids, s.token_ids, s.logprobs, s.advantage, step - s.version)
                        for group in sorted(groups)  # the sum must not depend on who finished first
                        for s in samples.group(group)
                    ]
                    try:
                        metrics = trainer.step(batch)
                    except Exception as error:  # out of memory, or no finite gradient
                        outbox.send(StepRefused(step, f"{type(error).__name__}: {error}"))
                    else:
                        outbox.send(StepDone(step, metrics))
                case PublishWeights(version):
                    outbox.send(WeightsPublished(version, store.publish(version, trainer.flat)))
                case Save(folder):
                    step, state = trainer.num_steps_done, trainer.state_dict()
                    path = folder / f"step-{step}"
                    save_checkpoint(path, config, trainer.flat, state, step, spec.model)
                    outbox.send(Saved(path))


def run_rewarder(outbox: Outbox, inbox: Inbox, spec: RewarderSpec) -> None:
    """Judge one sibling after the other, and tell each at once, so that a hang can be placed."""
    from dora.data.tokenizer import Tokenizer
    from dora.rewards.base import load_reward, score

    function, tokenizer = load_reward(spec.function), Tokenizer(spec.model)
    outbox.send(Ready())
    while True:
        for message in inbox.take(None):
            match message:
                case Judge(group, prompt, fields, responses):
                    for sibling, token_ids in enumerate(responses):
                        outcome = score(function, prompt, tokenizer.decode(token_ids), fields)
                        outbox.send(Judged(group, sibling, outcome))
                        if outcome.reward is None:
                            break  # the group has failed; the driver is at the next one
