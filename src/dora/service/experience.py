"""What a trainer outside gets: groups of the sample stream as lines of JSON, and versions as safetensors.

For threads of the service: the run is touched through its stream and its weight store alone.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

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
from dora.service.models import Given
from dora.stream.run_stream import GroupReader
from dora.stream.sample_db import StoredSample

if TYPE_CHECKING:
    from dora.runtime.run_setup import RunSetup


FIELDS = tuple(name for name in StoredSample._fields if name != "stream_index")  # which is the run's own


def check_fields(names: Sequence[str]) -> None:
    """Raises ServiceError for a field that samples do not have."""
    for place, name in enumerate(names, start=1):
        if name not in FIELDS:
            raise ServiceError(422, f"fields: name {place} is none of a sample's: {', '.join(FIELDS)}")


def lines_of(stream: Path, groups: Sequence[GroupId], fields: Sequence[str]) -> list[bytes]:
    """A line for each committed group: its fields as lists, sibling by sibling; null: there is none.

    They are leased while they are read, and ended with their step. Raises RunError if one does not come.
    """
    with contextlib.closing(GroupReader(stream)) as reader:
        return [_line(group, reader.read_group(group), fields) for group in groups]


def _line(group: GroupId, samples: Sequence[StoredSample], fields: Sequence[str]) -> bytes:
    columns = {name: [_field(sample, name) for sample in samples] for name in fields}
    return json.dumps({"group": str(group), "fields": columns}, separators=(",", ":")).encode() + b"\n"


def _field(sample: StoredSample, name: str) -> object:
    """Arrays as lists. Log-probs, which are those of drawn tokens, have a 0 for each token that was read."""
    value = getattr(sample, name)
    if name == "logprobs" and sample.loss_mask is not None:
        drawn = iter(value)
        return [next(drawn) if is_drawn else 0.0 for is_drawn in sample.loss_mask]
    return value.tolist() if hasattr(value, "tolist") else value


def open_version(plan: RunSetup, store: Path, version: int) -> BinaryIO:
    """A stored version as a safetensors file that ends when it is closed.

    Raises ServiceError if the version is not stored, or there is no room to write it.
    """
    from safetensors.torch import save_file

    from dora.model.weights import WeightLayout
    from dora.weights.store import WeightStore

    kept = WeightStore(store, plan.config.engine.dtype)
    try:
        flat = kept.fetch(version)
    except FileNotFoundError as error:
        there = ", ".join(map(str, kept.versions())) or "none"
        raise ServiceError(404, f"version {version} is not stored (any more); stored are: {there}") from error
    try:
        with tempfile.TemporaryDirectory(dir=plan.out) as folder:
            file = Path(folder) / "tensors"
            save_file(WeightLayout(plan.model).views(flat), file, metadata={"format": "pt"})
            return file.open("rb")
    except OSError as error:
        raise ServiceError(
            503, f"version {version} cannot be written: {error.strerror}; make room"
        ) from error


# === dora.service.experience: Prompts from outside, and samples for a trainer outside.
#
# A batch is a stream of lines: each whole group as it is committed to the step. So a trainer works on the
# first ones while the last are still generated.

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


def outside(context: RunContext) -> ExternalTrainer:
    """The place of a trainer outside. Raises ServiceError if the run has a trainer of its own."""
    trainer = context.external_trainer
    if trainer is None:
        raise ServiceError(409, 'this run has a trainer of its own; set service.trainer = "external"')
    return trainer


@router.post("/prompts")
async def put_prompts(prompts: Prompts, run: Run) -> Supplied:
    """Add prompts to a run with data.path = "service"; they are durable when this is answered."""

    def put(context: RunContext) -> Supplied:
        context.put_prompts(prompts.first, prompts.rows)
        return _supplied(context)

    plan = await run(lambda context: context.setup)
    await run_in_threadpool(check_prompts, plan, prompts.rows)
    return await run(put)


@router.get("/prompts")
async def count_prompts(run: Run) -> Supplied:
    """How many prompts there are: the `first` of those that are put next."""
    return await run(_supplied)


def _supplied(context: RunContext) -> Supplied:
    return Supplied(
        num_prompts=len(context.setup.dataset),
        num_taken=context.num_prompts_taken,
        num_wanted=context.num_prompts_wanted,
    )


@router.get("/training")
async def training(run: Run) -> Training:
    """What a trainer outside begins with. The configuration's settings of training are for it to keep."""

    def look(context: RunContext) -> Training | None:
        config, limits, step = context.setup.config, context.setup.limits, outside(context).num_trained
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
    step: Annotated[int, PathParameter(ge=0, lt=2**31, description="number of the training step")],
    fields: Annotated[str, Query(description=f"names from {ALL_FIELDS}")] = ALL_FIELDS,
    after: Annotated[int, Query(ge=0, lt=2**31, description="groups that you have already")] = 0,
    wait_s: Wait = 30.0,
) -> StreamingResponse:
    """The groups of a step's batch, a line of JSON for each as soon as it is committed to the step.

    The last line has `is_whole`: whether that was all of the batch. If not, ask again for what comes after.
    """
    names = fields.split(",")
    check_fields(names)

    def begin(context: RunContext) -> tuple[Any, CommittedGroups]:
        if step >= (num_steps := context.setup.limits.num_steps):
            raise ServiceError(404, f"step {step}: the run has {num_steps} steps, from 0 on")
        found = outside(context).committed_groups(step, after) or CommittedGroups([], False)
        return context.stream_dir, found

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
            found, why = CommittedGroups([], False), str(error)
        last = {"is_whole": found.is_whole, "num_groups": num_groups}
        yield json.dumps(last | ({"why": why} if why else {})).encode() + b"\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


async def _committed(run: RunHandle, step: int, after: int, wait_s: float) -> CommittedGroups:
    found = await run.wait(lambda context: outside(context).committed_groups(step, after), wait_s)
    return found or CommittedGroups([], False)
