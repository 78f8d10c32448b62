"""Rewards from outside: a group on loan, and what its answers are worth.

A loan that is not answered in time is given to somebody else, and its answer is then refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from dora.errors import RunError, ServiceError
from dora.runtime.scoring.external import ExternalRewards, LeasedGroup
from dora.service.agents import MOST_REWARD
from dora.service.context import Run, RunContext, while_connected
from dora.service.experience import Wait
from dora.service.models import Given

router = APIRouter(prefix="/v1", tags=["experience"])

PAUSE_S = 0.1  # before a group that is announced, and cannot be had yet, is asked for again

T = TypeVar("T")


class Judged(Given):
    """The rewards of a group on loan, sibling by sibling."""

    lease: int = Field(ge=0, lt=2**63)
    fields: dict[Literal["reward"], list[Annotated[float, Field(ge=-MOST_REWARD, le=MOST_REWARD)]]] = Field(
        min_length=1
    )


class Loans(BaseModel):
    """A group to judge, if there is one, and how long it is lent."""

    loan: LeasedGroup | None
    lease_s: float


class Taken(BaseModel):
    lease: int


@router.get("/experience/{task}")
async def get_experience(run: Run, request: Request, task: str, wait_s: Wait = 0.0) -> Loans:
    """A group that a reward task is to judge; the task of the section [reward] is called reward."""
    judge, until_s = await run(partial(_find, task)), time.monotonic() + wait_s
    pause_s = 0.0
    while (loan := await _call(judge, judge.lease)) is None and (left_s := until_s - time.monotonic()) > 0:
        await asyncio.sleep(pause_s)
        if await while_connected(request, run.wait(lambda _: judge.has_group() or None, left_s)) is None:
            break  # nothing came, or the client has gone, to whom nothing should be lent
        pause_s = PAUSE_S
    return Loans(loan=loan, lease_s=judge.lease_s)


@router.post("/experience/{task}")
async def put_experience(run: Run, task: str, judged: Judged) -> Taken:
    """What the answers of a loan are worth. Who hears no answer puts it again."""
    judge = await run(partial(_find, task))
    await _call(judge, partial(judge.submit, judged.lease, judged.fields["reward"]))
    return Taken(lease=judged.lease)


def _find(task: str, context: RunContext) -> ExternalRewards:
    tasks = context.external_rewards
    if task not in tasks:
        known = ", ".join(tasks) or 'none; set reward.function = "service"'
        raise ServiceError(404, f"no reward task of this name is judged from outside; these are: {known}")
    return tasks[task]


async def _call(judge: ExternalRewards, function: Callable[[], T]) -> T:
    """Have the judge's thread do it."""
    try:
        return await asyncio.wrap_future(judge.thread.submit(function))
    except (RunError, RuntimeError) as error:  # its stream, or its thread, has ended
        raise ServiceError(503, "the run is over") from error
