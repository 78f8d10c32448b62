"""Prompts from outside, and samples for a trainer outside.

A batch is a stream of lines: each whole group as it is committed to the step. So a trainer works on the
first ones while the last are still generated.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from dora.errors import DoraError, ServiceError
from dora.runtime.calls import Inside
from dora.runtime.experience import FIELDS, check_fields, lines_of
from dora.runtime.outside import Committed, OutsideTrainer
from dora.runtime.supply import check_rows
from dora.service.answers import Given
from dora.service.app import Driver, Run

router = APIRouter(prefix="/v1", tags=["experience"])

BEGIN_S = 60.0  # that a run may take to begin
ALL_FIELDS = ",".join(FIELDS)
Wait = Annotated[float, Query(ge=0, le=60, description="how long to wait for what is not there yet (s)")]


class Prompts(Given):
    """Rows as in a dataset; `first` is how many there were before, so that each is put once."""

    first: int = Field(ge=0)
    rows: list[dict[str, Any]] = Field(min_length=1)


class Supplied(BaseModel):
    """Prompts that were put, those of them that were taken, and how many more would be taken now."""

    num_prompts: int
    num_taken: int
    num_wanted: int


class Training(BaseModel):
    """The step that comes next and turns the version of the same number into another, and its rules."""

    step: int
    num_steps: int
    batch_size: int
    group_size: int
    temperature: float
    trainer: dict[str, Any]
    algorithm: dict[str, Any]


def outside(inside: Inside) -> OutsideTrainer:
    """The place of a trainer outside. Raises ServiceError if the run has a trainer of its own."""
    trainer = inside.hands.trainer
    if not isinstance(trainer, OutsideTrainer):
        raise ServiceError(409, 'this run has a trainer of its own; set service.trainer = "external"')
    return trainer


@router.post("/prompts")
async def put_prompts(prompts: Prompts, run: Run) -> Supplied:
    """Add prompts to a run with data.path = "service"; they are durable when this is answered."""

    def put(inside: Inside) -> Supplied:
        inside.hands.facts.extend(inside.hands.supply.put(prompts.first, prompts.rows))
        return _supplied(inside)

    plan = await run(lambda inside: inside.plan)
    await run_in_threadpool(check_rows, plan, prompts.rows)
    return await run(put)


@router.get("/prompts")
async def count_prompts(run: Run) -> Supplied:
    """How many prompts there are: the `first` of those that are put next."""
    return await run(_supplied)


def _supplied(inside: Inside) -> Supplied:
    supply = inside.hands.supply
    return Supplied(
        num_prompts=len(inside.plan.dataset), num_taken=supply.num_taken, num_wanted=supply.num_wanted
    )


@router.get("/training")
async def training(run: Run) -> Training:
    """What a trainer outside begins with. The configuration's settings of training are for it to keep."""

    def look(inside: Inside) -> Training | None:
        config, limits, step = inside.plan.config, inside.plan.limits, outside(inside).num_trained
        if step is None:
            return None
        return Training(
            step=step,
            num_steps=limits.num_steps,
            batch_size=limits.batch_size,
            group_size=limits.group_size,
            temperature=config.sampling.temperature,
            trainer=config.trainer.model_dump(),
            algorithm=config.algorithm.model_dump(),
        )

    if (found := await run.wait(look, BEGIN_S)) is None:
        raise ServiceError(503, "the run has not begun yet; ask again")
    return found


@router.get("/batches/{step}", response_class=StreamingResponse)
async def get_batch(
    run: Run,
    step: Annotated[int, Path(ge=0, lt=2**31, description="number of the training step")],
    fields: Annotated[str, Query(description=f"names from {ALL_FIELDS}")] = ALL_FIELDS,
    after: Annotated[int, Query(ge=0, lt=2**31, description="groups that you have already")] = 0,
    wait_s: Wait = 30.0,
) -> StreamingResponse:
    """The groups of a step's batch, a line of JSON for each as soon as it is committed to the step.

    The last line has `is_whole`: whether that was all of the batch. If not, ask again for what comes after.
    """
    names = fields.split(",")
    check_fields(names)

    def begin(inside: Inside) -> tuple[Any, Committed]:
        if step >= (num_steps := inside.plan.limits.num_steps):
            raise ServiceError(404, f"step {step}: the run has {num_steps} steps, from 0 on")
        found = outside(inside).committed(step, after) or Committed([], False)
        return inside.hands.stream_folder, found

    stream, found = await run(begin)
    until_s = time.monotonic() + wait_s

    async def lines() -> AsyncIterator[bytes]:
        nonlocal found
        num_groups, why = after, ""
        try:
            while True:
                for line in await run_in_threadpool(lines_of, stream, found.groups, names):
                    yield line
                num_groups += len(found.groups)
                left_s = until_s - time.monotonic()
                if found.is_whole or left_s <= 0:
                    break
                found = await _committed(run, step, num_groups, left_s)
        except DoraError as error:  # trained by somebody else meanwhile, or the run is over
            found, why = Committed([], False), str(error)
        last = {"is_whole": found.is_whole, "num_groups": num_groups}
        yield json.dumps(last | ({"why": why} if why else {})).encode() + b"\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


async def _committed(run: Driver, step: int, after: int, wait_s: float) -> Committed:
    found = await run.wait(lambda inside: outside(inside).committed(step, after), wait_s)
    return found or Committed([], False)
