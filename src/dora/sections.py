"""The settings of each part of a run: name, meaning, unit, default and what one value alone may be.

Those of what is learnt are in `dora.learning`, those of where it all runs and who watches in
`dora.operation`; rules that need several keys are `dora.config`'s.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from dora.errors import ConfigError

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Duration = Annotated[str, Field(pattern=r"^\d+(\.\d+)?(us|ms|s)$")]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]

DEFAULT_STALENESS = {"dora": 2, "sync": 0, "one_step": 1, "drain": 1, "partial": 2, "inflight": 2}
FIXED_STALENESS = {"sync": 0, "one_step": 1}
BREAKS_C1 = ("partial", "inflight")
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
        description='.jsonl or .parquet file, folder that the library datasets reads, the built-in "gcd", or '
        '"service": prompts are put through `dora serve`'
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
    max_turn_length: int = Field(
        default=0, ge=0, description="longest turn of an episode (tokens); 0: as long as the answer may be"
    )


class Engine(Section):
    """The rollout engines."""

    num_engines: Count = Field(default=2, description="rollout processes (count)")
    max_rows: Count = Field(default=32, description="requests one engine decodes at once (count)")
    kv_blocks: Count | None = Field(
        default=None,
        description="KV of one engine (blocks of 16 tokens); unset: as many as max_rows of full length take",
    )
    version_slots: Count | None = Field(
        default=None,
        description="versions one engine can hold (count); unset: max_staleness + 1, and 1 with eval.every",
    )
    device: Device = Field(
        default="cpu",
        description='where engines compute; "cpu", "cuda": one GPU each, beside the trainer\'s, "cuda:N": '
        "all there (name)",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of weights and KV in engines, and of published versions (name)"
    )
    kernels: Literal["auto", "numba", "eager"] = Field(
        default="auto",
        description="how engines compute; numba: compiled, eager: plain torch, auto: compiled where possible",
    )
    adapter: str | None = Field(
        default=None,
        description='another inference engine: "vllm", "vllm-lora", "sglang", or its class as '
        '"file.py:Class" or "package.module:Class"; unset: DORA\'s own',
    )
    options: dict[str, JsonValue] | None = Field(
        default=None, description="what an adapter's class is made with beside the model (table)"
    )
    exact: bool = Field(
        default=False,
        description="trainer and engines compute log-probs that are equal to the last bit (true or false)",
    )
    tail_interval: Count = Field(
        default=1,
        description="old versions with at most a quarter of an engine's rows decode only in every so many-th "
        "step, unless they are max_staleness versions old (steps); 1: in all; not with adaptive staleness",
    )
    pace: Duration = Field(
        default="0ms", description="pad each decode step to this time, like an accelerator's (duration)"
    )

    @property
    def pace_s(self) -> float:
        """`pace` in seconds."""
        number, unit = re.findall(r"[\d.]+|[a-z]+", self.pace)
        return float(number) * _SECONDS[unit]


class Env(Section):
    """The other side of episodes of several turns; without it, every answer is one turn."""

    environment: str | None = Field(
        default=None, description='class of the environments, "file.py:Class" or "package.module:Class"'
    )
    hosts: list[Annotated[str, Field(pattern=r"^[^:/]+:\d+$")]] = Field(
        default=[],
        description='or where they are, see `dora environments` (list, as ["name:port"])',
    )
    token_file: str | None = Field(
        default=None, description="file with the token of hosts, as their --token-file (path)"
    )
    num_workers: Count = Field(default=1, description="processes that they are played in (count)")
    max_turns: Count = Field(default=8, description="turns of an episode, at most (count)")
    timeout_s: float = Field(default=10.0, gt=0, description="longest that a reset or a step may take (s)")

    @property
    def is_played(self) -> bool:
        """Whether there are environments."""
        return self.environment is not None or bool(self.hosts)


class Reward(Section):
    """How answers are judged."""

    function: str | None = Field(
        default=None,
        description='"file.py:function", "package.module:function", or "service": rewards come through '
        "`dora serve`; unset: episodes have the rewards of their environments",
    )
    timeout_s: float = Field(
        default=10.0,
        gt=0,
        description="longest a single call may take, or a group waits for rewards from outside (s)",
    )
    num_workers: Count = Field(default=1, description="processes that judge, each a group at a time (count)")
    max_failed_share: Share = Field(
        default=0.2, description="share of failed groups, of at least 20, past which the run stops (0 to 1)"
    )


class Task(Section):
    """One reward task more; each has a table [[task]] of its own, and processes of its own."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")] = Field(
        description='what it is called in errors (name, as "brevity")'
    )
    factory: str = Field(
        alias="class",
        description='class or function, "file.py:Class" or "package.module:Class"; "service": as in [reward]',
    )
    options: dict[str, JsonValue] = Field(
        default={}, description="what the class is made with (table); a file or folder called path is found"
    )
    weight: float = Field(
        default=1.0, description="how often its reward counts; that of [reward] counts once"
    )
    num_workers: Count = Field(default=1, description="processes that judge (count)")
    micro_batch_rows: Count | None = Field(
        default=None,
        description="answers judged at once, in whole groups (count); unset: as many as micro_batch_tokens "
        "allows, and one group without it",
    )
    micro_batch_tokens: Count | None = Field(
        default=None, description="prompt and answer tokens of those, at most (tokens); unset: any number"
    )
    timeout_s: float = Field(default=10.0, gt=0, description="as in [reward] (s)")


