"""The launcher of a run, which starts its worker processes: here, or on the nodes of a Ray cluster.

The driver is on this machine in either case.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec

from dora.config.schema import Config
from dora.errors import ConfigError
from dora.runtime.process.ray_connect import check_reachable, make_private_token, set_ray_environment
from dora.runtime.process.worker_process import Launcher, preload_workers


def check_ray_config(config: Config) -> None:
    """Raises ConfigError if `runtime.kind = "ray"` cannot start the processes of this configuration."""
    if config.runtime.kind != "ray":
        return
    if find_spec("ray") is None:
        raise ConfigError(
            'runtime.kind = "ray": Ray is not installed here; pip install "dora-rl[ray]", or set '
            "runtime.kind = local"
        )
    if config.ray.max_engines is not None and config.ray.max_engines < config.num_engines:
        raise ConfigError(
            f"ray.max_engines = {config.ray.max_engines} is less than the {config.num_engines} engines that "
            "the run starts with: raise it, or lower engine.num_engines"
        )
    if config.trainer.elastic or config.orchestrator.placement == "colocated":
        raise ConfigError(
            'runtime.kind = "ray" reserves resources for each engine, which it cannot share with the '
            "trainer: remove trainer.elastic and orchestrator.placement = colocated"
        )
    if config.ray.dashboard and config.ray.address is not None:
        raise ConfigError(
            f"ray.dashboard = true has no effect with ray.address = {config.ray.address!r}: it depends on "
            "how that cluster was started; remove ray.dashboard"
        )
    if config.ray.dashboard and find_spec("aiohttp_cors") is None:
        raise ConfigError(
            "ray.dashboard = true: Ray's dashboard is not installed here; pip install 'ray[default]', or "
            "remove ray.dashboard"
        )
    if config.ray.address is None and (mode := os.environ.get("RAY_AUTH_MODE", "token")).lower() != "token":
        raise ConfigError(
            f"RAY_AUTH_MODE = {mode!r}: the run would start Ray without authentication on this machine; "
            "unset it, or start Ray yourself and set ray.address"
        )


def make_launcher(config: Config, run_name: str, pool_bytes: int, notice: Callable[[str], None]) -> Launcher:
    """The launcher that `runtime.kind` selects.

    `run_name` is part of the names of actors; `pool_bytes`: of an engine's KV pool. `notice` logs a line for
    the user. Raises RunError if the Ray cluster cannot be joined or lacks resources.
    """
    if config.runtime.kind != "ray":
        preload_workers()
        return Launcher()
    address = config.ray.address
    if address is None:
        os.environ["RAY_AUTH_MODE"] = "token"  # Ray reads it when it is imported
        make_private_token()
    elif address != "auto":
        check_reachable(address)
    set_ray_environment()
    from dora.runtime.process.ray import RayLauncher

    return RayLauncher(config, run_name, pool_bytes, notice)
