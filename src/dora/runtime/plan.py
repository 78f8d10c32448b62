"""A run as its processes need it: everything the configuration names, loaded and checked.

Nothing has been started and nothing written when a plan is made, so bad input costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

from dora.config import Config
from dora.core.records import GroupId, Limits, RequestId
from dora.data import gcd
from dora.data.chat import ChatTemplate, PromptEncoder
from dora.data.dataset import Cursor, Dataset
from dora.data.tokenizer import Tokenizer
from dora.engine.blocks import BLOCK_SIZE, num_blocks_for
from dora.engine.rows import MAX_STOP_IDS
from dora.engine.sequence import Request, Sampling
from dora.errors import ConfigError, ModelError
from dora.model.config import ModelConfig
from dora.model.folder import check_folder, load_config
from dora.runtime import trackers
from dora.runtime.messages import EngineSpec, RewarderSpec, TrainerSpec
from dora.trainer.recipe import Correction
from dora.trainer.scoring import Scoring
from dora.trainer.trainer import TrainerSettings

EVALUATION = -1  # the epoch of evaluation requests, which are not groups and reach no journal
GREEDY, SAMPLED = 0, 1  # their siblings


@dataclass(frozen=True)
class Plan:
    """What a run will do. Token ids of prompts are made when they are first needed."""

    config: Config
    out: Path
    model: ModelConfig
    num_parameters: int
    tokenizer: Tokenizer
    prompts: PromptEncoder
    dataset: Dataset
    held_out: Dataset | None

    @classmethod
    def make(cls, config: Config, out: Path) -> Plan:
        """Load and check what the configuration names. Raises InputError."""
        folder = Path(config.model.path)
        model = load_config(folder)
        tokenizer = Tokenizer(folder)
        _check_tokenizer(folder, tokenizer, model)
        _check_fit(config, tokenizer, model)
        trackers.check(config.metrics.report_to)
        numel = check_folder(folder)
        prompts = PromptEncoder(tokenizer, _template(config))
        plan = cls(config, out, model, numel, tokenizer, prompts, _dataset(config), _held_out(config))
        for dataset in filter(None, (plan.dataset, plan.held_out)):
            dataset.check_prompt_lengths(
                lambda prompt: len(prompts.encode(prompt)), config.data.max_prompt_length
            )
        return plan

    @cached_property
    def limits(self) -> Limits:
        """What the orchestrator must keep."""
        config = self.config
        rules = config.orchestrator
        batches_per_version = {"dora": None, "sync": 1, "one_step": 1, "drain": rules.batches_per_version}
        return Limits(
            num_steps=config.run.steps,
            batch_size=config.trainer.batch_size,
            group_size=config.sampling.group_size,
            max_staleness=rules.max_staleness,
            filter_groups=config.algorithm.filter_groups,
            batches_per_version=batches_per_version[rules.update_policy],
            slack=rules.slack,
            load_interval=rules.load_interval,
            is_static=rules.placement == "static",
            level_running=rules.level_running,
            rush=rules.rush,
            rebalance_interval_s=rules.rebalance_interval_s,
            kv_watermark=rules.kv_watermark,
        )

    @property
    def scoring(self) -> Scoring:
        """How rewards become advantages."""
        algorithm = self.config.algorithm
        return Scoring(
            algorithm.adv_estimator,
            self.config.sampling.max_response_length,
            algorithm.overlong_buffer_tokens,
            algorithm.overlong_penalty,
            is_paired=algorithm.policy_loss == "online_dpo",
        )

    @property
    def num_engines(self) -> int:
        """Engine processes at the start; the last one is the trainer's, if it is elastic."""
        return self.config.engine.num_engines + self.config.trainer.elastic

    def is_colocated(self, engine: int) -> bool:
        """Whether an engine shares its device with the trainer, and so rests while that one works."""
        is_lent = self.config.trainer.elastic and engine == self.config.engine.num_engines
        return is_lent or self.config.orchestrator.placement == "colocated"

    @property
    def weights_bytes(self) -> int:
        """Most bytes the weight store holds: every pinned version, the newest and one being written."""
        return 4 * self.num_parameters * (self.config.orchestrator.max_staleness + 3)

    @property
    def pool_bytes(self) -> int:
        """The KV of one engine: blocks for all its rows at full context, and one more per row."""
        blocks = self.config.engine.max_rows * (num_blocks_for(self.config.context) + 1)
        return blocks * BLOCK_SIZE * self.model.kv_bytes_per_token

    @property
    def stored_bytes(self) -> int:
        """What the run keeps in memory that its processes share."""
        return self.weights_bytes + self.num_engines * self.pool_bytes

    def cursor(self, index: int = 0) -> Cursor:
        """A walk over the dataset, from its beginning or from a later group on."""
        return Cursor(len(self.dataset), self.config.run.seed, self.config.data.shuffle, index)

    def source_of(self, group: GroupId) -> Dataset:
        """The dataset a group's row is in."""
        if group.epoch != EVALUATION:
            return self.dataset
        assert self.held_out is not None
        return self.held_out

    def requests(self, ids: Sequence[RequestId], version: int) -> list[Request]:
        """The requests an engine gets: prompt tokens, seed and sampling of each sibling."""
        return [
            Request(
                id=request,
                group=request.group,
                prompt_ids=tuple(self.prompt_ids(request.group)),
                version=version,
                seed=self._seed(request),
                sampling=self.sampling_of(request),
            )
            for request in ids
        ]

    def prompt_ids(self, group: GroupId) -> list[int]:
        """Token ids of a group's prompt."""
        return self.prompts.encode(self.source_of(group).prompt(group.row))

    def _seed(self, request: RequestId) -> int:
        """64 bits that depend on the run's seed and on the request alone; evaluation has its own seed."""
        is_evaluation = request.epoch == EVALUATION
        seed = self.config.eval.seed if is_evaluation else self.config.run.seed
        digest = blake2b(f"{seed}/{request}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def sampling_of(self, request: RequestId) -> Sampling:
        """How a request's tokens are drawn, and when its answer ends."""
        is_greedy = request.epoch == EVALUATION and request.sibling == GREEDY
        settings = self.config.sampling
        return Sampling(
            temperature=0.0 if is_greedy else settings.temperature,
            max_tokens=settings.max_response_length,
            stop_ids=(*self.tokenizer.stop_ids, *settings.stop_token_ids),
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            stop_strings=tuple(settings.stop),
        )

    def engine_spec(self, weights: Path, engine: int) -> EngineSpec:
        """Its KV lies beside the weights, where the other engines can map it."""
        config = self.config
        return EngineSpec(
            model=Path(config.model.path),
            weights=weights,
            pool=weights / f"pool-{engine}.kv",
            max_rows=config.engine.max_rows,
            max_context=config.context,
            version_slots=config.version_slots,
            kernels=config.engine.kernels,
            pace_s=config.engine.pace_s,
            tail_interval=config.engine.tail_interval,
            max_staleness=config.orchestrator.max_staleness,
            reads_text=bool(config.sampling.stop),
            returns_routes=config.trainer.routing_replay,
            exact=config.engine.exact,
        )

    def trainer_spec(self, weights: Path, stream: Path, checkpoint: Path | None = None) -> TrainerSpec:
        config = self.config
        settings = TrainerSettings(
            lr=config.trainer.lr,
            num_steps=config.run.steps,
            warmup_steps=config.trainer.warmup_steps,
            lr_decay=config.trainer.lr_decay,
            weight_decay=config.trainer.weight_decay,
            max_grad_norm=config.trainer.max_grad_norm,
            clip_ratio_low=config.algorithm.clip_ratio_low,
            clip_ratio_high=config.algorithm.clip_ratio_high,
            clip_ratio_c=config.algorithm.clip_ratio_c,
            dpo_beta=config.algorithm.dpo_beta,
            policy_loss=config.algorithm.policy_loss,
            correction=Correction(**config.correction.model_dump()),
            kl_loss_coef=config.algorithm.kl_loss_coef,
            kl_loss_type=config.algorithm.kl_loss_type,
            entropy_coeff=config.algorithm.entropy_coeff,
            loss_agg_mode=config.algorithm.loss_agg_mode,
            loss_scale_factor=config.sampling.max_response_length,
            micro_batch_tokens=config.trainer.micro_batch_tokens,
            temperature=config.sampling.temperature,
        )
        return TrainerSpec(
            model=Path(config.model.path),
            weights=weights,
            stream=stream,
            settings=settings,
            scoring=self.scoring,
            streams=config.streams,
            max_staleness=config.orchestrator.max_staleness,
            exact=self.engine_spec(weights, engine=0) if config.engine.exact else None,
            checkpoint=checkpoint,
        )

    def rewarder_spec(self) -> RewarderSpec:
        return RewarderSpec(self.config.reward.function, Path(self.config.model.path))


def _check_tokenizer(folder: Path, tokenizer: Tokenizer, model: ModelConfig) -> None:
    """Raises ModelError where tokenizer and model do not fit."""
    if tokenizer.vocab_size > model.vocab_size:
        raise ModelError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the model's vocab_size is "
            f"{model.vocab_size}; use the tokenizer the model was made with"
        )
    if len(tokenizer.stop_ids) > MAX_STOP_IDS:
        raise ModelError(
            f"{folder}: {len(tokenizer.stop_ids)} end tokens; engines know at most {MAX_STOP_IDS}; "
            "shorten eos_token_id in generation_config.json"
        )


