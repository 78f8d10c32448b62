"""Every setting of a run: its name, meaning, unit, default and the rules it must keep.

A run is described by one TOML file, one table per section below, and by overrides
`section.key=value`. Unknown keys are refused; paths are relative to the file. Derived
values are properties of `Config`, each with its formula. `dora.settings` reads the file.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dora.errors import ConfigError

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


class Config(Section):
    """A run, completely: sections in the order of a prompt's journey."""

    run: Run
    model: Model
    data: Data
    sampling: Sampling
    engine: Engine = Engine()
    reward: Reward
    algorithm: Algorithm = Algorithm()
    trainer: Trainer
    orchestrator: Orchestrator = Orchestrator()
    eval: Eval = Eval()
    journal: Journal = Journal()
    runtime: Runtime = Runtime()

    @property
    def samples_per_step(self) -> int:
        """batch_size * group_size."""
        return self.trainer.batch_size * self.sampling.group_size

    @property
    def window(self) -> int:
        """Most groups admitted and not yet trained: (max_staleness + 1) * batch_size - slack."""
        return (self.orchestrator.max_staleness + 1) * self.trainer.batch_size - self.orchestrator.slack

    @property
    def total_rows(self) -> int:
        """Requests that decode at once: num_engines * max_rows; one engine more with an elastic trainer."""
        return (self.engine.num_engines + self.trainer.elastic) * self.engine.max_rows

    @property
    def version_slots(self) -> int:
        """Versions one engine can hold: engine.version_slots, else max_staleness + 1."""
        return self.engine.version_slots or self.orchestrator.max_staleness + 1

    @property
    def context(self) -> int:
        """Longest sequence in tokens: max_prompt_length + max_response_length."""
        return self.data.max_prompt_length + self.sampling.max_response_length

    @model_validator(mode="after")
    def check_identities(self) -> Config:
        """Hold the rules that need several keys. Raises ConfigError with the equation."""
        if self.sampling.group_size < 2:
            raise ConfigError(
                "sampling.group_size = 1: with adv_estimator = grpo an advantage is reward - mean(rewards of "
                "the group) = 0 in a group of one, so nothing would be learnt; use group_size >= 2"
            )
        self._check_orchestrator()
        if self.trainer.micro_batch_tokens < self.context:
            raise ConfigError(
                f"trainer.micro_batch_tokens = {self.trainer.micro_batch_tokens}: one sample can have "
                f"max_prompt_length + max_response_length = {self.data.max_prompt_length} + "
                f"{self.sampling.max_response_length} = {self.context} tokens and must fit; raise "
                "micro_batch_tokens or lower one of the lengths"
            )
        self._check_effect()
        return self

    def _check_orchestrator(self) -> None:
        """Raises ConfigError for what the update policy or the bound does not allow."""
        o, slots = self.orchestrator, self.engine.version_slots
        staleness, policy = o.max_staleness, o.update_policy
        fixed = FIXED_STALENESS.get(policy)
        if fixed not in (None, staleness):
            meaning = "only on-policy samples" if policy == "sync" else "each batch one step late"
            raise ConfigError(
                f"orchestrator.max_staleness = {staleness}: update_policy = {policy} trains {meaning}, "
                f"max_staleness = {fixed}; remove max_staleness or use update_policy = dora"
            )
        if o.batches_per_version > staleness + 1:
            raise ConfigError(
                f"orchestrator.batches_per_version = {o.batches_per_version}: a version may be trained by at "
                f"most max_staleness + 1 = {staleness} + 1 batches; lower it or raise max_staleness"
            )
        if o.slack > (most := staleness * self.trainer.batch_size):
            raise ConfigError(
                f"orchestrator.slack = {o.slack}: it must leave one whole batch, so it is at most "
                f"max_staleness * batch_size = {staleness} * {self.trainer.batch_size} = {most}; lower it"
            )
        if o.load_interval > staleness + 1:
            raise ConfigError(
                f"orchestrator.load_interval = {o.load_interval}: a version can be used for at most "
                f"max_staleness + 1 = {staleness} + 1 steps; lower it or raise max_staleness"
            )
        if slots is not None and slots > staleness + 1:
            raise ConfigError(
                f"engine.version_slots = {slots}: at most max_staleness + 1 = {staleness} + 1 versions are "
                "alive at once, more slots have no effect; lower version_slots or remove it"
            )
        if self.trainer.elastic and o.placement == "colocated":
            raise ConfigError(
                "trainer.elastic = true: with orchestrator.placement = colocated every engine already shares "
                "the trainer's device; remove one of the two"
            )

    def _without_effect(self) -> dict[str, dict[str, str]]:
        """Section -> key -> why it changes nothing in this configuration."""
        found: dict[str, dict[str, str]] = {section: {} for section in type(self).model_fields}
        policy = self.orchestrator.update_policy
        if policy != "drain":
            found["orchestrator"]["batches_per_version"] = "without update_policy = drain"
        if policy != "dora":
            found["orchestrator"]["load_interval"] = f"with update_policy = {policy}: one version is live"
        if self.orchestrator.placement == "static":
            why = "with orchestrator.placement = static, for nothing is moved"
            moving = ("level_running", "rebalance_interval_s", "kv_watermark")
            found["orchestrator"] |= dict.fromkeys(moving, why)
            found["runtime"]["move_timeout_s"] = why
        if self.data.source == "gcd":
            found["data"]["prompt_key"] = "with data.source = gcd"
        return found

    def _check_effect(self) -> None:
        """Raises ConfigError for keys that were set and change nothing."""
        named = self.eval.model_fields_set - {"source"}
        if self.eval.source is None and self.eval.num_prompts and named:
            raise ConfigError(
                f"eval.{min(named)} is set and eval.source is not, so nothing is evaluated; "
                "set eval.source, or eval.num_prompts = 0"
            )
        for section, whys in self._without_effect().items():
            for key in sorted(getattr(self, section).model_fields_set & whys.keys()):
                raise ConfigError(f"{section}.{key} has no effect {whys[key]}; remove it")

    def check_context(self, max_position_embeddings: int) -> None:
        """Raises ConfigError if the model has fewer positions than the longest sequence."""
        if self.context > max_position_embeddings:
            raise ConfigError(
                f"data.max_prompt_length + sampling.max_response_length = {self.data.max_prompt_length} + "
                f"{self.sampling.max_response_length} = {self.context} tokens, but the model has "
                f"max_position_embeddings = {max_position_embeddings}; lower one of the lengths"
            )

    def to_toml(self) -> str:
        """The complete configuration as TOML, without keys that are unset or have no effect."""
        tables = []
        exclude: dict[str, Any] = {section: {*keys} for section, keys in self._without_effect().items()}
        if not self.eval.source:
            exclude["eval"] = True
        for section, values in self.model_dump(exclude_none=True, exclude=exclude).items():
            tables.append("\n".join([f"[{section}]", *(assignment(k, v) for k, v in values.items())]))
        return "\n\n".join(tables) + "\n"

    def digest(self) -> str:
        """Digest (32 hex digits) of `to_toml()`: equal for equal runs."""
        return hashlib.blake2b(self.to_toml().encode(), digest_size=16).hexdigest()


def assignment(key: str, value: str | bool | int | float) -> str:
    """One line of TOML; JSON writes these four types as TOML does."""
    return f"{key} = {json.dumps(value, ensure_ascii=False)}"
