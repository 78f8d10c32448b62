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
    """All processes of a trainer and stations beside it, rank 0 first; of one outside, its stand-in.

    It may be one after another, whose processes have ended.
    """
    (weights / MEETING_PLACE).unlink(missing_ok=True)
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


def silent_ranks(
    ranks: Sequence[Worker], ready: Container[str], timeout_s: float, asleep_s: float
) -> list[Worker]:
    """Those that were `ready` and say nothing for too long, our own sleep left out.

    A station among them that can be replaced is ended instead, and replaced as one that dies.
    """
    found: list[Worker] = []
    for rank in ranks:
        rank.last_heard_s += asleep_s
        if rank.name not in ready or not rank.is_silent(timeout_s):
            continue
        if isinstance(ranks[0], StationedTrainer) and ranks[0].can_replace(rank):
            rank.last_heard_s = time.monotonic()  # once is enough
            rank.kill()
        else:
            found.append(rank)
    return found


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
