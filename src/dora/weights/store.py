"""The weight store: one file per version, in memory where the system has a memory file system.

Publishing is one copy into a file, fetching maps it, so all engines share one copy and nothing
is pickled. A version appears under its name only once it is complete. What is published is of the
engines' dtype: its digest is that of the bytes they hold once they have loaded it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.model.weights import weight_digest

_MEMORY = Path("/dev/shm")
_PREFIX = "dora-weights-"
DTYPES = {"float32": (torch.float32, ".f32"), "bfloat16": (torch.bfloat16, ".bf16")}


def make_store_folder(num_bytes: int) -> Path:
    """A new folder for versions of `num_bytes` in all, in memory if they fit there.

    Folders that dead processes left behind are removed, if they were numbered where this one is.
    """
    disk, place = Path(tempfile.gettempdir()), _place()
    for old in (*_MEMORY.glob(f"{_PREFIX}*-{place}-*"), *disk.glob(f"{_PREFIX}*-{place}-*")):
        owner = old.name.removeprefix(_PREFIX).split("-")[0]
        if owner.isdigit() and not _is_alive(int(owner)):
            shutil.rmtree(old, ignore_errors=True)
    fits = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > num_bytes
    parent = _MEMORY if fits else disk
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-{place}-", dir=parent))


def _place() -> str:
    """Where process ids are unique: this machine, and this container if it is one; 8 hex digits."""
    try:
        numbering = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbering = ""
    return hashlib.blake2b(f"{platform.node()} {numbering}".encode(), digest_size=4).hexdigest()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class Versions(Protocol):
    """Where an engine finds them."""

    def fetch(self, version: int, /) -> Tensor:
        """As `WeightStore.fetch`."""


class Recent:
    """The newest `num` versions published here: what is mapped stays when the store drops it.

    A run that goes on may publish a version again, with other bytes: their digest tells which they are.
    """

    def __init__(self, store: WeightStore, num: int, redone: WeightStore | None = None) -> None:
        """`redone` is where another process finds the version that was kept last."""
        self._store, self._num, self._redone = store, num, redone
        self._mapped: dict[int, Tensor] = {}
        self._digests: dict[int, str] = {}

    def publish(self, version: int, flat: Tensor) -> str:
        """As `WeightStore.publish`."""
        digest = self._store.publish(version, flat)
        self._forget_redone()
        self._add(version, self._store.fetch(version), digest)
        return digest

    def keep(self, version: int, flat: Tensor) -> str:
        """Round a version as if it were published, for whoever redoes its step; the digest of its bytes.

        Under its number the store may have others.
        """
        own = self._store.rounded(flat).clone()
        digest = weight_digest(own)
        self._forget_redone()
        if self._redone is not None:
            self._redone.publish(version, own)
        self._add(version, own, digest)
        return digest

    def _forget_redone(self) -> None:
        """The step that began with it is over."""
        if self._redone is not None:
            for version in self._redone.versions():
                self._redone.drop(version)

    def _add(self, version: int, own: Tensor, digest: str) -> None:
        self._mapped[version], self._digests[version] = own, digest
        self._mapped = {v: flat for v, flat in self._mapped.items() if v > version - self._num}
        self._digests = {v: digest for v, digest in self._digests.items() if v > version - self._num}

    def digest(self, version: int) -> str | None:
        """Of a version's bytes, here or in the store; or None."""
        if version not in self._digests:
            try:
                self._digests[version] = weight_digest(self._store.fetch(version))
            except FileNotFoundError:
                return None
        return self._digests[version]

    def __call__(self, version: int) -> Tensor | None:
        """A version as it was published, here or in the store, to be read only; or None."""
        return self._mapped[version] if version in self._mapped else self._store.find(version)


class WeightStore:
    """Versions as files of raw numbers in `folder`, all of one `dtype`: "float32" or "bfloat16"."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        self.folder = folder
        self._dtype, self._suffix = DTYPES[dtype]
        self._staged: Tensor | None = None  # pinned, for what comes from a GPU

    def publish(self, version: int, flat: Tensor) -> str:
        """Copy `flat` ([numel], fp32, on any device) in, rounded; returns the digest of the stored bytes."""
        path = self._path(version)
        draft = path.with_suffix(".draft")
        draft.write_bytes(self.rounded(flat).view(torch.uint8).numpy().data)
        os.replace(draft, path)
        return weight_digest(self.fetch(version))

    def fetch(self, version: int) -> Tensor:
        """The version as a tensor ([numel], of the store's dtype) mapped from its file, to be read only.

        Raises FileNotFoundError if the version was never published or has been dropped.
        """
        path, dtype = self._path(version), self._dtype
        numel = path.stat().st_size // dtype.itemsize
        return torch.from_file(str(path), shared=False, size=numel, dtype=dtype)

    def find(self, version: int) -> Tensor | None:
        """As `fetch`; None if it is not here."""
        try:
            return self.fetch(version)
        except FileNotFoundError:
            return None

    def raw(self, version: int) -> NDArray[np.uint8]:
        """The bytes of a version, mapped as by `fetch`."""
        content: NDArray[np.uint8] = self.fetch(version).view(torch.uint8).numpy()
        return content

    def name_of(self, version: int) -> str:
        """The name of a version's file, which says its dtype."""
        return f"{version}{self._suffix}"

    def hold(self, versions: Iterable[int], name: str) -> Path:
        """A folder `name` with links to the files of versions, which outlive `drop`; remove it after use."""
        folder = self.folder / name
        folder.mkdir()
        for version in versions:
            os.link(self._path(version), folder / self.name_of(version))
        return folder

    def adopt(self, version: int, path: Path) -> str:
        """Take in a version that was published before, from a file; returns the digest of its bytes."""
        draft = self._path(version).with_suffix(".draft")
        shutil.copyfile(path, draft)
        os.replace(draft, self._path(version))
        return weight_digest(self.fetch(version))

    def drop(self, version: int) -> None:
        """Forget a version; engines that have it mapped keep their mapping."""
        self._path(version).unlink(missing_ok=True)

    def versions(self) -> list[int]:
        """The versions stored, oldest first."""
        return sorted(int(path.stem) for path in self.folder.glob(f"*{self._suffix}"))

    def close(self) -> None:
        """Remove the folder and everything in it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def rounded(self, flat: Tensor) -> Tensor:
        """What engines hold of `flat`, on the host; it may be the same memory."""
        return self._on_host(flat.detach().to(self._dtype))

    def _on_host(self, flat: Tensor) -> Tensor:
        """Through pinned memory, which a GPU copies to several times as fast."""
        if not flat.is_cuda:
            return flat.contiguous()
        if self._staged is None:
            self._staged = torch.empty_like(flat, device="cpu", pin_memory=True)
        return self._staged.copy_(flat)

    def _path(self, version: int) -> Path:
        return self.folder / self.name_of(version)
