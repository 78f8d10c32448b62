"""How an engine's process takes versions: at once, or with most of the work done while the engine decodes.

A deferred version comes from host memory, so that rows stand still for one copy. The digest is of the bytes
in the engine all the same: a thread computes it, and until it is known nothing is generated with them.
"""

from __future__ import annotations

import time
from collections.abc import Container
from concurrent.futures import Future
from typing import NamedTuple

from dora.engine.engine import Engine
from dora.engine.sequence import EngineError
from dora.runtime.messages import LoadRefused, WeightsLoaded
from dora.runtime.stations import InferenceEngine
from dora.weights.staging import Staging
from dora.weights.store import Versions


class _Placed(NamedTuple):
    """A version whose bytes are in the engine, and whose digest is not known yet."""

    version: int
    digest: Future[str]
    stop_s: float


class Taking:
    """Loads and drops of one engine, in the order in which they are asked for."""

    def __init__(self, engine: InferenceEngine, store: Versions, staging: Staging | None) -> None:
        """Without a `staging` every load is done at once."""
        self._engine, self._store, self._staging = engine, store, staging
        self._placed: _Placed | None = None
        self._replies: list[object] = []

    @property
    def is_busy(self) -> bool:
        """Whether a load is still to be told of."""
        return self._placed is not None

    def stage(self, version: int) -> None:
        """A version has been published, and may have to be loaded."""
        if self._staging is not None:
            self._staging.stage(version)

    def load(self, version: int) -> None:
        """Begin to take a version; `poll` tells what comes of it."""
        self._finish()
        was_decoding, began_s = self._engine.can_step, time.perf_counter()
        try:
            digest = self._take(version)
        except (EngineError, OSError, RuntimeError) as error:  # torch cannot map a damaged file
            self._replies.append(LoadRefused(version, str(error)))
            return
        stop_s = time.perf_counter() - began_s if was_decoding else 0.0
        if isinstance(digest, Future):
            self._placed = _Placed(version, digest, stop_s)
        else:
            self._replies.append(WeightsLoaded(version, digest, stop_s))

    def drop(self, version: int) -> None:
        """Forget a version; a load that was refused has left nothing."""
        self.wait_for({version})
        if version in self._engine.versions:
            self._engine.drop(version)

    def wait_for(self, versions: Container[int]) -> None:
        """Return once these are held, as far as they have been asked for."""
        if self._placed is not None and self._placed.version in versions:
            self._finish()

    def poll(self) -> list[object]:
        """What there is to say by now, each thing once."""
        if self._placed is not None and self._placed.digest.done():
            self._finish()
        replies, self._replies = self._replies, []
        return replies

    def _take(self, version: int) -> str | Future[str]:
        """Other engines than our own hold what they load at once."""
        if self._staging is None:
            return self._engine.load(version, self._store.fetch(version))
        source = self._staging.take(version)
        if not isinstance(self._engine, Engine):
            return self._engine.load(version, source)
        return self._staging.digest(self._engine.place(version, source))

    def _finish(self) -> None:
        if self._placed is None:
            return
        (version, digest, stop_s), self._placed = self._placed, None
        assert isinstance(self._engine, Engine)
        self._replies.append(WeightsLoaded(version, self._engine.hold(version, digest.result()), stop_s))
