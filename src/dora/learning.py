"""The settings of what is learnt and how: the sections algorithm, correction, critic and trainer.

As in `dora.sections`: name, meaning, unit, default and what one value alone may be.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from dora.sections import Count, Device, Section, Share

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
TrainerStation = Literal["reference", "proximal", "critic"]
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Algorithm(Section):
    """The objective."""

    adv_estimator: Literal[
        "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"
    ] = Field(
        default="grpo",
        description="what rewards are compared with: grpo the group's mean, in deviations; dr_grpo the "
        "group's mean; rloo the siblings'; reinforce_plus_plus the batch's, in deviations; ..._baseline "
        "both; gae the values of a critic, token by token",
    )
    gamma: float = Field(
        default=1.0, gt=0, le=1, description="what a token later counts, for gae (per token)"
    )
    lam: Share = Field(
        default=1.0,
        description="how far gae looks: 1 to the reward at the end, 0 to the next token's value (no unit)",
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


class Critic(Section):
    """The critic of adv_estimator = gae: a decoder that says of every token what reward is to come."""

    path: str | None = Field(
        default=None,
        description="folder as model.path that the critic begins with, its values at 0; unset: model.path",
    )
    lr: float = Field(default=1e-5, gt=0, description="peak learning rate of the critic's AdamW (per step)")
    warmup_steps: int = Field(default=0, ge=0, description="steps of its linear warm-up (count)")
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="its gradients are scaled down to this norm (no unit)"
    )
    ppo_epochs: Count = Field(default=1, description="how often it learns from each batch (count)")
    cliprange_value: float = Field(
        default=0.5,
        gt=0,
        description="how far a value may move in one step before it stops learning (reward)",
    )


class Trainer(Section):
    """The optimizer and its batch."""

    batch_size: Count = Field(description="groups per training step (count)")
    batch_tokens: Count | None = Field(
        default=None,
        description="answer tokens of one update of the weights; a batch is divided into as many updates as "
        "come near that (tokens); unset: one update",
    )
    device: Device = Field(
        default="cpu",
        description='where it computes; "cpu", "cuda": the last GPUs, "cuda:N": from there (name)',
    )
    adapter: str | None = Field(
        default=None,
        description='class of another training engine, "file.py:Class" or "package.module:Class"; unset: '
        "DORA's own",
    )
    num_ranks: Count = Field(
        default=1,
        description="processes that share model and micro-batches, each on a device of its own (count)",
    )
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
        default=4096, description="most tokens of one forward and backward, prompts and answers (tokens)"
    )
    logits_chunk_tokens: Count = Field(
        default=256, description="answer tokens whose logits exist at a time (tokens)"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="what forward and backward compute in (name); weights are stepped in float32",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="keep a layer's input alone and compute it once more on the way back (true or false)",
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
    lora_rank: int = Field(
        default=0, ge=0, description="train adapters of this rank instead of the weights (count); 0: weights"
    )
    lora_alpha: float = Field(
        default=32.0, gt=0, description="adapters count alpha / rank times (no unit); with lora_rank"
    )
    lora_targets: Annotated[list[LoraTarget], Field(min_length=1)] = Field(
        default=[*get_args(LoraTarget)],
        description="matrices that have adapters (list of names); with lora_rank",
    )
    routing_replay: bool = Field(
        default=False,
        description="send tokens to the experts the engine chose; for mixtures of experts (true or false)",
    )
    stations: list[TrainerStation] = Field(
        default=[],
        description="what is computed beside the trainer, each by a process of its own (list of names); "
        "reference: log-probs of the initial policy, proximal: those before the step, critic: values, and "
        "what it learns",
    )
    station_device: Device | None = Field(
        default=None,
        description='where stations compute; "cpu", "cuda", "cuda:N" (name); unset: where the trainer does',
    )
    elastic: bool = Field(
        default=False, description="lend the trainer as one more engine while it rests (true or false)"
    )
