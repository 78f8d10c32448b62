"""Weights that a trainer outside publishes, and versions for whoever wants them.

They are files of tensors, never programs. A file is attested by its SHA-256, so that one that was cut or
changed on its way is never taken; what the engines then hold has the digest that is answered.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple

from fastapi import APIRouter, Query, Request
from fastapi import Path as InPath
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect

from dora.errors import ServiceError
from dora.runtime.run_dir import INCOMING_PARTS
from dora.runtime.training.external import INCOMING_DIR
from dora.service.context import Run, RunContext, RunHandle
from dora.service.experience import open_version, outside
from dora.service.models import Given

router = APIRouter(prefix="/v1", tags=["weights"])

READ_S = 600.0  # that weights may take to be read
CHUNK_BYTES = 2**20
TENSORS = "application/octet-stream"

Number = Annotated[int, Field(ge=0, lt=2**31, description="number of the version")]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$", description="SHA-256 of the file (hex)")]
Metrics = dict[
    Annotated[str, Field(pattern="^[a-z0-9_/]{1,64}$")], Annotated[float, Field(allow_inf_nan=False)]
]


class Announced(Given):
    """A file that lies in the folder `incoming` of the run's, put there by a trainer on the same machine."""

    version: Number
    file: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$", description="its name, without a path")
    sha256: Sha256
    metrics: Metrics = Field(default={}, max_length=64)


class Published(BaseModel):
    """The digest is that of the bytes that engines hold, as in the journal."""

    version: int
    digest: str


@router.put(
    "/weights/{version}",
    openapi_extra={"requestBody": {"content": {TENSORS: {"schema": {"type": "string", "format": "binary"}}}}},
)
async def put_weights(
    run: Run,
    request: Request,
    version: Annotated[Number, InPath()],
    sha256: Annotated[Sha256, Query()],
    metrics: Annotated[str, Query(max_length=4096, description="numbers by name, as a JSON object")] = "{}",
) -> Published:
    """End the step that is due: the body is a safetensors file with all tensors of the next version.

    Answered once it is published. Who hears no answer sends it again, and gets the same one.
    """
    told = _metrics(metrics)
    async with _upload(run, request, version, sha256) as upload:
        found = await _receive(request, upload.part, upload.most_bytes)
        if found != sha256:
            raise ServiceError(422, f"the body has SHA-256 {found}: it was cut or changed; send it again")
        return await _publish(run, version, sha256, upload.part, told)


@router.post("/weight_sync")
async def notify(announced: Announced, run: Run, request: Request) -> Published:
    """The same with a file that is there already, so that nothing passes through the network.

    It is copied first, so that what is read is what was attested, whoever writes to it meanwhile.
    """
    version, sha256 = announced.version, announced.sha256
    async with _upload(run, request, version, sha256) as upload:
        file = upload.part.parent.parent / announced.file
        found = await run_in_threadpool(_copy, file, upload.part, upload.most_bytes)
        if found != sha256:
            raise ServiceError(422, f"the file has SHA-256 {found}; write it to its end, then announce it")
        return await _publish(run, version, sha256, upload.part, announced.metrics)


@router.get("/weights/{version}", response_class=StreamingResponse)
async def get_weights(run: Run, version: Annotated[Number, InPath()]) -> StreamingResponse:
    """A stored version as safetensors: the newest, and older ones that are still needed."""
    plan, store = await run(lambda context: (context.setup, context.weights_dir))
    written = await run_in_threadpool(open_version, plan, store, version)
    length = str(os.fstat(written.fileno()).st_size)

    def chunks() -> Iterator[bytes]:
        with written:
            while chunk := written.read(CHUNK_BYTES):
                yield chunk

    return StreamingResponse(chunks(), media_type=TENSORS, headers={"Content-Length": length})


class _Upload(NamedTuple):
    part: Path  # where to put the weights; removed in the end
    most_bytes: int


@contextlib.asynccontextmanager
async def _upload(run: RunHandle, request: Request, version: int, sha256: str) -> AsyncIterator[_Upload]:
    """One at a time. Raises ServiceError, before anything is read, for a version that is not awaited."""

    def begin(context: RunContext) -> _Upload:
        outside(context).check_due(version, sha256)
        part = context.setup.out.absolute() / INCOMING_PARTS / f"{uuid.uuid4().hex}.safetensors"
        return _Upload(part, context.setup.upload_bytes)

    async with request.app.state.uploads:
        upload = await run(begin)
        try:
            upload.part.parent.mkdir(parents=True, exist_ok=True)
            yield upload
        except OSError as error:
            raise ServiceError(503, f"the weights cannot be kept: {error.strerror}; make room") from error
        finally:
            upload.part.unlink(missing_ok=True)


async def _publish(run: RunHandle, version: int, sha256: str, file: Path, metrics: Metrics) -> Published:
    digest = await run.wait(lambda context: outside(context).publish(version, sha256, file, metrics), READ_S)
    if digest is None:
        raise ServiceError(503, f"version {version} is still being read; send it again")
    return Published(version=version, digest=digest)


async def _receive(request: Request, file: Path, most: int) -> str:
    """Write a body of up to `most` bytes to a file; its SHA-256."""
    if int(request.headers.get("content-length", 0)) > most:
        raise _too_long(most)
    digest, num_bytes = hashlib.sha256(), 0
    with file.open("xb") as written:
        try:
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes > most:
                    raise _too_long(most)
                digest.update(chunk)
                await run_in_threadpool(written.write, chunk)
        except ClientDisconnect as error:
            raise ServiceError(408, "the body ended before its end; send it again") from error
    return digest.hexdigest()


def _too_long(most: int) -> ServiceError:
    return ServiceError(413, f"the weights of this model have at most {most} bytes; send each tensor once")


def _metrics(text: str) -> Metrics:
    try:
        return TypeAdapter(Metrics).validate_json(text)
    except ValidationError as error:
        raise ServiceError(422, "metrics: must be a JSON object of finite numbers by name") from error


def _copy(file: Path, part: Path, most: int) -> str:
    """Copy a plain file of up to `most` bytes; the SHA-256 of the copy. No link is followed."""
    digest, num_bytes = hashlib.sha256(), 0
    with _open_plain(file) as read, part.open("xb") as written:
        if os.fstat(read.fileno()).st_size > most:
            raise _too_long(most)
        while chunk := read.read(CHUNK_BYTES):
            num_bytes += len(chunk)
            if num_bytes > most:  # it has grown meanwhile
                raise _too_long(most)
            digest.update(chunk)
            written.write(chunk)
    return digest.hexdigest()


def _open_plain(file: Path) -> BinaryIO:
    """Raises ServiceError for what is no plain file, a link included."""
    try:
        opened = os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
        if stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            return opened
        opened.close()
        raise IsADirectoryError(0, "it is no plain file")
    except OSError as error:
        raise ServiceError(404, f"there is no such file in {INCOMING_DIR}: {error.strerror}") from error
