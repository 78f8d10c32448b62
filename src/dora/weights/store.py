"""The weight store: one file per version of the policy, which the trainer writes and the engines map.

The files are in memory where the system has a memory file system. Publishing copies a version into a file
once, fetching maps it, and a version appears under its name only when it is complete. The weights are of the
engines' dtype, so their digest is that of the bytes that an engine holds after it has loaded them.
`version_file` has the format.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Container, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.errors import ModelError
from dora.model.weights import Shapes, weight_digest
from dora.weights.version_file import (
    DTYPES,
    OLD_SUFFIXES,
    SUFFIX,
    map_version,
    parse_version,
    read_header,
    write_version,
)

MEMORY_FS = Path("/dev/shm")
STORE_PREFIX = "dora-weights-"


class VersionSource(Protocol):
    """Where an engine gets versions from."""

    def fetch(self, version: int, /) -> Tensor:
        """See `WeightStore.fetch`."""


class WeightStore:
    """Versions as safetensors files in `folder`, all of one `dtype`: "float32" or "bfloat16"."""

    def __init__(self, folder: Path, dtype: str = "float32", shapes: Shapes | None = None) -> None:
        """A store that publishes needs the `shapes` of all tensors by name, in the flat buffer's order."""
        self.folder = folder
        self._dtype, self._shapes = dtype, shapes

    def publish(self, version: int, flat: Tensor) -> str:
        """Store `flat` ([numel], fp32 or of the store's dtype, on any device), rounded.

        Returns the digest of the stored weights. Raises OSError.
        """
        assert self._shapes is not None, "a store that publishes needs shapes"
        draft = self._draft(version)
        try:
            digest = write_version(draft, version, flat, self._dtype, self._shapes)
        except OSError as error:  # a full disk is reported without a path
            raise OSError(error.errno, error.strerror, str(draft)) from error
        os.replace(draft, self.path(version))
        return digest

    def publish_file(self, version: int, path: Path) -> str:
        """Store a copy of a version's file, as from a checkpoint. Returns the digest of its weights."""
        draft = self._draft(version)
        shutil.copyfile(path, draft)
        os.replace(draft, self.path(version))
        return weight_digest(self.fetch(version))

    def fetch(self, version: int) -> Tensor:
        """Map a version's file: a tensor [numel] of the store's dtype, to be read only.

        Raises FileNotFoundError if the version was never published or has been dropped, and ModelError for a
        file that is not that of this version.
        """
        path = self.path(version)
        try:
            header, flat = map_version(path)
        except FileNotFoundError:
            for old in filter(Path.exists, map(path.with_suffix, OLD_SUFFIXES)):
                raise ModelError(
                    f"{old} has the format of an older DORA-RL, which this one does not read: use the "
                    "version that wrote it"
                ) from None
            raise
        if (header.version, header.dtype) != (version, self._dtype):
            raise ModelError(
                f"{path} has version {header.version} in {header.dtype}, not version {version} in "
                f"{self._dtype}; restore the file"
            )
        return flat

    def digest(self, version: int) -> str:
        """The digest with which a version was published. Raises as `fetch` does."""
        return read_header(self.path(version)).digest

    def fetch_if_stored(self, version: int) -> Tensor | None:
        """As `fetch`, or None if the version is not stored."""
        try:
            return self.fetch(version)
        except FileNotFoundError:
            return None

    def file_bytes(self, version: int) -> NDArray[np.uint8]:
        """The bytes of a version's file, mapped. Raises FileNotFoundError as `fetch` does."""
        return np.asarray(np.memmap(self.path(version), np.uint8, "c"))

    def versions(self) -> list[int]:
        """The stored versions, oldest first."""
        return sorted(int(path.stem) for path in self.folder.glob(f"*{SUFFIX}"))

    def drop(self, version: int) -> None:
        """Delete a version's file. Processes that have mapped it keep their mapping."""
        self.path(version).unlink(missing_ok=True)

    def link_versions(self, versions: Iterable[int], name: str) -> Path:
        """Create a folder `name` with hard links to versions, which outlive `drop`. The caller removes it."""
        folder = self.folder / name
        folder.mkdir()
        for version in versions:
            os.link(self.path(version), folder / self.file_name(version))
        return folder

    def close(self) -> None:
        """Remove the folder and everything in it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def rounded(self, flat: Tensor) -> Tensor:
        """A copy of `flat` in the store's dtype, on the host."""
        return flat.detach().to("cpu", DTYPES[self._dtype], copy=True)

    def path(self, version: int) -> Path:
        """The file of a version, which exists while the version is stored."""
        return self.folder / self.file_name(version)

    @staticmethod
    def file_name(version: int) -> str:
        """The name of a version's file."""
        return f"{version}{SUFFIX}"

    def _draft(self, version: int) -> Path:
        return self.path(version).with_suffix(".draft")


