"""Upload of new weights by an external trainer, and download of stored versions.

Weights are safetensors files, which contain tensors and no code. The client sends the SHA-256 of the file,
so a truncated or changed file is never installed; the response has the digest of the bytes that engines load.
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
from fastapi import Path as PathParameter
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect

from dora.errors import ServiceError
from dora.runtime.run_dir import INCOMING_PARTS
from dora.runtime.training.external import INCOMING_DIR
from dora.service.context import Run, RunContext, RunHandle
from dora.service.models import RequestBody
from dora.service.training import require_trainer

router = APIRouter(prefix="/v1", tags=["weights"])

INSTALL_TIMEOUT_S = 600.0  # for weights to be read, checked and published
CHUNK_BYTES = 2**20
BINARY = "application/octet-stream"

VersionNumber = Annotated[int, Field(ge=0, lt=2**31, description="number of the version")]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$", description="SHA-256 of the file (hex)")]
TrainerMetrics = dict[
    Annotated[str, Field(pattern="^[a-z0-9_/]{1,64}$")], Annotated[float, Field(allow_inf_nan=False)]
]


class WeightFile(RequestBody):
    """A file that a trainer on the same machine has written to the folder `incoming` of the run."""

    version: VersionNumber
    file: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$", description="file name without a path")
    sha256: Sha256
    metrics: TrainerMetrics = Field(default={}, max_length=64)


class PublishedVersion(BaseModel):
    """`digest` is that of the bytes that engines load, as in the journal."""

    version: int
    digest: str


@router.put(
    "/weights/{version}",
    openapi_extra={"requestBody": {"content": {BINARY: {"schema": {"type": "string", "format": "binary"}}}}},
)
async def put_weights(
    run: Run,
    request: Request,
    version: Annotated[VersionNumber, PathParameter()],
    sha256: Annotated[Sha256, Query()],
    metrics: Annotated[str, Query(max_length=4096, description="numbers by name, as a JSON object")] = "{}",
) -> PublishedVersion:
    """End the current step: the body is a safetensors file with all tensors of the next version.

    The response follows the publication. A repeated request has the same response.
    """
    numbers = _parse_metrics(metrics)
    async with _upload(run, request, version, sha256) as upload:
        found = await _receive_file(request, upload.file, upload.max_bytes)
        if found != sha256:
            raise ServiceError(
                422, f"the body has SHA-256 {found}: it is truncated or changed; send it again"
            )
        return await _publish(run, version, sha256, upload.file, numbers)


@router.post("/weight_sync")
async def announce_weights(body: WeightFile, run: Run, request: Request) -> PublishedVersion:
    """As `put_weights`, with a file on the run's machine instead of an upload.

    The file is copied before it is checked, so that nothing can change it afterwards.
    """
    async with _upload(run, request, body.version, body.sha256) as upload:
        source = upload.file.parent.parent / body.file
        found = await run_in_threadpool(_copy_file, source, upload.file, upload.max_bytes)
        if found != body.sha256:
            raise ServiceError(
                422, f"the file has SHA-256 {found}; write the whole file before announcing it"
            )
        return await _publish(run, body.version, body.sha256, upload.file, body.metrics)


@router.get("/weights/{version}", response_class=StreamingResponse)
async def get_weights(run: Run, version: Annotated[VersionNumber, PathParameter()]) -> StreamingResponse:
    """A stored version as safetensors: the newest, or an older one that requests still need."""
    weights_dir = await run(lambda context: context.weights_dir)
    file = await run_in_threadpool(_open_version, weights_dir, version)
    size = str(os.fstat(file.fileno()).st_size)

    def chunks() -> Iterator[bytes]:
        with file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    return StreamingResponse(chunks(), media_type=BINARY, headers={"Content-Length": size})


# --- upload


class _Upload(NamedTuple):
    file: Path  # where the weights go; removed at the end
    max_bytes: int


@contextlib.asynccontextmanager
async def _upload(run: RunHandle, request: Request, version: int, sha256: str) -> AsyncIterator[_Upload]:
    """One upload at a time. Raises ServiceError, before the body is read, unless the version is due."""

    def begin(context: RunContext) -> _Upload:
        require_trainer(context).check_due(version, sha256)
        file = context.setup.out.absolute() / INCOMING_PARTS / f"{uuid.uuid4().hex}.safetensors"
        return _Upload(file, context.setup.upload_bytes)

    async with request.app.state.upload_lock:
        upload = await run(begin)
        try:
            upload.file.parent.mkdir(parents=True, exist_ok=True)
            yield upload
        except OSError as error:
            raise ServiceError(
                503, f"the weights cannot be stored: {error.strerror}; free disk space"
            ) from error
        finally:
            upload.file.unlink(missing_ok=True)


async def _publish(
    run: RunHandle, version: int, sha256: str, file: Path, metrics: TrainerMetrics
) -> PublishedVersion:
    digest = await run.wait(
        lambda context: require_trainer(context).publish(version, sha256, file, metrics), INSTALL_TIMEOUT_S
    )
    if digest is None:
        raise ServiceError(503, f"version {version} is still being installed; send the request again")
    return PublishedVersion(version=version, digest=digest)


async def _receive_file(request: Request, file: Path, max_bytes: int) -> str:
    """Write the body to a file; returns its SHA-256. Raises ServiceError beyond `max_bytes`."""
    if int(request.headers.get("content-length", 0)) > max_bytes:
        raise _too_large(max_bytes)
    digest, num_bytes = hashlib.sha256(), 0
    with file.open("xb") as target:
        try:
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    raise _too_large(max_bytes)
                digest.update(chunk)
                await run_in_threadpool(target.write, chunk)
        except ClientDisconnect as error:
            raise ServiceError(408, "the client disconnected during the body; send it again") from error
    return digest.hexdigest()


def _too_large(max_bytes: int) -> ServiceError:
    return ServiceError(
        413, f"the weights of this model have at most {max_bytes} bytes; send each tensor once"
    )


def _parse_metrics(text: str) -> TrainerMetrics:
    try:
        return TypeAdapter(TrainerMetrics).validate_json(text)
    except ValidationError as error:
        raise ServiceError(422, "metrics: must be a JSON object of finite numbers by name") from error


def _copy_file(source: Path, target: Path, max_bytes: int) -> str:
    """Copy a regular file; returns the SHA-256 of the copy. Raises ServiceError beyond `max_bytes`."""
    digest, num_bytes = hashlib.sha256(), 0
    with _open_regular_file(source) as read, target.open("xb") as written:
        if os.fstat(read.fileno()).st_size > max_bytes:
            raise _too_large(max_bytes)
        while chunk := read.read(CHUNK_BYTES):
            num_bytes += len(chunk)
            if num_bytes > max_bytes:  # the file has grown meanwhile
                raise _too_large(max_bytes)
            digest.update(chunk)
            written.write(chunk)
    return digest.hexdigest()


def _open_regular_file(file: Path) -> BinaryIO:
    """Raises ServiceError for a missing file, a link, or anything but a regular file."""
    try:
        opened = os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
        if stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            return opened
        opened.close()
        raise IsADirectoryError(0, "not a regular file")
    except OSError as error:
        raise ServiceError(
            404, f"the folder {INCOMING_DIR} of the run has no such file: {error.strerror}"
        ) from error


# --- download


def _open_version(weights_dir: Path, version: int) -> BinaryIO:
    """The open safetensors file of a stored version. Raises ServiceError if the version is not stored."""
    from dora.weights.store import WeightStore

    store = WeightStore(weights_dir)
    try:
        return store.path(version).open("rb")
    except FileNotFoundError as error:
        stored = ", ".join(map(str, store.versions())) or "none"
        raise ServiceError(
            404, f"version {version} is not stored; the stored versions are {stored}"
        ) from error
