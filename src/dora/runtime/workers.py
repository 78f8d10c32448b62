"""What runs inside the worker processes: an engine, the trainer, a rewarder.

Each is a loop over its inbox; heavy imports happen here and not in the driver.
"""

from __future__ import annotations

import time

from dora.runtime.messages import (
    Beat,
    Completed,
    DropWeights,
    EngineSpec,
    GivenUp,
    GiveUp,
    Judge,
    Judged,
    LoadWeights,
    PublishWeights,
    Ready,
    Refused,
    RewarderSpec,
    Save,
    Saved,
    StepDone,
    Submit,
    TrainerSpec,
    TrainStep,
    WeightsLoaded,
    WeightsPublished,
)
from dora.runtime.process import BEAT_S, Inbox, Outbox

IDLE_WAIT_S = 0.25


def run_engine(outbox: Outbox, inbox: Inbox, spec: EngineSpec) -> None:
    """Step while there is work; between steps, do what the driver says."""
    import torch

    from dora.engine.engine import Engine
    from dora.engine.sequence import EngineError
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
    )
    outbox.send(Ready(engine.kernels))
    next_beat_s = 0.0
    while True:
        for message in inbox.take(IDLE_WAIT_S if engine.idle else 0.0):
            match message:
                case LoadWeights(version):
                    digest = engine.load(version, store.fetch(version))
                    outbox.send(WeightsLoaded(version, digest))
                case DropWeights(version):
                    engine.drop(version)
                case Submit(requests):
                    try:
                        engine.submit(requests)
                    except EngineError as error:
                        outbox.send(Refused(error.refused))
                case GiveUp(requests):
                    outbox.send(GivenUp(engine.abort(requests)))
        if not engine.idle and (completions := engine.step()):
            outbox.send(Completed(completions, engine.busy_row_s))
        if time.monotonic() >= next_beat_s:
            next_beat_s = time.monotonic() + BEAT_S
            outbox.send(Beat(engine.progress(), engine.busy_row_s))


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
                    outbox.send(StepDone(step, trainer.step(batch)))
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
