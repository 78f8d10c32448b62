"""A run, completely described: its sections, what follows from them, and the rules that need several keys.

A run is described by one TOML file, one table per section, and by overrides `section.key=value`.
Unknown keys are refused; paths are relative to the file (those of overrides to the
working directory). Derived values are properties of `Config`, each with its formula.
`dora.settings` reads the file; `dora.sections`, `dora.learning` and `dora.operation` have the keys.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import Field, model_validator

from dora.effects import without_effect
from dora.errors import ConfigError
from dora.fleets import Kind, kinds
from dora.learning import Algorithm, Correction, Critic, Trainer
from dora.operation import Journal, Metrics, Ray, Runtime
from dora.policy import check_policy
from dora.sections import (
    BREAKS_C1,
    Data,
    Engine,
    Env,
    Eval,
    Model,
    Orchestrator,
    Reward,
    Run,
    Sampling,
    Section,
    Task,
    Weights,
)
from dora.serving import Service, check_outside
from dora.trainer import recipe


class Config(Section):
    """A run, completely: sections in the order of a prompt's journey."""

    run: Run
    model: Model
    data: Data
    sampling: Sampling
    engine: Engine = Engine()
    fleet: list[Kind] = Field(default=[])
    env: Env = Env()
    reward: Reward = Reward()
    task: list[Task] = Field(default=[])
    algorithm: Algorithm = Algorithm()
    correction: Correction = Correction()
    critic: Critic = Critic()
    trainer: Trainer
    orchestrator: Orchestrator = Orchestrator()
    weights: Weights = Weights()
    eval: Eval = Eval()
    journal: Journal = Journal()
    metrics: Metrics = Metrics()
    runtime: Runtime = Runtime()
    ray: Ray = Ray()
    service: Service = Service()

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
        rows = sum(kind.num_engines * kind.max_rows for kind in kinds(self))
        return rows + self.trainer.elastic * self.engine.max_rows

    @property
    def version_slots(self) -> int:
        """Versions one engine can hold: engine.version_slots, else as many as are alive."""
        if self.engine.version_slots is not None:
            return self.engine.version_slots
        return min(self.live_versions, 2 + self.evaluates_beside) if self.breaks_c1 else self.live_versions

    @property
    def live_versions(self) -> int:
        """Most versions alive at once: max_staleness + 1, and with eval.every one that is evaluated."""
        return self.orchestrator.max_staleness + 1 + self.evaluates_beside

    @property
    def evaluates_beside(self) -> bool:
        """Whether held-out prompts are answered while the training goes on."""
        return bool(self.eval.path and self.eval.every)

    @property
    def breaks_c1(self) -> bool:
        """Whether answers under way go on with newer versions."""
        return self.orchestrator.update_policy in BREAKS_C1

    @property
    def has_episodes(self) -> bool:
        """Whether answers are written in turns, with somebody else's words in between."""
        return self.env.is_played or self.service.agents

    @property
    def is_static(self) -> bool:
        """Whether requests stay where they are: placement = static, engines on GPUs, or C1 is given up."""
        is_placed = self.orchestrator.placement == "static" or self.engine.device != "cpu"
        return is_placed or self.breaks_c1

    @property
    def context(self) -> int:
        """Longest sequence in tokens: max_prompt_length + max_response_length."""
        return self.data.max_prompt_length + self.sampling.max_response_length

    @property
    def streams(self) -> bool:
        """Whether gradients are summed while a batch fills up: trainer.streaming, else where possible."""
        wanted = self.trainer.streaming
        return self.why_no_streaming is None if wanted is None else wanted

    @property
    def why_no_streaming(self) -> str | None:
        """What gradients have to wait for until the batch is complete; None: nothing."""
        estimator = self.algorithm.adv_estimator
        if recipe.NEEDS[estimator] == "batch":
            return f"algorithm.adv_estimator = {estimator}: its advantages need the whole batch"
        if self.trainer.batch_tokens:
            return "trainer.batch_tokens: how a batch is divided depends on all its lengths"
        if self.trainer.deterministic:
            return "trainer.deterministic = true: the first group of the order may finish last"
        if self.orchestrator.placement == "colocated" or self.trainer.elastic:
            return "a colocated or elastic trainer: it rests until the batch is complete"
        return None

    @model_validator(mode="after")
    def check_identities(self) -> Config:
        """Hold the rules that need several keys. Raises ConfigError with the equation."""
        self._check_rewards()
        self._check_groups()
        for key in ("top_k", "min_p"):
            if getattr(self.sampling, key) == 1:
                raise ConfigError(
                    f"sampling.{key} = 1 leaves one token to draw, so all siblings of a group would be equal "
                    f"and nothing would be learnt; {'raise' if key == 'top_k' else 'lower'} it"
                )
        check_policy(self)
        self._check_fleet()
        self._check_devices()
        self._check_ranks()
        self._check_stations()
        check_outside(self)
        self._check_algorithm()
        if self.trainer.micro_batch_tokens < self.context:
            raise ConfigError(
                f"trainer.micro_batch_tokens = {self.trainer.micro_batch_tokens}: one sample can have "
                f"max_prompt_length + max_response_length = {self.data.max_prompt_length} + "
                f"{self.sampling.max_response_length} = {self.context} tokens and must fit; raise "
                "micro_batch_tokens or lower one of the lengths"
            )
        self._check_effect()
        return self

    def _check_rewards(self) -> None:
        """Raises ConfigError where nothing would tell how good an answer is, or two things would play."""
        if self.env.environment is not None and self.env.hosts:
            raise ConfigError(
                f"env.environment = {self.env.environment!r} with env.hosts = {self.env.hosts}: an episode "
                "is played here or there; remove one of the two"
            )
        if self.env.hosts and self.env.token_file is None:
            raise ConfigError(
                f"env.hosts = {self.env.hosts} without env.token_file: hosts play for those who show their "
                "token; name a copy of the file that `dora environments` names"
            )
        if self.env.is_played and self.service.agents:
            raise ConfigError(
                "service.agents = true with env.environment or env.hosts: an episode has one other side; "
                "remove one of the two"
            )
        names = [task.name for task in self.task]
        for task in self.task:
            if task.name == "reward" or names.count(task.name) > 1:
                raise ConfigError(
                    f"task.name = {task.name!r}: the section [reward] and every [[task]] need names of their "
                    "own; choose another"
                )
            if not task.weight:
                raise ConfigError(f"task.{task.name}.weight = 0: its rewards would change nothing; remove it")
        is_judged = self.reward.function is not None or bool(self.task)
        if not (is_judged or self.env.is_played or self.service.agents):
            raise ConfigError(
                "reward.function: not set, and there are no environments (env.environment) whose rewards "
                "could be trained; add `function = ...` to [reward]"
            )

    def _check_groups(self) -> None:
        """Raises ConfigError for groups in which there is nothing to learn."""
        estimator = self.algorithm.adv_estimator
        if self.sampling.group_size == 1 and estimator not in ("reinforce_plus_plus", "gae"):
            raise ConfigError(
                f"sampling.group_size = 1: with adv_estimator = {estimator} an advantage is "
                "reward - mean(rewards of the group) = 0 in a group of one, so nothing would be learnt; use "
                "group_size >= 2, or adv_estimator = reinforce_plus_plus or gae"
            )
        if self.sampling.group_size == 1 and self.algorithm.filter_groups:
            raise ConfigError(
                "algorithm.filter_groups = true: in a group of one all rewards are equal, so every group "
                "would be left out; remove it or use sampling.group_size >= 2"
            )
        if self.algorithm.filter_groups and estimator == "gae":
            raise ConfigError(
                "algorithm.filter_groups = true with adv_estimator = gae: equal rewards teach as much as "
                "others, being compared with a critic's values and not with each other; remove it"
            )

    def _check_fleet(self) -> None:
        """Raises ConfigError where two kinds of engines have one name."""
        names = [kind.name for kind in self.fleet]
        for name in (name for name in names if names.count(name) > 1):
            raise ConfigError(f"fleet.name = {name!r}: every [[fleet]] needs its own; choose another")

    def _check_devices(self) -> None:
        """Raises ConfigError for what cannot be computed, or not shared, on the devices named."""
        engine, trainer, placement = self.engine, self.trainer, self.orchestrator.placement
        where = f"engine.device = {engine.device!r}"
        if engine.exact and {engine.device, trainer.device} != {"cpu"}:
            raise ConfigError(
                f"engine.exact = true with {where}, trainer.device = {trainer.device!r}: equal bits are for "
                "the CPU; remove engine.exact, or set both devices to cpu"
            )
        if engine.device != "cpu" and engine.kernels != "auto":
            raise ConfigError(f"engine.kernels = {engine.kernels} with {where}: they are for CPUs; remove it")
        if engine.kernels == "numba" and engine.dtype != "float32":
            raise ConfigError(
                f"engine.kernels = numba with engine.dtype = {engine.dtype}: they compute in float32 only; "
                "remove one of the two"
            )
        if engine.device != "cpu" and placement == "dynamic":
            raise ConfigError(
                f"orchestrator.placement = dynamic with {where}: requests move between engines on the CPU "
                "only; set orchestrator.placement = static, or colocated for one device with the trainer"
            )
        shares_it = "placement = colocated" if placement == "colocated" else "trainer.elastic = true"
        kinds = {device.partition(":")[0] for device in (engine.device, trainer.device)}
        is_apart = len(kinds) > 1 or (placement == "colocated" and engine.device != trainer.device)
        if is_apart and (placement == "colocated" or trainer.elastic):
            raise ConfigError(
                f"{where}, trainer.device = {trainer.device!r}: with {shares_it} an engine computes on the "
                "trainer's device; set them alike"
            )

    def _check_stations(self) -> None:
        """Raises ConfigError for log-probs that would be of other weights than the trainer's."""
        dtypes = self.engine.dtype, self.trainer.dtype
        if "proximal" in self.trainer.stations and dtypes == ("bfloat16", "float32"):
            raise ConfigError(
                "trainer.stations names proximal, with engine.dtype = bfloat16 and trainer.dtype = float32: "
                "published weights are rounded, and log-probs before a step would not be of those that are "
                "stepped; set trainer.dtype = bfloat16, or remove proximal"
            )

    def _check_ranks(self) -> None:
        """Raises ConfigError for what several processes of one trainer cannot do."""
        where, most = f"trainer.num_ranks = {self.trainer.num_ranks}", self.samples_per_step
        alone = {
            "engine.exact = true: its log-probs need the whole weights": self.engine.exact,
            "trainer.lora_rank: adapters are not shared": self.trainer.lora_rank > 0,
            "algorithm.adv_estimator = gae: the critic is not shared": self.algorithm.adv_estimator == "gae",
        }
        for why in (why for why, is_set in alone.items() if is_set and self.trainer.num_ranks > 1):
            raise ConfigError(f"{where} with {why}; remove one of the two")
        of_dora = {
            "trainer.num_ranks > 1": self.trainer.num_ranks > 1,
            "trainer.lora_rank": self.trainer.lora_rank > 0,
            "engine.exact = true": self.engine.exact,
            "algorithm.adv_estimator = gae": self.algorithm.adv_estimator == "gae",
            "trainer.stations": bool(self.trainer.stations),
        }
        for what in (what for what, is_set in of_dora.items() if is_set and self.trainer.adapter):
            raise ConfigError(
                f"trainer.adapter = {self.trainer.adapter!r} with {what}: only DORA's own trainer can; "
                "remove one of the two"
            )
        if self.trainer.num_ranks > most:
            raise ConfigError(f"{where}: a step has batch_size * group_size = {most} samples; lower it")

    def _check_algorithm(self) -> None:
        """Raises ConfigError for an objective that is unsafe, or cannot be had."""
        algorithm, longest = self.algorithm, self.sampling.max_response_length
        correction = recipe.Correction(**self.correction.model_dump())
        recipe.check_recipe(
            algorithm.policy_loss, algorithm.loss_agg_mode, correction, self.orchestrator.max_staleness
        )
        if algorithm.overlong_buffer_tokens > longest:
            raise ConfigError(
                f"algorithm.overlong_buffer_tokens = {algorithm.overlong_buffer_tokens}: it is the end of "
                f"sampling.max_response_length = {longest}; lower it"
            )
        needed = 2 * self.context
        if recipe.TRAITS[algorithm.policy_loss].unit == "pair" and self.trainer.micro_batch_tokens < needed:
            raise ConfigError(
                f"trainer.micro_batch_tokens = {self.trainer.micro_batch_tokens}: with policy_loss = "
                f"{algorithm.policy_loss} it must hold a pair of answers, 2 * {self.context} = {needed} "
                "tokens; raise it"
            )
        self._check_token_budget()
        if self.trainer.streaming and self.why_no_streaming is not None:
            raise ConfigError(f"trainer.streaming = true with {self.why_no_streaming}; remove one of the two")

    def _check_token_budget(self) -> None:
        """Raises ConfigError for a trainer.batch_tokens that no batch can be divided by."""
        budget, mode = self.trainer.batch_tokens, self.algorithm.loss_agg_mode
        if budget is None:
            return
        if mode != "token-mean":
            raise ConfigError(
                f"trainer.batch_tokens = {budget} with algorithm.loss_agg_mode = {mode}: updates of as many "
                "tokens, each of equal weight, are what token-mean means; use it or remove batch_tokens"
            )
        longest = self.sampling.max_response_length
        most = self.samples_per_step * longest
        if not longest <= budget <= most:
            raise ConfigError(
                f"trainer.batch_tokens = {budget}: an update has one answer of up to "
                f"sampling.max_response_length = {longest} tokens at least, and all "
                f"{self.samples_per_step} of a batch, {most} tokens, at most; choose a number between the two"
            )

    def _check_effect(self) -> None:
        """Raises ConfigError for keys that were set and change nothing."""
        for section, whys in without_effect(self).items():
            if not whys:
                continue
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
        exclude: dict[str, Any] = {section: {*keys} for section, keys in without_effect(self).items()}
        if not self.eval.path:
            exclude["eval"] = True
        for section, given in self.model_dump(exclude_none=True, exclude=exclude, by_alias=True).items():
            head = f"[[{section}]]" if isinstance(given, list) else f"[{section}]"
            for values in filter(None, given if isinstance(given, list) else [given]):
                tables.append("\n".join([head, *(assignment(k, v) for k, v in values.items())]))
        return "\n\n".join(tables) + "\n"

    def digest(self) -> str:
        """Digest (32 hex digits) of `to_toml()`: equal for equal runs."""
        return hashlib.blake2b(self.to_toml().encode(), digest_size=16).hexdigest()


def assignment(key: str, value: Any) -> str:
    """One line of TOML."""
    return f"{key} = {_toml(value)}"


def _toml(value: Any) -> str:
    """JSON writes all but tables as TOML does."""
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key, ensure_ascii=False)} = {_toml(v)}" for key, v in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
