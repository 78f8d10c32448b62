"""Rewards from external reward workers: a client leases a group and submits the rewards of its responses.

A lease without rewards expires; the group is then leased to another client, and late rewards are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, Field

from dora.errors import ServiceError
from dora.runtime.scoring.external import ExternalRewards, LeasedGroup
from dora.service.context import Run, RunContext, while_connected
from dora.service.models import RequestBody, RewardValue, Wait

router = APIRouter(prefix="/v1", tags=["rewards"])
Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class GroupToScore(LeasedGroup):
    """A leased group with the texts of its responses."""

    texts: list[str]


class LeasedGroupResponse(BaseModel):
    """A group to score, null if there is none, and how long a lease lasts."""

    leased_group: GroupToScore | None
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
    lease_s = await run(lambda context: _find_task(task, context).lease_s)

    def lease(context: RunContext) -> tuple[LeasedGroup, Decode] | None:
        leased = _find_task(task, context).lease()
        return None if leased is None else (leased, context.setup.tokenizer.decode)

    found = await while_connected(request, run.wait(lease, wait_s))
    group = None if found is None else await run_in_threadpool(_with_texts, *found)
    return LeasedGroupResponse(leased_group=group, lease_s=lease_s)


@router.post("/experience/{task}")
async def put_experience(run: Run, task: str, body: LeasedGroupRewards) -> AcceptedRewards:
    """Submit the rewards of a leased group. A repeated request changes nothing."""

    def submit(context: RunContext) -> AcceptedRewards:
        _find_task(task, context).submit(body.lease, body.fields["reward"])
        return AcceptedRewards(lease=body.lease)

    return await run(submit)


def _find_task(task: str, context: RunContext) -> ExternalRewards:
    tasks = context.external_rewards
    if task not in tasks:
        known = ", ".join(tasks) or 'none; set reward.function = "service"'
        raise ServiceError(404, f"no external reward task has this name; the external ones are: {known}")
    return tasks[task]


def _with_texts(leased: LeasedGroup, decode: Decode) -> GroupToScore:
    return GroupToScore(**vars(leased), texts=[*map(decode, leased.token_ids)])
