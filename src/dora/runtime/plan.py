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
from dora.data.dataset import Cursor, Dataset
from dora.data.tokenizer import Tokenizer
from dora.engine.blocks import BLOCK_SIZE, num_blocks_for
from dora.engine.rows import MAX_STOP_IDS
from dora.engine.sequence import Request, Sampling
from dora.errors import DataError, ModelError
from dora.model.config import ModelConfig
from dora.model.folder import check_folder, load_config
from dora.runtime.messages import EngineSpec, RewarderSpec, TrainerSpec
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
    dataset: Dataset
    held_out: Dataset | None

    @classmethod
    def make(cls, config: Config, out: Path) -> Plan:
        """Load and check what the configuration names. Raises InputError."""
        folder = Path(config.model.path)
        model = load_config(folder)
        config.check_context(model.max_position_embeddings)
        tokenizer = Tokenizer(folder)
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
        numel = check_folder(folder)
        plan = cls(config, out, model, numel, tokenizer, _dataset(config), _held_out(config))
        for dataset in filter(None, (plan.dataset, plan.held_out)):
            dataset.check_prompt_lengths(
                lambda text: len(tokenizer.encode(text)), config.data.max_prompt_length
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

    def cursor(self) -> Cursor:
        """A walk over the dataset from its beginning."""
        return Cursor(len(self.dataset), self.config.run.seed, self.config.data.shuffle)

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
        return self.tokenizer.encode(self.source_of(group).prompt(group.row))

    def _seed(self, request: RequestId) -> int:
        """64 bits that depend on the run's seed and on the request alone; evaluation has its own seed."""
        is_evaluation = request.epoch == EVALUATION
        seed = self.config.eval.seed if is_evaluation else self.config.run.seed
        digest = blake2b(f"{seed}/{request}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def sampling_of(self, request: RequestId) -> Sampling:
        """How a request's tokens are drawn, and when its answer ends."""
        is_greedy = request.epoch == EVALUATION and request.sibling == GREEDY
        return Sampling(
            temperature=0.0 if is_greedy else self.config.sampling.temperature,
            max_tokens=self.config.sampling.max_response_length,
            stop_ids=self.tokenizer.stop_ids,
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
        )

    def trainer_spec(self, weights: Path, samples: Path) -> TrainerSpec:
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
            kl_loss_coef=config.algorithm.kl_loss_coef,
            loss_agg_mode=config.algorithm.loss_agg_mode,
            loss_scale_factor=config.sampling.max_response_length,
            micro_batch_tokens=config.trainer.micro_batch_tokens,
            temperature=config.sampling.temperature,
        )
        return TrainerSpec(Path(config.model.path), weights, samples, settings)

    def rewarder_spec(self) -> RewarderSpec:
        return RewarderSpec(self.config.reward.function, Path(self.config.model.path))


def _dataset(config: Config) -> Dataset:
    if config.data.source == "gcd":
        return Dataset(gcd.training_rows(), "prompt", "the built-in task gcd")
    return Dataset.from_file(Path(config.data.source), config.data.prompt_key)


def _held_out(config: Config) -> Dataset | None:
    """The evaluation prompts: the first `eval.num_prompts` rows of eval.source."""
    num_prompts = config.eval.num_prompts
    if num_prompts == 0 or config.eval.source is None:
        return None
    if config.eval.source == "gcd":
        rows = gcd.held_out_rows()
        key, origin = "prompt", "the held-out part of gcd"
    else:
        source = Dataset.from_file(Path(config.eval.source), config.data.prompt_key)
        rows = [source.row(index) for index in range(len(source))]
        key, origin = config.data.prompt_key, source.origin
    if num_prompts > len(rows):
        raise DataError(f"eval.num_prompts = {num_prompts}, but {origin} has {len(rows)} rows; lower it")
    return Dataset(rows[:num_prompts], key, origin)
