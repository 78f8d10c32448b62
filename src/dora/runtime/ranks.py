"""The processes of one trainer: rank 0, which the driver speaks to, and those that follow it.

The driver starts and watches all of them, so that the death or the silence of any is the trainer's own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dora.runtime.messages import Ready, TrainerSpec
from dora.runtime.process import Inbox, Outbox, Told, Worker
from dora.runtime.workers import run_trainer

if TYPE_CHECKING:
    from dora.runtime.plan import Plan
    from dora.trainer.ranks import Company

MEETING_PLACE = "ranks"  # a file beside the weights


def start_ranks(plan: Plan, weights: Path, stream: Path, checkpoint: Path | None, told: Told) -> list[Worker]:
    """All processes of the trainer, rank 0 first."""
    first = plan.trainer_spec(weights, stream, checkpoint)
    ranks = [Worker("trainer", run_trainer, first, told)]
    for rank in range(1, first.num_ranks):
        spec = replace(first, rank=rank, device=plan.devices.of_trainer(rank))
        ranks.append(Worker(f"trainer's rank {rank}", run_follower, spec, told))
    return ranks


def run_follower(outbox: Outbox, inbox: Inbox, spec: TrainerSpec) -> None:
    """Hold a share of the policy, and do what rank 0 does. The driver has nothing to say but its end."""
    import torch

    from dora.model.folder import load_config
    from dora.trainer.ranks import Share, follow

    torch.set_num_threads(1)
    outbox.beat()
    company = join(spec)
    share = Share(company, load_config(spec.model), spec.settings)
    outbox.send(Ready())
    follow(company, share)


def join(spec: TrainerSpec) -> Company:
    """Meet the other ranks of the trainer, on this one's device."""
    import torch

    from dora.runtime.devices import use_device
    from dora.trainer.ranks import Company

    use_device(spec.device)
    place = spec.weights / MEETING_PLACE
    return Company(place, spec.rank, spec.num_ranks, torch.device(spec.device), spec.rank_timeout_s)
