"""Where the processes of a run live: on this machine, or on the nodes of a Ray cluster.

The driver, with the orchestrator and the journal, is on this machine in either case.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from dora.config import Config
from dora.errors import ConfigError
from dora.fleets import num_engines
from dora.runtime.process import Body, Carrier, Forked, warm_up

if TYPE_CHECKING:
    from dora.runtime.plan import Plan


class Ground(Protocol):
    """Starts processes, wherever it may.

    `host` is where processes of other machines reach this one; None: there are none. Machines that are
    `leaving` are those of `Worker.node`, and `num_free` engines more could start now.
    """

    @property
    def host(self) -> str | None: ...

    @property
    def leaving(self) -> frozenset[str]: ...

    @property
    def num_free(self) -> int: ...

    def start(self, name: str, body: Body, spec: Any) -> Carrier:
        """As `Told.start`. Raises RunError where there is no place for it."""

    def close(self) -> None:
        """End what was started for all of them; their processes have ended."""


class Here:
    """This machine, whose workers are forked."""

    host = None
    leaving: frozenset[str] = frozenset()
    num_free = 0

    def __init__(self) -> None:
        warm_up()

    def start(self, name: str, body: Body, spec: Any) -> Carrier:
        return Forked(name, body, spec)

    def close(self) -> None:
        """There is nothing else."""


def check(config: Config) -> None:
    """Raises ConfigError where the processes cannot be started."""
    if config.runtime.kind != "ray":
        return
    if find_spec("ray") is None:
        raise ConfigError(
            'runtime.kind = "ray": Ray is not installed here; pip install "dora-rl[ray]", or set '
            "runtime.kind = local"
        )
    if config.ray.max_engines is not None and config.ray.max_engines < num_engines(config):
        raise ConfigError(
            f"ray.max_engines = {config.ray.max_engines} is less than the {num_engines(config)} engines that "
            "the run begins with: raise it, or lower engine.num_engines"
        )
    if config.trainer.elastic or config.orchestrator.placement == "colocated":
        raise ConfigError(
            'runtime.kind = "ray" gives each engine a place of its own, not one that it shares with the '
            "trainer: remove trainer.elastic and orchestrator.placement = colocated"
        )


def make_ground(plan: Plan, notice: Callable[[str], None]) -> Ground:
    """That of a run; `notice` gets sentences for the person watching. Raises RunError without a cluster."""
    if plan.config.runtime.kind == "ray":
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")  # Ray's log is not the run's to print
        from dora.runtime.ray import Cluster

        return Cluster(plan, notice)
    return Here()
