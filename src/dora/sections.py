"""The settings of each part of a run: name, meaning, unit, default and what one value alone may be.

Rules that need several keys are `dora.config`'s.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Duration = Annotated[str, Field(pattern=r"^\d+(\.\d+)?(us|ms|s)$")]

DEFAULT_STALENESS = {"dora": 2, "sync": 0, "one_step": 1, "drain": 1}
FIXED_STALENESS = {"sync": 0, "one_step": 1}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class Section(BaseModel):
    """What all sections share: frozen, no unknown keys, no silent conversion, no nan."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Run(Section):
    """How long, and from which seed."""

    steps: Count = Field(description="training steps (count)")
    seed: int = Field(default=0, ge=0, description="seed of data order and sampling (integer)")


class Model(Section):
    """The policy to train."""

    path: str = Field(
        description="folder in the Hugging Face format: config.json, *.safetensors, tokenizer.json"
    )


class Data(Section):
    """The prompts."""

    source: str = Field(description='.jsonl or .parquet file of prompts, or the built-in "gcd"')
    prompt_key: str = Field(default="prompt", min_length=1, description="column that holds the prompt (text)")
    max_prompt_length: Count = Field(default=256, description="longest prompt allowed (tokens)")
    shuffle: bool = Field(
        default=True, description="a new order every epoch, the same for the same seed (true or false)"
    )


class Sampling(Section):
    """How answers are drawn."""

    group_size: Count = Field(default=8, description="siblings sampled from one prompt (count)")
    temperature: float = Field(default=1.0, gt=0, description="divides the logits before sampling (no unit)")
    max_response_length: Count = Field(description="longest answer; generation stops there (tokens)")


class Engine(Section):
    """The rollout engines."""

    num_engines: Count = Field(default=2, description="rollout processes (count)")
    max_rows: Count = Field(default=32, description="requests one engine decodes at once (count)")
    version_slots: Count | None = Field(
        default=None, description="versions one engine can hold (count); unset: max_staleness + 1"
    )
    kernels: Literal["auto", "numba", "eager"] = Field(
        default="auto",
        description="how engines compute; numba: compiled, eager: plain torch, auto: compiled where possible",
    )
    tail_interval: Count = Field(
        default=1,
        description="old versions with at most a quarter of an engine's rows decode only in every so many-th "
        "step, unless they are max_staleness versions old (steps); 1: in all",
    )
    pace: Duration = Field(
        default="0ms", description="pad each decode step to this time, like an accelerator's (duration)"
    )

    @property
    def pace_s(self) -> float:
        """`pace` in seconds."""
        number, unit = re.findall(r"[\d.]+|[a-z]+", self.pace)
        return float(number) * _SECONDS[unit]


class Reward(Section):
    """How answers are judged."""

    function: str = Field(description='"file.py:function", or "package.module:function"')
    timeout_s: float = Field(default=10.0, gt=0, description="longest a single call may take (s)")
    max_failed_share: Share = Field(
        default=0.2, description="share of failed groups, of at least 20, past which the run stops (0 to 1)"
    )


class Algorithm(Section):
    """The objective."""

    adv_estimator: Literal["grpo"] = Field(
        default="grpo", description="grpo: (reward - mean of its group) / deviation"
    )
    filter_groups: bool = Field(
        default=False, description="leave out groups whose rewards are all equal (true or false)"
    )
    clip_ratio_low: float = Field(
        default=0.2, ge=0, lt=1, description="probability ratio is clipped at 1 - this (no unit)"
    )
    clip_ratio_high: float = Field(
        default=0.2, ge=0, description="probability ratio is clipped at 1 + this (no unit)"
    )
    kl_loss_coef: float = Field(
        default=0.0, ge=0, description="weight of the KL to the initial policy (no unit)"
    )
    loss_agg_mode: LossAggMode = Field(
        default="token-mean", description="how token losses become one number, in verl's words"
    )


class Trainer(Section):
    """The optimizer and its batch."""

    batch_size: Count = Field(description="groups per training step (count)")
    lr: float = Field(gt=0, description="peak learning rate of AdamW (per step)")
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear warm-up (count)")
    lr_decay: Literal["linear", "constant"] = Field(
        default="linear", description="learning rate after warm-up: linear reaches 0 at the end"
    )
    weight_decay: float = Field(
        default=0.0, ge=0, description="AdamW's decoupled weight decay (per step and lr)"
    )
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="gradients are scaled down to this norm (no unit)"
    )
    micro_batch_tokens: Count = Field(
        default=4096, description="tokens of one forward and backward, padding included (tokens)"
    )
    elastic: bool = Field(
        default=False, description="lend the trainer as one more engine while it rests (true or false)"
    )


class Orchestrator(Section):
    """Who may run ahead, and how far; who runs where."""

    update_policy: Literal["dora", "sync", "one_step", "drain"] = Field(
        default="dora",
        description="dora: several versions generate at once; the others have one live version at a time: "
        "sync generates, then trains; one_step trains the batch before; drain: batches_per_version",
    )
    max_staleness: int = Field(
        default=DEFAULT_STALENESS["dora"],
        ge=0,
        description="oldest sample trained (versions); unset: dora 2, drain 1; sync is 0, one_step is 1",
    )
    batches_per_version: Count = Field(
        default=1, description="batches that a live version generates (count); with drain only"
    )
    placement: Literal["dynamic", "static", "colocated"] = Field(
        default="dynamic",
        description="dynamic: engines move among versions and requests among engines; static: both stay; "
        "colocated: dynamic, and engines rest while the trainer works on their device",
    )
    slack: int = Field(
        default=0,
        ge=0,
        description="groups admitted fewer than the bound allows, so that a late one can be passed (count)",
    )
    load_interval: Count = Field(
        default=1,
        description="engines take every so many-th version, unless the bound asks (versions); with dora only",
    )
    rush: bool = Field(
        default=True, description="a group that the trainer waits for decodes alone (true or false)"
    )
    level_running: bool = Field(
        default=False, description="even out running requests among engines (true or false)"
    )
    rebalance_interval_s: float = Field(
        default=1.0, gt=0, description="how often moves are considered while nothing else asks for it (s)"
    )
    kv_watermark: float = Field(
        default=0.9, gt=0, le=1, description="share of KV in use above which requests move away (0 to 1)"
    )

    @model_validator(mode="before")
    @classmethod
    def default_by_policy(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """Give `max_staleness` the default of the chosen policy."""
        if not isinstance(raw, dict):
            return raw
        default = DEFAULT_STALENESS.get(str(raw.get("update_policy", "dora")))
        return raw if default is None else {"max_staleness": default, **raw}


class Eval(Section):
    """Held-out prompts, answered before and after training."""

    num_prompts: int = Field(
        default=256, ge=0, description="prompts, the first ones of source (count); 0: no evaluation"
    )
    source: str | None = Field(
        default=None,
        description='.jsonl or .parquet file, or "gcd" (its held-out pairs); unset: no evaluation',
    )
    seed: int = Field(default=0, ge=0, description="seed of evaluation sampling (integer)")


class Journal(Section):
    """The record of the run."""

    fsync: bool = Field(
        default=False, description="survive power loss, not only dead processes; slower (true or false)"
    )


class Runtime(Section):
    """The processes."""

    kind: Literal["local"] = Field(
        default="local", description="where the stations run; local: processes of this machine"
    )
    heartbeat_timeout_s: float = Field(
        default=5.0, gt=0, description="an engine silent for longer is lost (s)"
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
