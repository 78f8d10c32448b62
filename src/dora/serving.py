"""The settings of a run's service: who may reach it, and what comes from outside.

The rest of what comes from outside is named where it is used: data.path, reward.function, class of a task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dora.errors import ConfigError
from dora.sections import Count, Section

if TYPE_CHECKING:
    from dora.config import Config


class Service(Section):
    """The HTTP side of a run, which `dora serve` opens."""

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="address to listen at; any but this machine's own lets others in, unencrypted (address)",
    )
    port: int = Field(default=0, ge=0, lt=2**16, description="port to listen at (number); 0: a free one")
    token_file: str | None = Field(
        default=None,
        description="file with the token that every call must bear, 16 characters or more (path); unset: a "
        "new one for each run, see service.json in its folder",
    )
    max_body_bytes: Count = Field(
        default=2**20, description="longest body of a call; weights have a limit of their own (bytes)"
    )
    trainer: Literal["internal", "external"] = Field(
        default="internal",
        description="external: a trainer outside fetches each batch, and sends the weights it makes of it",
    )
    agents: bool = Field(
        default=False,
        description="answers are those of agents outside, through sessions of the service (true or false)",
    )
    session_lease_s: float = Field(
        default=60.0, gt=0, description="a session whose agent is silent for longer has failed (s)"
    )
    patience_s: float = Field(
        default=3600.0,
        gt=0,
        description="a run in which nothing happens for longer, for it waits for somebody outside, ends (s)",
    )


def awaited(config: Config) -> str | None:
    """The first setting with which a run waits for somebody outside; None: none does."""
    outside = {
        "service.agents = true": config.service.agents,
        'service.trainer = "external"': config.service.trainer == "external",
        'data.path = "service"': config.data.path == "service",
        'reward.function = "service"': config.reward.function == "service",
        'class = "service" of a [[task]]': any(task.factory == "service" for task in config.task),
    }
    return next((setting for setting, is_set in outside.items() if is_set), None)


def check_outside(config: Config) -> None:
    """Raises ConfigError for what cannot be had from outside, or with a trainer outside."""
    ours = {"options", "num_workers", "micro_batch_rows", "micro_batch_tokens"}
    for task in config.task:
        if task.factory == "service" and (unused := ours & task.model_fields_set):
            raise ConfigError(
                f"task.{task.name}.{min(unused)} has no effect with class = service: others judge; remove it"
            )
    trainer, where = config.trainer, 'service.trainer = "external"'
    whys = {
        "trainer.adapter: two would train": trainer.adapter is not None,
        "trainer.num_ranks > 1: its processes are its own": trainer.num_ranks > 1,
        "trainer.lora_rank: whole versions are published": trainer.lora_rank > 0,
        "trainer.stations: they are for a trainer of the run": bool(trainer.stations),
        "trainer.elastic = true: it computes elsewhere": trainer.elastic,
        "orchestrator.placement = colocated: it computes elsewhere": config.orchestrator.placement
        == "colocated",
        "engine.exact = true: equal bits need DORA's trainer": config.engine.exact,
        "algorithm.adv_estimator = gae: the critic is the trainer's": config.algorithm.adv_estimator == "gae",
        "orchestrator.staleness = adaptive: nobody measures ESS and KL": (
            config.orchestrator.staleness == "adaptive"
        ),
    }
    for why in (why for why, is_set in whys.items() if is_set and config.service.trainer == "external"):
        raise ConfigError(f"{where} with {why}; remove one of the two")
