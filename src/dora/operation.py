"""The settings of where a run runs, what it writes down and who is told.

As in `dora.sections`: name, meaning, unit, default and what one value alone may be.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dora.sections import Section


class Journal(Section):
    """The record of the run."""

    fsync: bool = Field(
        default=False, description="survive power loss, not only dead processes; slower (true or false)"
    )


class Metrics(Section):
    """Who else is told the metrics of each step; metrics.jsonl always has them."""

    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = Field(
        default=[], description='trackers (list, as ["tensorboard"]); each is an extra of the package'
    )
    project: str = Field(
        default="dora", min_length=1, description="where wandb and trackio file the run (name)"
    )
    peak_tflops: float | None = Field(
        default=None,
        gt=0,
        description="most that the device of a trainer's process can do, for perf/mfu/actor (TFLOP/s); "
        "unset: known of common GPUs, of no CPU",
    )


class Runtime(Section):
    """The processes."""

    kind: Literal["local", "ray"] = Field(
        default="local",
        description="where the stations run; local: processes of this machine, ray: actors of a Ray cluster",
    )
    heartbeat_timeout_s: float = Field(
        default=5.0, gt=0, description="an engine or reward process silent for longer is lost (s)"
    )
    max_restarts: int = Field(
        default=3,
        ge=0,
        description="times in a row that a lost engine, or trainer, is started again (count)",
    )
    trainer_timeout_s: float = Field(
        default=60.0, gt=0, description="a trainer process that is stopped for longer is lost (s)"
    )
    step_timeout_s: float = Field(
        default=3600.0,
        gt=0,
        description="a trainer that has answered no order for so long is lost (s)",
    )
    start_timeout_s: float = Field(
        default=120.0, gt=0, description="a process that is not ready by then fails the run (s)"
    )
    move_timeout_s: float = Field(
        default=5.0, gt=0, description="a move on which nothing is copied for so long is given up (s)"
    )


class Ray(Section):
    """The Ray cluster of `runtime.kind = "ray"`. The trainer's processes are on the node of the driver."""

    address: Annotated[str, Field(pattern=r"^(auto|[^:/\s]+:\d+)$")] | None = Field(
        default=None,
        description='a running cluster (host:port, or "auto": the one that this machine belongs to); unset: '
        "Ray is started on this machine, and stopped with the run",
    )
    spread: bool = Field(
        default=True,
        description="engines and judges go round the nodes; false: as few nodes as possible (true or false)",
    )
    max_engines: int | None = Field(
        default=None,
        ge=1,
        description="engines join until there are so many, as soon as nodes have room for them (count); "
        "unset: engine.num_engines",
    )
    engine_cpus: float = Field(
        default=1.0, ge=0, description="CPUs that Ray reserves for each engine (count)"
    )
    trainer_cpus: float = Field(
        default=1.0,
        ge=0,
        description="CPUs for each process of the trainer, and each station beside it (count)",
    )
    reward_cpus: float = Field(default=1.0, ge=0, description="CPUs for each process that judges (count)")
