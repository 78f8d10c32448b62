"""What a thread does for the versions of an engine, while that one decodes.

It brings a published version near, so that taking it is one copy, and digests what has been taken.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from dora.model.weights import weight_digest
from dora.weights.store import Versions


class Staging:
    """Host memory for one version, pinned for a GPU; whoever makes it is the only one who calls it."""

    def __init__(self, store: Versions, is_pinned: bool) -> None:
        self._store, self._is_pinned = store, is_pinned
        self._thread = ThreadPoolExecutor(1, "staging")
        self._memory: Tensor | None = None
        self._near: tuple[int, Future[Tensor]] | None = None

    def stage(self, version: int) -> None:
        """Begin to copy a published version; it takes the place of the one before."""
        self._near = version, self._thread.submit(self._copy, version)

    def take(self, version: int) -> Tensor:
        """The version ([numel], of the store's dtype), to be read before another is staged.

        It comes from the store where it is not near yet. Raises as the store does.
        """
        if self._near is not None and self._near[0] == version:
            copy = self._near[1]
            if copy.done() and copy.exception() is None:
                return copy.result()
        return self._store.fetch(version)

    def digest(self, flat: Tensor) -> Future[str]:
        """The digest of bytes that nobody changes meanwhile."""
        return self._thread.submit(weight_digest, flat)

    def _copy(self, version: int) -> Tensor:
        source = self._store.fetch(version)
        if self._memory is None:
            self._memory = torch.empty_like(source, pin_memory=self._is_pinned)
        return self._memory.copy_(source)
