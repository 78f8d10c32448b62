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
from dora.core.records import AgingRule, EvaluationRule, GroupId, Limits, RequestId
from dora.data.chat import PromptEncoder
from dora.data.dataset import Cursor, Dataset
from dora.data.inflow import Inflow
from dora.data.tokenizer import Tokenizer
from dora.engine.blocks import BLOCK_SIZE, num_blocks_for
from dora.engine.sequence import Request, Sampling
from dora.engine.workspace import DTYPES
from dora.fleets import kind_of, num_engines
from dora.model.config import ModelConfig
from dora.model.folder import check_folder, load_config
from dora.runtime import ground, trackers
from dora.runtime.devices import Devices, is_gpu
from dora.runtime.fitting import check_critic, check_fit, check_tokenizer
from dora.runtime.messages import CriticSpec, EngineSpec, TrainerSpec
from dora.runtime.prompts import held_out_prompts, template_of, training_prompts
from dora.stream.segments import SEGMENT_BYTES
from dora.trainer.critic import CriticSettings
from dora.trainer.lora import Lora
from dora.trainer.recipe import Correction
from dora.trainer.scoring import Scoring
from dora.trainer.trainer import TrainerSettings

NO_END = 2**31  # rows of a dataset that grows, as its cursor counts them
HEADER_BYTES = 2**24  # of a safetensors file, at most: names and shapes
COLUMNS_OF = {"reference": "reference", "proximal": "proximal", "critic": "values"}  # of trainer.stations
_ANSWER_BYTES = 9  # of a token in the sample stream: its id, its log-prob, whether it was drawn
GREEDY = 0  # the sibling of a held-out prompt that is answered so, if one is


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
        check_tokenizer(folder, tokenizer, model)
        check_fit(config, tokenizer, model)
        trackers.check(config.metrics.report_to)
        ground.check(config)
        numel = check_folder(folder)
        if config.critic.path is not None:
            check_critic(config, model)
        prompts = PromptEncoder(tokenizer, template_of(config))
        training, held_out = training_prompts(config, out), held_out_prompts(config)
        plan = cls(config, out, model, numel, tokenizer, prompts, training, held_out)
        for dataset in filter(None, (plan.dataset, plan.held_out)):
            plan.check_lengths(dataset)
        return plan

    def check_lengths(self, dataset: Dataset) -> None:
        """Raises DataError for a prompt that the policy cannot be asked."""
        dataset.check_prompt_lengths(
            lambda prompt: len(self.prompts.encode(prompt)), self.config.data.max_prompt_length
        )

    @cached_property
    def limits(self) -> Limits:
        """What the orchestrator must keep."""
        config = self.config
        rules = config.orchestrator
        batches_per_version = {"sync": 1, "one_step": 1, "drain": rules.batches_per_version}
        return Limits(
            num_steps=config.run.steps,
            batch_size=config.trainer.batch_size,
            group_size=config.sampling.group_size,
            max_staleness=rules.max_staleness,
            filter_groups=config.algorithm.filter_groups,
            batches_per_version=batches_per_version.get(rules.update_policy),
            slack=rules.slack,
            load_interval=rules.load_interval,
            is_deferred=config.weights.load == "deferred",
            skip_below_kl=config.weights.skip_below_kl,
            is_static=config.is_static,
            breaks_c1=config.breaks_c1,
            level_running=rules.level_running,
            rush=rules.rush,
            rebalance_interval_s=rules.rebalance_interval_s,
            kv_watermark=rules.kv_watermark,
            evaluation=self.evaluation if config.eval.every else None,
            aging=AgingRule(rules.min_ess, rules.max_kl, rules.staleness_window)
            if rules.staleness == "adaptive"
            else None,
        )

    @property
    def evaluation(self) -> EvaluationRule | None:
        """How many answers to how many held-out prompts; None: no evaluation."""
        if self.held_out is None:
            return None
        settings = self.config.eval
        num_answers = settings.num_samples + settings.greedy
        return EvaluationRule(settings.every or self.config.run.steps, len(self.held_out), num_answers)

    def is_recorded(self, group: GroupId) -> bool:
        """Whether the journal tells of it: not of evaluations before and after training."""
        return not group.is_held_out or 0 < -1 - group.epoch < self.config.run.steps

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
    def columns(self) -> tuple[str, ...]:
        """What stations beside the trainer make of each answer."""
        stations = self.config.trainer.stations
        return tuple(COLUMNS_OF[name] for name in COLUMNS_OF if name in stations)

    @property
    def lora(self) -> Lora | None:
        """The adapters that are trained, if it is them."""
        trainer = self.config.trainer
        if not trainer.lora_rank:
            return None
        return Lora(trainer.lora_rank, trainer.lora_alpha, tuple(trainer.lora_targets))

    @cached_property
    def devices(self) -> Devices:
        """Which process computes where."""
        return Devices.of(self.config)

    @property
    def num_engines(self) -> int:
        """Engine processes at the start; the last one is the trainer's, if it is elastic."""
        return num_engines(self.config) + self.config.trainer.elastic

    def is_colocated(self, engine: int) -> bool:
        """Whether an engine shares its device with the trainer, and so rests while that one works."""
        is_lent = self.config.trainer.elastic and engine == num_engines(self.config)
        return is_lent or self.config.orchestrator.placement == "colocated"

    @property
    def weights_bytes(self) -> int:
        """Most bytes the weight store holds: every pinned version, the newest and one being written."""
        return self.version_bytes * (self.config.live_versions + 2)

    @property
    def version_bytes(self) -> int:
        """A version as it is published, and as engines hold it."""
        return self.num_parameters * self._itemsize

    @property
    def upload_bytes(self) -> int:
        """Most bytes of a file with all tensors in fp32, with a copy of a tied embedding, and a header."""
        return 4 * (self.num_parameters + self.model.vocab_size * self.model.hidden_size) + HEADER_BYTES

    @property
    def _itemsize(self) -> int:
        """Bytes of a number in engines."""
        return DTYPES[self.config.engine.dtype].itemsize

    @property
    def kv_bytes(self) -> int:
        """The KV of one engine: by itself blocks for all its rows at full context, and one more per row."""
        engine, model = self.config.engine, self.model
        blocks = engine.kv_blocks or engine.max_rows * (num_blocks_for(self.config.context) + 1)
        keys_and_values = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim
        per_token = model.kv_bytes_per_token - keys_and_values * (4 - self._itemsize)
        return blocks * BLOCK_SIZE * per_token

    @property
    def pool_bytes(self) -> int:
        """What of that lies in memory that processes share."""
        is_private = is_gpu(self.config.engine.device) or self.config.breaks_c1  # nothing is moved
        return 0 if is_private else self.kv_bytes

    @property
    def stream_bytes(self) -> int:
        """Most bytes of the answers in the sample stream, and a segment for each who writes there."""
        config, model = self.config, self.model
        per_token = _ANSWER_BYTES + 4 * len(self.columns)
        if config.trainer.routing_replay:
            per_token += 2 * len(model.mixture_layers) * model.num_experts_per_tok
        num_rows = config.window * config.sampling.group_size
        num_judges = config.reward.num_workers + sum(task.num_workers for task in config.task)
        num_writers = 1 + num_judges + len(self.columns)
        return num_rows * config.context * per_token + num_writers * SEGMENT_BYTES

    @property
    def stored_bytes(self) -> int:
        """What the run keeps in memory that its processes share."""
        return self.weights_bytes + self.num_engines * self.pool_bytes + self.stream_bytes

    def cursor(self, index: int = 0) -> Cursor:
        """A walk over the dataset, from its beginning or from a later group on.

        Prompts from outside are taken once, in the order in which they come.
        """
        if self.num_prompts is None:
            return Cursor(NO_END, self.config.run.seed, shuffle=False, index=index)
        return Cursor(self.num_prompts, self.config.run.seed, self.config.data.shuffle, index)

    @property
    def num_prompts(self) -> int | None:
        """Rows of the dataset; None: it grows."""
        return None if isinstance(self.dataset, Inflow) else len(self.dataset)

    def source_of(self, group: GroupId) -> Dataset:
        """The dataset a group's row is in."""
        if not group.is_held_out:
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
        """64 bits that depend on the run's seed and on the request alone.

        Evaluation has its own seed, and all versions the same draws, so that they can be compared.
        """
        seed, name = self.config.run.seed, request
        if request.is_held_out:
            seed, name = self.config.eval.seed, request._replace(epoch=-1)
        digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def sampling_of(self, request: RequestId) -> Sampling:
        """How a request's tokens are drawn, and when its answer ends."""
        is_greedy = request.is_held_out and self.config.eval.greedy and request.sibling == GREEDY
        settings = self.config.sampling
        return Sampling(
            temperature=0.0 if is_greedy else settings.temperature,
            max_tokens=settings.max_response_length,
            stop_ids=(*self.tokenizer.stop_ids, *settings.stop_token_ids),
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            stop_strings=tuple(settings.stop),
            max_turn_tokens=self.max_turn_tokens,
        )

    @property
    def max_turn_tokens(self) -> int:
        """Of an episode's turn; 0: answers are one turn."""
        settings = self.config.sampling
        most = settings.max_turn_length or settings.max_response_length
        return most if self.config.has_episodes else 0

    def engine_spec(self, weights: Path, engine: int, place: int | None = None) -> EngineSpec:
        """Its KV lies beside the weights, where the other engines can map it.

        It computes where engine `place` did, of which it takes the place.
        """
        config, place = self.config, engine if place is None else place
        kind = kind_of(config, place)
        return EngineSpec(
            model=Path(config.model.path),
            weights=weights,
            pool=weights / f"pool-{engine}.kv",
            max_rows=kind.max_rows,
            max_context=config.context,
            version_slots=kind.version_slots,
            kernels=config.engine.kernels,
            pace_s=config.engine.pace_s,
            tail_interval=config.engine.tail_interval,
            max_staleness=config.orchestrator.max_staleness,
            reads_text=bool(config.sampling.stop),
            returns_routes=config.trainer.routing_replay,
            exact=config.engine.exact,
            device=self.devices.of_engine(place, is_colocated=self.is_colocated(place)),
            dtype=config.engine.dtype,
            adapter=kind.adapter,
            options=kind.options,
            loads_deferred=config.weights.load == "deferred",
            kv_blocks=config.engine.kv_blocks,
            renewal=config.orchestrator.update_policy if config.breaks_c1 else None,
        )

    def trainer_spec(self, weights: Path, stream: Path, checkpoint: Path | None = None) -> TrainerSpec:
        config, runtime = self.config, self.config.runtime
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
            batch_tokens=config.trainer.batch_tokens,
            micro_batch_tokens=config.trainer.micro_batch_tokens,
            logits_chunk_tokens=config.trainer.logits_chunk_tokens,
            dtype=config.trainer.dtype,
            activation_checkpointing=config.trainer.activation_checkpointing,
            temperature=config.sampling.temperature,
            lora=self.lora,
            is_told_reference="reference" in self.columns,
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
            device=self.devices.of_trainer(),
            published_dtype=config.engine.dtype,
            peak_tflops=config.metrics.peak_tflops,
            num_ranks=config.trainer.num_ranks,
            rank_timeout_s=max(runtime.start_timeout_s, 10 * runtime.trainer_timeout_s),
            critic=self._critic_spec if config.algorithm.adv_estimator == "gae" else None,
            columns=self.columns,
            column_wait_s=runtime.trainer_timeout_s if self.columns else None,
            adapter=config.trainer.adapter,
        )

    @cached_property
    def num_critic_parameters(self) -> int:
        """Of a critic's decoder; 0 without one."""
        if self.config.algorithm.adv_estimator != "gae":
            return 0
        path = self.config.critic.path
        return self.num_parameters if path is None else check_folder(Path(path))

    @property
    def _critic_spec(self) -> CriticSpec:
        critic, algorithm, trainer = self.config.critic, self.config.algorithm, self.config.trainer
        settings = CriticSettings(
            lr=critic.lr,
            num_steps=self.config.run.steps,
            warmup_steps=critic.warmup_steps,
            lr_decay=trainer.lr_decay,
            weight_decay=trainer.weight_decay,
            max_grad_norm=critic.max_grad_norm,
            ppo_epochs=critic.ppo_epochs,
            cliprange_value=critic.cliprange_value,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            batch_tokens=trainer.batch_tokens,
            micro_batch_tokens=trainer.micro_batch_tokens,
            dtype=trainer.dtype,
            activation_checkpointing=trainer.activation_checkpointing,
        )
        return CriticSpec(Path(self.config.critic.path or self.config.model.path), settings)
