"""What an external trainer sends and receives: prompts, the rules of training, and the batch of each step.

A batch is a stream of JSON lines, one for each group as soon as it is committed to the step, so that the
trainer computes gradients of the first groups while the last are still generated.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query
from fastapi import Path as PathParameter
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from dora.core.types import GroupId
from dora.errors import DoraError, ServiceError
from dora.runtime.rollout.prompts import check_prompts
from dora.runtime.training.external import CommittedGroups, ExternalTrainer
from dora.service.context import Run, RunContext, RunHandle
from dora.service.models import RequestBody, Wait
from dora.stream.run_stream import GroupReader
from dora.stream.sample_db import StoredSample

router = APIRouter(prefix="/v1", tags=["training"])

START_TIMEOUT_S = 60.0  # for a run to begin training
FIELDS = tuple(name for name in StoredSample._fields if name != "stream_row")
ALL_FIELDS = ",".join(FIELDS)


class NewPrompts(RequestBody):
    """Rows of a dataset. `first` is the index of the first one, so that a repeated request adds nothing."""

    first: int = Field(ge=0)
    rows: list[dict[str, Any]] = Field(min_length=1)


class PromptCounts(BaseModel):
    """Prompts sent so far, those of them that the run has fetched, and how many more it waits for."""

    num_prompts: int
    num_fetched: int
    num_wanted: int


class TrainingRules(BaseModel):
    """The next step, which trains the version of the same number, and the settings of training."""

    step: int
    num_steps: int
    batch_size: int
    group_size: int
    temperature: float
    trainer: dict[str, Any]
    algorithm: dict[str, Any]


@router.post("/prompts")
async def put_prompts(body: NewPrompts, run: Run) -> PromptCounts:
    """Append prompts in a run with data.path = "service"; they are durable before the response."""

    def append(context: RunContext) -> PromptCounts:
        context.put_prompts(body.first, body.rows)
        return _prompt_counts(context)

    setup = await run(lambda context: context.setup)
    await run_in_threadpool(check_prompts, setup, body.rows)
    return await run(append)


@router.get("/prompts")
async def get_prompt_counts(run: Run) -> PromptCounts:
    """The number of prompts, which is `first` of the next request."""
    return await run(_prompt_counts)


@router.get("/training")
async def get_training(run: Run) -> TrainingRules:
    """The next step, and the settings of training, which the external trainer has to follow."""

    def rules(context: RunContext) -> TrainingRules | None:
        config, limits = context.setup.config, context.setup.limits
        if (step := require_trainer(context).num_trained) is None:
            return None
        return TrainingRules(
            step=step,
            num_steps=limits.num_steps,
            batch_size=limits.batch_size,
            group_size=limits.group_size,
            temperature=config.sampling.temperature,
            trainer=config.trainer.model_dump(),
            algorithm=config.algorithm.model_dump(),
        )

    if (found := await run.wait(rules, START_TIMEOUT_S)) is None:
        raise ServiceError(503, "the run has not begun training yet; try again")
    return found


@router.get("/batches/{step}", response_class=StreamingResponse)
async def get_batch(
    run: Run,
    step: Annotated[int, PathParameter(ge=0, lt=2**31, description="number of the training step")],
    fields: Annotated[str, Query(description=f"names from {ALL_FIELDS}")] = ALL_FIELDS,
    after: Annotated[int, Query(ge=0, lt=2**31, description="number of groups received already")] = 0,
    wait_s: Wait = 30.0,
) -> StreamingResponse:
    """The groups of a step's batch, one JSON line for each as soon as it is committed to the step.

    `is_complete` of the last line is true if the batch has no further groups; otherwise, request them with
    `after`. `error` of the last line is the reason if no further groups can follow.
    """
    names = fields.split(",")
    _check_fields(names)

    def first_groups(context: RunContext) -> tuple[Path, CommittedGroups]:
        if step >= (num_steps := context.setup.limits.num_steps):
            raise ServiceError(404, f"step {step}: the run has {num_steps} steps, numbered from 0")
        found = require_trainer(context).committed_groups(step, after) or CommittedGroups([], False)
        return context.stream_dir, found

    stream_dir, found = await run(first_groups)
    deadline_s = time.monotonic() + wait_s

    async def lines() -> AsyncIterator[bytes]:
        nonlocal found
        num_groups, error = after, ""
        try:
            while True:
                for line in await run_in_threadpool(_group_lines, stream_dir, found.groups, names):
                    yield line
                num_groups += len(found.groups)
                left_s = deadline_s - time.monotonic()
                if found.is_complete or left_s <= 0:
                    break
                found = await _next_groups(run, step, num_groups, left_s)
        except DoraError as reason:  # the step was trained meanwhile, or the run is over
            found, error = CommittedGroups([], False), str(reason)
        last = {"is_complete": found.is_complete, "num_groups": num_groups}
        yield json.dumps(last | ({"error": error} if error else {})).encode() + b"\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def require_trainer(context: RunContext) -> ExternalTrainer:
    """Raises ServiceError for a run that trains internally."""
    trainer = context.external_trainer
    if trainer is None:
        raise ServiceError(409, 'this run has an internal trainer; set service.trainer = "external"')
    return trainer


async def _next_groups(run: RunHandle, step: int, after: int, wait_s: float) -> CommittedGroups:
    found = await run.wait(lambda context: require_trainer(context).committed_groups(step, after), wait_s)
    return found or CommittedGroups([], False)


def _prompt_counts(context: RunContext) -> PromptCounts:
    return PromptCounts(
        num_prompts=len(context.setup.dataset),
        num_fetched=context.prompts.num_taken,
        num_wanted=context.prompts.num_wanted,
    )


def _check_fields(names: Sequence[str]) -> None:
    """Raises ServiceError for a field that samples do not have."""
    for position, name in enumerate(names, start=1):
        if name not in FIELDS:
            raise ServiceError(422, f"fields: name {position} must be one of {', '.join(FIELDS)}")


def _group_lines(stream_dir: Path, groups: Sequence[GroupId], fields: Sequence[str]) -> list[bytes]:
    """A line for each committed group: each field as a list with one entry for each sibling, or null.

    The groups are leased while they are read; they stay in the stream until their step is trained. Raises
    RunError if a group does not arrive.
    """
    with contextlib.closing(GroupReader(stream_dir)) as reader:
        return [_group_line(group, reader.read_group(group), fields) for group in groups]


def _group_line(group: GroupId, samples: Sequence[StoredSample], fields: Sequence[str]) -> bytes:
    columns = {name: [_field_value(sample, name) for sample in samples] for name in fields}
    return json.dumps({"group": str(group), "fields": columns}, separators=(",", ":")).encode() + b"\n"


def _field_value(sample: StoredSample, name: str) -> object:
    """Arrays become lists. Stored log-probs are those of sampled tokens; here each observed token has a 0."""
    value = getattr(sample, name)
    if name == "logprobs" and sample.loss_mask is not None:
        every_token = np.zeros(len(sample.loss_mask), np.float32)
        every_token[sample.loss_mask > 0] = value
        return every_token.tolist()
    return value.tolist() if hasattr(value, "tolist") else value
