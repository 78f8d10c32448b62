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

    path: str = Field(
        description='.jsonl or .parquet file, folder that the library datasets reads, or the built-in "gcd"'
    )
    split: str | None = Field(
        default=None, min_length=1, description='split of a folder (name, as "train"); unset: its only one'
    )
    prompt_key: str = Field(
        default="prompt", min_length=1, description="column of the prompt (text or messages)"
    )
    chat_template: bool = Field(
        default=False, description="put prompts into the tokenizer's chat template (true or false)"
    )
    system_prompt: str | None = Field(
        default=None, min_length=1, description="system message of every conversation that has none (text)"
    )
    max_prompt_length: Count = Field(default=256, description="longest prompt allowed (tokens)")
    shuffle: bool = Field(
        default=True, description="a new order every epoch, the same for the same seed (true or false)"
    )


class Sampling(Section):
    """How answers are drawn. Log-probs that are trained with are those before top_k, top_p and min_p."""

    group_size: Count = Field(default=8, description="siblings sampled from one prompt (count)")
    temperature: float = Field(default=1.0, gt=0, description="divides the logits before sampling (no unit)")
    top_k: int = Field(
        default=0, ge=0, lt=2**31, description="draw from so many likeliest tokens (count); 0: from all"
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="of these, from the fewest so probable together (0 to 1)"
    )
    min_p: Share = Field(
        default=0.0, description="of these, from those so probable, relative to the likeliest (0 to 1)"
    )
    max_response_length: Count = Field(description="longest answer; generation stops there (tokens)")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[], description='texts that end an answer and stay in it (list of texts, as ["\\n\\n"])'
    )
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(
        default=[], description="tokens that end an answer, beside the model's own (list of token ids)"
    )


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
    exact: bool = Field(
        default=False,
        description="trainer and engines compute log-probs that are equal to the last bit (true or false)",
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

    adv_estimator: Literal[
        "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
    ] = Field(
        default="grpo",
        description="what rewards are compared with: grpo the group's mean, in deviations; dr_grpo the "
        "group's mean; rloo the siblings'; reinforce_plus_plus the batch's, in deviations; ..._baseline both",
    )
    policy_loss: Literal[
        "ppo_clip", "dual_clip", "triplet_clip", "gspo", "cispo", "reinforce", "online_dpo"
    ] = Field(
        default="ppo_clip",
        description="what a token's probability ratio and advantage make (name); gspo: one ratio per answer; "
        "online_dpo: the best and the worst answer of each group as a pair",
    )
    dpo_beta: float = Field(
        default=0.1, gt=0, description="how strongly online_dpo holds on to the initial policy (per nat)"
    )
    filter_groups: bool = Field(
        default=False, description="leave out groups whose rewards are all equal (true or false)"
    )
    overlong_buffer_tokens: int = Field(
        default=0,
        ge=0,
        description="answers that reach into the last so many of max_response_length lose reward (tokens); "
        "0: none",
    )
    overlong_penalty: float = Field(
        default=1.0, gt=0, description="reward that an answer of max_response_length loses (reward)"
    )
    clip_ratio_low: float = Field(
        default=0.2, ge=0, le=1, description="probability ratio is clipped at 1 - this (no unit)"
    )
    clip_ratio_high: float = Field(
        default=0.2, ge=0, description="probability ratio is clipped at 1 + this (no unit)"
    )
    clip_ratio_c: float = Field(
        default=3.0, gt=1, description="cap of a bad token's ratio; of dual_clip and triplet_clip (no unit)"
    )
    kl_loss_coef: float = Field(
        default=0.0, ge=0, description="weight of the KL to the initial policy (no unit)"
    )
    kl_loss_type: Literal["k1", "k2", "k3", "k1+", "k3+"] = Field(
        default="k3", description="how that KL is estimated; with +: the gradient is k2's"
    )
    entropy_coeff: float = Field(
        default=0.0, ge=0, description="weight of the entropy, which is rewarded (no unit)"
    )
    loss_agg_mode: LossAggMode = Field(
        default="token-mean", description="how token losses become one number, in verl's words"
    )


class Correction(Section):
    """What is done about samples of another policy than the one in training."""

    proximal: Literal["behaviour", "recomputed", "interpolated"] = Field(
        default="behaviour",
        description="what ratios are taken against: the policy that sampled, the trainer's before the step, "
        "or between the two by staleness",
    )
    token: Literal["none", "tis", "icepop"] = Field(
        default="none",
        description="weight of a token, by r = proximal / behaviour; tis: r up to tis_cap; icepop: r, or 0 "
        "out of range",
    )
    sequence: Literal["none", "mis"] = Field(
        default="none", description="mis: an answer whose mean r (geometric) is out of range is left out"
    )
    tis_cap: float = Field(default=2.0, ge=1, description="largest weight of tis (no unit)")
    icepop_low: Share = Field(default=0.5, description="range of icepop, from (no unit)")
    icepop_high: float = Field(default=5.0, ge=1, description="range of icepop, to (no unit)")
    mis_low: Share = Field(default=0.9, description="range of mis, from (no unit)")
    mis_high: float = Field(default=1.1, ge=1, description="range of mis, to (no unit)")
    age_decay: float = Field(
        default=1.0, gt=0, le=1, description="an answer weighs age_decay ** staleness (no unit); 1: all alike"
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
    streaming: bool | None = Field(
        default=None,
        description="sum gradients while a batch fills up (true or false); unset: wherever possible",
    )
    deterministic: bool = Field(
        default=False,
        description="sum gradients in the order of the groups' names, whoever finished first (true or false)",
    )
    save_freq: int = Field(
        default=50,
        ge=0,
        description="steps between two checkpoints, beside the one at the end (count); 0: none",
    )
    keep_last: Count = Field(default=2, description="newest checkpoints that are kept (count)")
    routing_replay: bool = Field(
        default=False,
        description="send tokens to the experts the engine chose; for mixtures of experts (true or false)",
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
        default=256, ge=0, description="prompts, the first ones of path (count); 0: no evaluation"
    )
    path: str | None = Field(
        default=None,
        description='file or folder as data.path, or "gcd" (its held-out pairs); unset: no evaluation',
    )
    split: str | None = Field(
        default=None, min_length=1, description='split of a folder (name, as "test"); unset: its only one'
    )
    seed: int = Field(default=0, ge=0, description="seed of evaluation sampling (integer)")


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
