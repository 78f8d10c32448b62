"""What runs inside the worker processes: an engine, the trainer; tasks are stations.

Each is a loop over its inbox; heavy imports happen here and not in the driver.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from dora.handover.moves import MovesRequests
from dora.runtime.messages import (
    Accumulate,
    Beat,
    Break,
    CancelMove,
    Completed,
    DropWeights,
    EngineSpec,
    Finish,
    GivenUp,
    GiveUp,
    Leave,
    LoadWeights,
    Observe,
    PauseRows,
    PublishWeights,
    Ready,
    Receive,
    Refused,
    ResumeRows,
    RowsPaused,
    RushRows,
    Save,
    Send,
    StageWeights,
    StepDone,
    StepRefused,
    Submit,
    TrainerSpec,
    TrainStep,
    TurnsEnded,
    WeightsPublished,
)
from dora.runtime.occupancy import Use
from dora.runtime.process import BEAT_S, Inbox, Outbox
from dora.runtime.saving import Files, save
from dora.runtime.stations import Recomputing
from dora.turns.words import TurnTaking

if TYPE_CHECKING:
    from torch import Tensor

    from dora.model.config import ModelConfig
    from dora.runtime.gathering import Judge
    from dora.runtime.stations import InferenceEngine, TrainingEngine
    from dora.runtime.taking import Taking
    from dora.trainer.trainer import Trainer
    from dora.weights.store import Recent

IDLE_WAIT_S = 0.25
MOVE_WAIT_S = 0.001  # of an engine with nothing to decode, but a move or a load under way


def run_engine(outbox: Outbox, inbox: Inbox, spec: EngineSpec) -> None:
    """Step while there is work; between steps, do what the driver says and take moves further."""
    import torch

    torch.set_num_threads(1)
    engine = _make_engine(spec)
    taking = _make_taking(engine, spec)
    mover = engine if isinstance(engine, MovesRequests) else None
    writer = engine if isinstance(engine, TurnTaking) else None
    outbox.send(_ready(engine, spec))
    beats = _beats(engine, began := _use(engine))
    while True:
        is_waiting = taking.is_busy or (mover is not None and mover.num_moves > 0)
        wait_s = 0.0 if engine.can_step else MOVE_WAIT_S if is_waiting else IDLE_WAIT_S
        replies: list[object] = []
        for message in inbox.take(wait_s):
            if isinstance(message, Leave):
                return
            if (reply := _obey(engine, taking, message)) is not None:
                replies.append(reply)
        replies += taking.poll()
        if mover and mover.num_moves:
            replies += mover.poll_moves()
        if replies:
            outbox.send(*replies)
        if engine.can_step and (completions := engine.step()):
            outbox.send(Completed(completions, _use(engine).since(began)))
        if writer and (turns := writer.take_turns()):
            outbox.send(TurnsEnded(turns))
        if (beat := next(beats)) is not None:
            outbox.send(beat)


def _ready(engine: InferenceEngine, spec: EngineSpec) -> Ready:
    """What others have to know of it, where its KV is among this."""
    from dora.handover.engine import MovingEngine
    from dora.runtime.far import PoolDoor

    if not isinstance(engine, MovingEngine):
        return Ready(engine.kernels)
    door = None if spec.host is None else PoolDoor(spec.host, engine.blocks).address
    return Ready(engine.kernels, spec.pool, door)


def _make_engine(spec: EngineSpec) -> InferenceEngine:
    """On a GPU KV is not where other engines can read it, and requests stay where they are."""
    if spec.adapter is not None:
        from dora.runtime import adapters

        return adapters.make(spec)
    from dora.data.tokenizer import Tokenizer
    from dora.engine.interleaving import Interleaving
    from dora.handover.engine import MovingEngine
    from dora.model.folder import load_config
    from dora.runtime.devices import use_device
    from dora.turns.engine import TurnTakingEngine

    kind: Callable[..., TurnTakingEngine] = partial(MovingEngine, pool=spec.pool)
    if spec.host is not None:
        from dora.runtime.far import FarWays

        kind = partial(kind, ways=FarWays(spec.desk), clock=time.time)
    device = use_device(spec.device)
    if spec.renewal is not None:
        from dora.renewal.engine import RenewingEngine

        kind = partial(RenewingEngine, device=device, keeps_kv=spec.renewal == "inflight")
    elif device != "cpu":
        kind = partial(TurnTakingEngine, device=device)
    return kind(
        load_config(spec.model),
        max_rows=spec.max_rows,
        max_context=spec.max_context,
        version_slots=spec.version_slots,
        num_blocks=spec.kv_blocks,
        kernels=spec.kernels,
        pace_s=spec.pace_s,
        interleaving=Interleaving(spec.tail_interval, urgent_age=spec.max_staleness),
        detokenize=Tokenizer(spec.model).decode if spec.reads_text else None,
        returns_routes=spec.returns_routes,
        exact=spec.exact,
        dtype=spec.dtype,
    )


def _make_taking(engine: InferenceEngine, spec: EngineSpec) -> Taking:
    from dora.runtime.taking import Taking
    from dora.weights.staging import Staging
    from dora.weights.store import WeightStore

    store = spec.brought or WeightStore(spec.weights, spec.dtype)
    return Taking(engine, store, Staging(store, spec.device != "cpu") if spec.loads_deferred else None)


def _obey(engine: InferenceEngine, taking: Taking, message: Any) -> object | None:
    """Do what an engine is told; what there is to say at once."""
    from dora.engine.sequence import EngineError

    match message:
        case StageWeights(version):
            taking.stage(version)
        case LoadWeights(version):
            taking.load(version)
        case DropWeights(version):
            taking.drop(version)
        case Submit(requests):
            taking.wait_for({request.version for request in requests})
            try:
                engine.submit(requests)
            except EngineError as error:
                return Refused(error.refused)
        case GiveUp(requests):
            return GivenUp(engine.abort(requests))
        case Receive() | Send() | CancelMove():
            return _obey_move(engine, message)
        case Observe() | Finish() | Break():
            return _obey_turn(engine, message)
        case RushRows(ids):
            engine.rush(ids)
        case PauseRows():
            engine.pause()
            return RowsPaused()
        case ResumeRows():
            engine.resume()
    return None


def _obey_move(engine: InferenceEngine, message: Receive | Send | CancelMove) -> object | None:
    """The same for the words of a move; engines that cannot move requests hear none."""
    assert isinstance(engine, MovesRequests), f"{message} to an engine whose requests stay"
    match message:
        case Receive():
            return engine.receive(message)
        case Send():
            return engine.send(message)
        case CancelMove(move):
            engine.cancel_move(move)
    return None


def _obey_turn(engine: InferenceEngine, message: Observe | Finish | Break) -> Refused | None:
    """The same for what is said to a turn; a request that cannot have it has failed."""
    from dora.engine.sequence import EngineError

    assert isinstance(engine, TurnTaking), f"{message} to an engine that plays no episodes"
    try:
        match message:
            case Observe(request, token_ids):
                engine.observe(request, token_ids)
            case Finish(request):
                engine.finish(request)
            case Break(_, reason):
                raise EngineError(reason)
    except EngineError as error:
        engine.abort([message.request])
        return Refused({message.request: str(error)})
    return None


def _use(engine: InferenceEngine) -> Use:
    """What its rows have done so far, by its own clock."""
    return Use(engine.busy_row_s, time.perf_counter())


def _beats(engine: InferenceEngine, began: Use) -> Iterator[Beat | None]:
    """A beat whenever one is due, else None; `began` is when there was no use of its rows yet."""
    next_s, num_decoded, busy_row_s = 0.0, 0, 0.0
    while True:
        if time.monotonic() < next_s:
            yield None
            continue
        next_s = time.monotonic() + BEAT_S
        num_gained, gained_in_s = engine.num_decoded - num_decoded, engine.busy_row_s - busy_row_s
        num_decoded, busy_row_s = engine.num_decoded, engine.busy_row_s
        pace = num_gained / gained_in_s if num_gained else 0.0
        num_recomputed = engine.num_recomputed if isinstance(engine, Recomputing) else 0
        use = _use(engine).since(began)
        yield Beat(engine.progress(), use, pace, engine.kv_share, num_recomputed)


def run_trainer(outbox: Outbox, inbox: Inbox, spec: TrainerSpec) -> None:
    """Train and publish on order; while there is none, work on what the next step has already."""
    import torch

    from dora.runtime.beside import redone_store
    from dora.runtime.gathering import Gathering
    from dora.stream.feed import GroupReader
    from dora.trainer.speed import Speed
    from dora.weights.store import Recent, WeightStore

    torch.set_num_threads(1)
    outbox.beat()
    store = WeightStore(spec.weights, spec.published_dtype)
    recent = Recent(store, spec.max_staleness + 1, redone_store(spec))
    trainer = _make_trainer(spec, recent)
    reader, judge = GroupReader(spec.stream, wait_s=spec.column_wait_s), _judge_of(spec, trainer)
    gathering = Gathering(trainer, reader.group, recent.digest, spec.scoring, spec.streams, judge)
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
                        outbox.send(StepDone(step, metrics | speed.end_step(metrics.get("actor/tflop", 0.0))))
                case PublishWeights(version, is_stored):
                    make = recent.publish if is_stored else recent.keep
                    outbox.send(WeightsPublished(version, make(version, trainer.flat)))
                    gathering.begin(version)
                case Save():
                    extras = partial(_extras, trainer, spec)
                    outbox.send(save(message, spec.model, trainer.flat, trainer.num_steps_done, extras))
        if gathering.can_work:  # at most one micro-batch: an order must not wait for longer
            with speed.measured():
                gathering.work()


def _make_trainer(spec: TrainerSpec, recent: Recent) -> TrainingEngine:
    """At the beginning, or where a checkpoint says; the KL term pulls to the beginning in both cases."""
    if spec.adapter is not None:
        from dora.runtime import adapters

        return adapters.make_trainer(spec)
    from dora.model.folder import load_folder
    from dora.runtime.beside import make_critic, make_score
    from dora.runtime.devices import use_device
    from dora.trainer.checkpoint import load_checkpoint
    from dora.trainer.trainer import Trainer

    device = use_device(spec.device)
    config, start = load_folder(spec.model)
    if spec.num_ranks > 1:
        return _make_sharded(spec, config, start, recent)
    start, score = start.to(device), make_score(spec, config)
    critic = None if spec.critic is None or "values" in spec.columns else make_critic(spec, device)
    if spec.checkpoint is None:
        return Trainer(config, start, spec.settings, None, score, recent, critic=critic)
    _, flat, state, _ = load_checkpoint(spec.checkpoint)
    if spec.settings.lora is not None:  # adapters are to the weights that the run began with
        flat = start.clone()
    trainer = Trainer(config, flat.to(device), spec.settings, start, score, recent, critic=critic)
    trainer.load_state_dict(state)
    return trainer


def _judge_of(spec: TrainerSpec, trainer: TrainingEngine) -> Judge | None:
    """What makes advantages where there is a critic, be it here or beside the trainer."""
    from dora.trainer.critic import judged
    from dora.trainer.trainer import Trainer

    if spec.critic is None:
        return None
    if isinstance(trainer, Trainer) and trainer.critic is not None:
        return trainer.critic.judge
    gamma, lam = spec.critic.settings.gamma, spec.critic.settings.lam
    return lambda samples, rewards: judged(samples, rewards, gamma, lam).samples


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


def _extras(trainer: TrainingEngine, spec: TrainerSpec) -> tuple[dict[str, Any], Files]:
    """What a checkpoint has beside the weights, the core's snapshot and older versions."""
    from dora.model.folder import load_config
    from dora.runtime.beside import take_critic
    from dora.trainer.lora import adapter_files

    state, files = trainer.state_dict(), Files()
    if (lora := spec.settings.lora) is not None:
        adapters, model = state["optimizer"]["adapters"], spec.model
        files |= adapter_files(load_config(model), lora, adapters, str(model))
    if spec.column_wait_s is not None and "values" in spec.columns:
        state["critic"] = take_critic(spec.weights, trainer.num_steps_done, spec.column_wait_s)
    return state, files
