"""Rewards from external reward workers: a client leases a group and submits the rewards of its responses.

A lease without rewards expires; the group is then leased to another client, and late rewards are refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from dora.errors import RunError, ServiceError
from dora.runtime.scoring.external import ExternalRewards, LeasedGroup
from dora.service.context import Run, RunContext, while_connected
from dora.service.models import RequestBody, RewardValue, Wait

router = APIRouter(prefix="/v1", tags=["rewards"])

RETRY_S = 0.1  # until the next request to the stream for a group that is announced as ready

T = TypeVar("T")


class LeasedGroupResponse(BaseModel):
    """A group to score, null if there is none, and how long a lease lasts."""

    leased_group: LeasedGroup | None
    lease_s: float


class LeasedGroupRewards(RequestBody):
    """The rewards of a leased group, one for each sibling."""

    lease: int = Field(ge=0, lt=2**63)
    fields: dict[Literal["reward"], list[RewardValue]] = Field(min_length=1)


class AcceptedRewards(BaseModel):
    """The lease whose rewards were accepted."""

    lease: int


@router.get("/experience/{task}")
async def get_experience(run: Run, request: Request, task: str, wait_s: Wait = 0.0) -> LeasedGroupResponse:
    """Lease a group that a reward task has to score; the task of the section [reward] is called reward."""
    rewards, deadline_s = await run(partial(_find_task, task)), time.monotonic() + wait_s
    pause_s = 0.0
    while (leased := await _call(rewards, rewards.lease)) is None:
        if (left_s := deadline_s - time.monotonic()) <= 0:
            break
        await asyncio.sleep(pause_s)
        if await while_connected(request, run.wait(lambda _: rewards.has_group() or None, left_s)) is None:
            break  # no group within `wait_s`, or the client has disconnected: do not lease a group to it
        pause_s = RETRY_S
    return LeasedGroupResponse(leased_group=leased, lease_s=rewards.lease_s)


@router.post("/experience/{task}")
async def put_experience(run: Run, task: str, body: LeasedGroupRewards) -> AcceptedRewards:
    """Submit the rewards of a leased group. A repeated request changes nothing."""
    rewards = await run(partial(_find_task, task))
    await _call(rewards, partial(rewards.submit, body.lease, body.fields["reward"]))
    return AcceptedRewards(lease=body.lease)


def _find_task(task: str, context: RunContext) -> ExternalRewards:
    tasks = context.external_rewards
    if task not in tasks:
        known = ", ".join(tasks) or 'none; set reward.function = "service"'
        raise ServiceError(404, f"no external reward task has this name; the external ones are: {known}")
    return tasks[task]


async def _call(rewards: ExternalRewards, function: Callable[[], T]) -> T:
    """Call a function in the thread of the reward task."""
    try:
        return await asyncio.wrap_future(rewards.thread.submit(function))
    except (RunError, RuntimeError) as error:  # its stream, or its thread, has ended
        raise ServiceError(503, "the run is over") from error
