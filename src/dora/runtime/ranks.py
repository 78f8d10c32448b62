"""The processes of one trainer: rank 0, which the driver speaks to, and those that follow it.

The driver starts and watches all of them, so that the death or the silence of any is the trainer's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dora.errors import SilentError
from dora.runtime.messages import Ready, TrainerSpec
from dora.runtime.outside import OutsideTrainer
from dora.runtime.process import Inbox, Outbox, Told, Worker
from dora.runtime.stationed import StationedTrainer
from dora.runtime.workers import run_trainer

if TYPE_CHECKING:
    from dora.runtime.plan import Plan
    from dora.stream.feed import GroupReader
    from dora.stream.samples import StoredSample
    from dora.trainer.ranks import Company
    from dora.trainer.trainer import Sample

MEETING_PLACE = "ranks"  # a file beside the weights


def start_ranks(
    plan: Plan,
    weights: Path,
    stream: Path,
    checkpoint: Path | None,
    told: Told,
    notice: Callable[[str], None],
) -> list[Worker]:
    """All processes of the trainer and stations beside it, rank 0 first; of one outside, its stand-in."""
    first = plan.trainer_spec(weights, stream, checkpoint)
    if plan.config.service.trainer == "external":
        return [OutsideTrainer(first, plan.limits.batch_size, told)]
    if first.columns:
        ranks = StationedTrainer(first, plan.devices.of_station(), told, notice).company
    else:
        ranks = [Worker("trainer", run_trainer, first, told)]
    for rank in range(1, first.num_ranks):
        spec = replace(first, rank=rank, device=plan.devices.of_trainer(rank))
        ranks.append(Worker(f"trainer's rank {rank}", run_follower, spec, told))
    return ranks


def check_beats(plan: Plan, ranks: Sequence[Worker], ready: Container[str], asleep_s: float) -> None:
    """End a station that says nothing for too long, our own sleep left out: it is replaced, as one that dies.

    Raises SilentError for any other one that is `ready`.
    """
    trainer, timeout_s = ranks[0], plan.config.runtime.trainer_timeout_s
    for rank in ranks:
        rank.last_heard_s += asleep_s
        if rank.name not in ready or not rank.is_silent(timeout_s):
            continue
        if isinstance(trainer, StationedTrainer) and trainer.can_replace(rank):
            rank.last_heard_s = time.monotonic()  # once is enough
            rank.kill()
        else:
            what = f"the {rank.name} was silent for more than runtime.trainer_timeout_s = {timeout_s:g} s"
            raise SilentError(cannot_go_on(what, plan))


def cannot_go_on(what: str, plan: Plan) -> str:
    """Why the run ends when a process of the trainer has, and how it goes on."""
    return f"{what}; the run cannot go on without it: dora train --resume {plan.out} does, with a new one"


def run_follower(outbox: Outbox, inbox: Inbox, spec: TrainerSpec) -> None:
    """Hold a share of the policy, and do what rank 0 does. The driver has nothing to say but its end."""
    import torch

    from dora.model.folder import load_config
    from dora.stream.feed import GroupReader
    from dora.trainer.ranks import Share, follow

    torch.set_num_threads(1)
    outbox.beat()
    company = join(spec)
    read = partial(complete, GroupReader(spec.stream))
    share = Share(company, load_config(spec.model), spec.settings, read=read)
    outbox.send(Ready())
    follow(company, share)


def complete(reader: GroupReader, samples: Sequence[Sample]) -> list[Sample]:
    """Samples with what rank 0 did not send, read where rank 0 holds them in the stream."""
    indices = [s.stream_index for s in samples if s.stream_index is not None]
    stored = iter(reader.rows(indices) if indices else [])
    return [s if s.stream_index is None else _completed(s, next(stored)) for s in samples]


def _completed(sample: Sample, stored: StoredSample) -> Sample:
    return replace(
        sample,
        prompt_ids=stored.prompt_ids,
        token_ids=stored.token_ids,
        logprobs=stored.logprobs,
        routes=stored.routes,
        loss_mask=stored.loss_mask,
    )


def join(spec: TrainerSpec) -> Company:
    """Meet the other ranks of the trainer, on this one's device."""
    import torch

    from dora.runtime.devices import use_device
    from dora.trainer.ranks import Company

    use_device(spec.device)
    place = spec.weights / MEETING_PLACE
    return Company(place, spec.rank, spec.num_ranks, torch.device(spec.device), spec.rank_timeout_s)