class Orchestrator(Section):
    """Who may run ahead, and how far; who runs where."""

    update_policy: Literal["dora", "sync", "one_step", "drain", "partial", "inflight"] = Field(
        default="dora",
        description="dora: several versions generate at once; sync, one_step and drain have one live version "
        "at a time: sync generates, then trains; one_step trains the batch before; drain: "
        "batches_per_version; partial and inflight finish answers with newer weights, which breaks C1: "
        "partial computes their KV again, inflight keeps it",
    )
    max_staleness: int = Field(
        default=DEFAULT_STALENESS["dora"],
        ge=0,
        description="oldest sample trained (versions); unset: 2, with drain 1; sync is 0, one_step is 1",
    )
    staleness: Literal["fixed", "adaptive"] = Field(
        default="fixed",
        description="bound for groups admitted now; fixed: max_staleness; adaptive: 0 to max_staleness, by "
        "the ESS and the KL of the batches trained",
    )
    min_ess: float = Field(
        default=0.9,
        gt=0,
        lt=1,
        description="mean effective sample size of batches below which the bound is lowered (share of "
        "tokens); with adaptive only",
    )
    max_kl: float = Field(
        default=0.01,
        gt=0,
        description="mean KL from the policies that sampled, above which the bound is lowered (nats per "
        "token); with adaptive only",
    )
    staleness_window: Count = Field(
        default=8,
        description="batches that are judged together (count); the bound rises by 1 after as many with less "
        "than half of both losses; with adaptive only",
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
        description="engines take every so many-th version, unless the bound asks (versions); with dora, "
        "partial and inflight",
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


class Weights(Section):
    """How new versions come to the engines."""

    load: Literal["eager", "deferred"] = Field(
        default="eager",
        description="eager: every engine as soon as it can; deferred: one after another, each once it has a "
        "free row or the bound asks, from a copy in host memory; of many engines a quarter at a time",
    )
    skip_below_kl: float | None = Field(
        default=None,
        gt=0,
        description="engines leave out a version that is nearer to theirs by the KL of the samples trained, "
        "unless the bound asks (nats per token); unset: none; with dora, "
        "partial and inflight",
    )


class Eval(Section):
    """Held-out prompts, answered before and after training, and beside it."""

    every: int = Field(
        default=0,
        ge=0,
        description="evaluate every so many-th version beside the training (steps); 0: only before and after",
    )
    greedy: bool = Field(default=True, description="answer each prompt greedily, once (true or false)")
    num_samples: int = Field(
        default=1, ge=0, description="answers to each prompt that are sampled as in training (count)"
    )
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

    @model_validator(mode="after")
    def check_effect(self) -> Eval:
        """Raises ConfigError where no prompt would be answered, or none is there to be."""
        named = self.model_fields_set - {"path"}
        if self.path is None and self.num_prompts and named:
            raise ConfigError(
                f"eval.{min(named)} is set and eval.path is not, so nothing is evaluated; "
                "set eval.path, or eval.num_prompts = 0"
            )
        if not self.greedy and not self.num_samples:
            raise ConfigError(
                "eval.greedy = false with eval.num_samples = 0: no prompt would be answered; set one of the "
                "two, or eval.num_prompts = 0 for no evaluation"
            )
        return self