def make_store_folder(num_bytes: int) -> Path:
    """Create a folder for versions of `num_bytes` in all, in memory if they fit there.

    Folders of exited processes are removed, if their process ids are of the same machine and container.
    """
    disk, namespace = Path(tempfile.gettempdir()), _pid_namespace()
    pattern = f"{STORE_PREFIX}*-{namespace}-*"
    for old in (*MEMORY_FS.glob(pattern), *disk.glob(pattern)):
        owner = old.name.removeprefix(STORE_PREFIX).split("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(old, ignore_errors=True)
    fits = os.access(MEMORY_FS, os.W_OK) and shutil.disk_usage(MEMORY_FS).free > num_bytes
    parent = MEMORY_FS if fits else disk
    return Path(tempfile.mkdtemp(prefix=f"{STORE_PREFIX}{os.getpid()}-{namespace}-", dir=parent))


def _pid_namespace() -> str:
    """Where process ids are unique, by machine and container: 8 hex digits."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return hashlib.blake2b(f"{platform.node()} {namespace}".encode(), digest_size=4).hexdigest()


class RecentVersions:
    """The trainer's view of the store: the newest `num` versions stay mapped after the store drops them.

    A resumed run may publish a version again with other bytes. Their digest distinguishes them.
    """

    def __init__(self, store: WeightStore, num: int, replay_store: WeightStore | None = None) -> None:
        """`replay_store` shows other processes the version whose step is replayed."""
        self._store, self._num, self._replay_store = store, num, replay_store
        self._mapped: dict[int, Tensor] = {}
        self._digests: dict[int, str] = {}

    def publish(self, version: int, flat: Tensor) -> str:
        """See `WeightStore.publish`."""
        digest = self._store.publish(version, flat)
        self._clear_replayed()
        self._add(version, self._store.fetch(version), digest)
        return digest

    def keep_replayed(self, version: int, flat: Tensor) -> str:
        """Round a version as `publish` does, without replacing the published one. Returns its digest.

        A trainer that replays steps starts the next one from these bytes.
        """
        own = self._store.rounded(flat)
        digest = weight_digest(own)
        self._clear_replayed()
        if self._replay_store is not None:
            self._replay_store.publish(version, own)
        self._add(version, own, digest)
        return digest

    def get(self, version: int) -> Tensor | None:
        """A version as it was published, from here or the store, to be read only; or None."""
        return self._mapped[version] if version in self._mapped else self._store.fetch_if_stored(version)

    def digest(self, version: int) -> str | None:
        """The digest of a version, from here or the store; or None."""
        if version not in self._digests:
            try:
                self._digests[version] = self._store.digest(version)
            except FileNotFoundError:
                return None
        return self._digests[version]

    def _add(self, version: int, own: Tensor, digest: str) -> None:
        self._mapped[version], self._digests[version] = own, digest
        self._mapped = {v: flat for v, flat in self._mapped.items() if v > version - self._num}
        self._digests = {v: digest for v, digest in self._digests.items() if v > version - self._num}

    def _clear_replayed(self) -> None:
        """The step that started from it has ended."""
        if self._replay_store is not None:
            for version in self._replay_store.versions():
                self._replay_store.drop(version)


class RemoteVersionSource:
    """Versions of a store on another machine, as bytes that this process has received.

    Ray's object store holds them once for all processes of a machine. They are copied only when an engine
    loads them. One thread receives while others fetch.
    """

    def __init__(self) -> None:
        self._received: dict[int, Tensor] = {}

    def receive(self, version: int, content: NDArray[np.uint8], stored: Container[int]) -> None:
        """Add a version, without a copy of its file's `content` ([bytes]). Versions that are not in `stored`
        are dropped. Raises ModelError for other content.
        """
        _, flat = parse_version(content)
        kept = {version: flat for version, flat in self._received.items() if version in stored}
        self._received = kept | {version: flat}

    def fetch(self, version: int) -> Tensor:
        """See `WeightStore.fetch`."""
        try:
            return self._received[version]
        except KeyError as error:
            raise FileNotFoundError(f"version {version} has not been sent to this machine") from error


class Prefetcher:
    """Copies published versions into host memory, and computes digests, in a thread while the engine decodes.

    It holds one version. Only one thread may call it.
    """

    def __init__(self, store: VersionSource, is_pinned: bool) -> None:
        """`is_pinned`: use pinned memory, for an engine on a GPU."""
        self._store, self._is_pinned = store, is_pinned
        self._thread = ThreadPoolExecutor(1, "weight-prefetch")
        self._memory: Tensor | None = None
        self._prefetched: tuple[int, Future[Tensor]] | None = None

    def prefetch(self, version: int) -> None:
        """Begin to copy a published version, which replaces the previous one."""
        self._prefetched = version, self._thread.submit(self._copy, version)

    def fetch(self, version: int) -> Tensor:
        """The version ([numel], of the store's dtype), to be read before the next `prefetch`.

        It comes from the store if it is not prefetched. Raises as `WeightStore.fetch` does.
        """
        if self._prefetched is not None and self._prefetched[0] == version:
            copy = self._prefetched[1]
            if copy.done() and copy.exception() is None:
                return copy.result()
        return self._store.fetch(version)

    def digest(self, flat: Tensor) -> Future[str]:
        """The digest of `flat`, which must not change meanwhile."""
        return self._thread.submit(weight_digest, flat)

    def _copy(self, version: int) -> Tensor:
        source = self._store.fetch(version)
        if self._memory is None:
            self._memory = torch.empty_like(source, pin_memory=self._is_pinned)
        return self._memory.copy_(source)
