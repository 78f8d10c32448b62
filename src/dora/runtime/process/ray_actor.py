"""The actor of a worker on a Ray cluster.

Each worker is a process of its own, which imports this module: it imports only what all workers need.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
from numpy.typing import NDArray

from dora import __version__
from dora.curve import CurveAddress
from dora.errors import RunError
from dora.runtime.process.descendants import kill_descendants
from dora.runtime.process.messages import EngineSpec, RewardWorkerSpec
from dora.runtime.process.rpc import ChannelAddress, CurveChannel
from dora.runtime.process.worker_process import Target, run_target

if TYPE_CHECKING:
    import numpy as np

    from dora.weights.store import RemoteVersionSource


@dataclass(frozen=True)
class DriverNode:
    """The driver's node, for the actors."""

    node: str
    spans_nodes: bool  # whether the run may have several nodes
    pool_bytes: int  # of an engine's KV pool
    broker: CurveAddress | None = None  # of migrations between nodes, see `remote_kv`
    version: str = __version__  # of DORA-RL


class WorkerActor:
    """A worker process on any node of the cluster."""

    def __init__(self) -> None:
        self._pool_folder: Path | None = None  # of an engine on another node than the driver's
        self._versions: RemoteVersionSource | None = None

    def run(self, address: ChannelAddress, target: Target, spec: Any, driver: DriverNode) -> None:
        """Connect to the driver at `address` and run `target`, see `run_target`."""
        node = ray.get_runtime_context().get_node_id()
        if driver.version != __version__:
            raise RunError(
                f"node {node} has DORA-RL {__version__}, but the driver has {driver.version}: install the "
                "same version on all nodes"
            )
        spec = self._localize(spec, driver, node == driver.node)
        channel = CurveChannel.connect(address)
        channel.send((os.getpid(), node))
        try:
            run_target(channel, target, spec, self._remove_pool)
        finally:
            channel.close()
            self._remove_pool()
            kill_descendants(psutil.Process())

    def receive_version(self, version: int, content: NDArray[np.uint8], stored: list[int]) -> None:
        """See `RemoteVersionSource.receive`; `content` is in the object store of this node."""
        assert self._versions is not None
        self._versions.receive(version, content, stored)

    def _remove_pool(self) -> None:
        if self._pool_folder is not None:
            shutil.rmtree(self._pool_folder, ignore_errors=True)

    def _localize(self, spec: Any, driver: DriverNode, is_driver_node: bool) -> Any:
        """The worker's spec with the paths and addresses of this node."""
        if isinstance(spec, RewardWorkerSpec):
            return replace(spec, remote=None) if is_driver_node else spec
        if not isinstance(spec, EngineSpec) or not driver.spans_nodes:
            return spec
        spec = replace(spec, host=ray.util.get_node_ip_address())
        if is_driver_node:
            return spec
        from dora.weights.store import RemoteVersionSource, make_store_folder

        self._versions, pool = RemoteVersionSource(), spec.pool
        if pool is not None:
            self._pool_folder = make_store_folder(driver.pool_bytes)
            pool = self._pool_folder / pool.name
        return replace(spec, remote_weights=self._versions, pool=pool, broker=driver.broker)