def _check_fit(config: Config, tokenizer: Tokenizer, model: ModelConfig) -> None:
    """Raises ConfigError for settings that this model cannot follow."""
    config.check_context(model.max_position_embeddings)
    stop_ids, num_own = config.sampling.stop_token_ids, len(tokenizer.stop_ids)
    unknown = [i for i in stop_ids if i >= model.vocab_size]
    if unknown:
        raise ConfigError(
            f"sampling.stop_token_ids = {stop_ids}: {unknown[0]} is no token, the model's vocab_size is "
            f"{model.vocab_size}; remove it"
        )
    if num_own + len(stop_ids) > MAX_STOP_IDS:
        raise ConfigError(
            f"sampling.stop_token_ids = {stop_ids}: with the model's {num_own} end tokens they are "
            f"{num_own + len(stop_ids)}; engines know at most {MAX_STOP_IDS}; name fewer"
        )
    if config.trainer.routing_replay and not model.mixture_layers:
        raise ConfigError(
            f"trainer.routing_replay = true: no layer of this {model.model_type} model is a mixture of "
            "experts, so there are no routes to replay; remove it"
        )


def _template(config: Config) -> ChatTemplate | None:
    if not config.data.chat_template:
        return None
    return ChatTemplate(Path(config.model.path), config.data.system_prompt)


def _dataset(config: Config) -> Dataset:
    if config.data.path == "gcd":
        return Dataset(gcd.training_rows(), "prompt", "the built-in task gcd")
    return Dataset.from_path(Path(config.data.path), config.data.prompt_key, config.data.split)


def _held_out(config: Config) -> Dataset | None:
    """The evaluation prompts: the first `eval.num_prompts` rows of eval.path."""
    path, num_prompts = config.eval.path, config.eval.num_prompts
    if num_prompts == 0 or path is None:
        return None
    if path == "gcd":
        return Dataset(gcd.held_out_rows(), "prompt", "the held-out part of gcd").head(num_prompts)
    return Dataset.from_path(Path(path), config.data.prompt_key, config.eval.split).head(num_prompts)
