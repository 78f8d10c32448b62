"""The settings of where a run runs, what it writes down and who is told.

As in `dora.sections`: name, meaning, unit, default and what one value alone may be.
"""

from __future__ import annotations

from typing import Literal

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

    kind: Literal["local"] = Field(
        default="local", description="where the stations run; local: processes of this machine"
    )
    heartbeat_timeout_s: float = Field(
        default=5.0, gt=0, description="an engine or reward process silent for longer is lost (s)"
    )
    max_restarts: int = Field(
        default=3, ge=0, description="times in a row that a lost engine is started again (count)"
    )
    trainer_timeout_s: float = Field(
        default=60.0, gt=0, description="a trainer process that is stopped for longer ends the run (s)"
    )
    start_timeout_s: float = Field(
        default=120.0, gt=0, description="a process that is not ready by then fails the run (s)"
    )
    move_timeout_s: float = Field(
        default=5.0, gt=0, description="a move on which nothing is copied for so long is given up (s)"
    )
