"""Load and check everything that the configuration names, and derive what the processes need.

No process is started and no file is written before all checks have passed.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from dora.config.schema import Config, DataSection, EvalSection, NamedSource, SamplingSection
from dora.config.validate import check_context
from dora.core.types import AdaptiveStalenessRule, CurriculumRule, EvaluationRule, GroupId, Limits, RequestId
from dora.data import gcd
from dora.data.chat import ChatTemplate, PromptEncoder
from dora.data.dataset import (
    Cursor,
    Dataset,
    GrowingDataset,
    MixedCursor,
    MixedDataset,
    Rows,
    naming_source,
    num_shared_rows,
)
from dora.data.images import ImageReader, ImageSource
from dora.data.tokenizer import Tokenizer
from dora.engine.block_manager import BLOCK_SIZE, num_blocks_for, num_staging_blocks
from dora.engine.decode_batch import MAX_STOP_IDS
from dora.engine.kernels.workspace import DTYPES
from dora.engine.request import Request, SamplingParams
from dora.errors import ConfigError, ModelError, RunError
from dora.metrics.writer import check_trackers
from dora.model.config import ModelConfig, TransformersConfig
from dora.model.images import IMAGES_FOLDER, ImageFolder
from dora.model.pretrained import check_pretrained, has_published_names, load_config
from dora.runtime.process import launcher
from dora.runtime.process.backends import engines_without_images
from dora.runtime.process.messages import CriticSpec, EngineSpec, TeacherSpec, TrainerSpec
from dora.runtime.process.resources import DeviceAssignment, is_gpu
from dora.stream.storage import SEGMENT_BYTES
from dora.text import plural, size
from dora.trainer.advantage import Turn, own_advantages, own_turn_advantages, takes_turns
from dora.trainer.continuation import check_start
from dora.trainer.critic import CriticSettings, value_layout
from dora.trainer.lora import LoraSettings
from dora.trainer.loss import LossSettings, check_own_loss
from dora.trainer.recipe import Correction, EarlierSchedule, is_own
from dora.trainer.trainer import TrainerSettings

UPLOADED_PROMPTS = "prompts.jsonl"  # in the run folder
UNBOUNDED_ROWS = 2**31  # of a dataset that grows, for its cursor
MAX_HEADER_BYTES = 2**24  # of a safetensors file: names and shapes
AUX_WORKER_COLUMNS = {"reference": "reference", "proximal": "proximal", "critic": "values"}
MAX_CACHED_PROMPTS = 1024  # encoded; siblings that start later than so many groups encode theirs again
ALL_LINEAR = "all-linear"  # in trainer.lora_targets
GREEDY = 0  # the sibling of a held-out prompt that is decoded greedily, with eval.greedy
# They load versions by the names of published checkpoints.
SERVERS = ("vllm", "vllm-lora", "sglang", "sglang-lora")
_PREFILL_TOKENS = (512, 4096)  # per step, on the CPU and on a GPU
_LOGITS_CHUNK_TOKENS = (256, 2048)  # on the CPU and on a GPU
_BYTES_PER_TOKEN = 9  # of a response in the sample stream: its id, its log-prob, whether it was sampled


def check_tokenizer(folder: Path, tokenizer: Tokenizer, model: ModelConfig) -> None:
    """Raises ModelError if the tokenizer does not fit the model."""
    if tokenizer.vocab_size > model.vocab_size:
        raise ModelError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the model's vocab_size is "
            f"{model.vocab_size}; use the tokenizer the model was made with"
        )
    if unknown := [id for id in tokenizer.stop_ids if id >= model.vocab_size]:
        raise ModelError(
            f"{folder}: {unknown[0]} is an end token, and no token id, as the model's vocab_size is "
            f"{model.vocab_size}; correct eos_token_id in generation_config.json"
        )
    if len(tokenizer.stop_ids) > MAX_STOP_IDS:
        raise ModelError(
            f"{folder}: {len(tokenizer.stop_ids)} end tokens; engines support at most {MAX_STOP_IDS}; "
            "shorten eos_token_id in generation_config.json"
        )


def check_implementation(config: Config, model: ModelConfig) -> None:
    """Raises ConfigError if trainer or engines have no implementation of this model, or none of a feature."""
    kind, trainer = f"model_type = {model.model_type!r}", config.trainer
    is_foreign = isinstance(model, TransformersConfig)
    if is_foreign and trainer.model == "dora":
        raise ConfigError(
            f"trainer.model = dora: DORA-RL's decoder does not know {kind}; set trainer.model = auto"
        )
    for engines in config.engine_kinds:
        key = f"{engines.key}.backend"
        if is_foreign and engines.backend is None:
            raise ConfigError(
                f"{key}: DORA-RL's engine does not support {kind}; set {key} = vllm, sglang, or transformers "
                "(slow, for tests and small models)"
            )
        if engines.backend in SERVERS and not has_published_names(Path(config.model.path), model):
            raise ConfigError(
                f"{key} = {engines.backend}: transformers has other names for the weights of {kind} than its "
                f"checkpoint, and the server would not find them; set {key} = transformers"
            )
    if trainer.model == "transformers" and trainer.routing_replay:
        raise ConfigError(
            "trainer.routing_replay = true: with trainer.model = transformers the model routes tokens by "
            "itself; set trainer.model = auto"
        )
    if isinstance(model, TransformersConfig) and model.shares_layers and trainer.num_ranks > 1:
        raise ConfigError(
            f"trainer.num_ranks = {trainer.num_ranks}: layers of {kind} share weights, and ranks gather one "
            "layer at a time; set trainer.num_ranks = 1"
        )


def check_own_functions(config: Config) -> None:
    """Call the user's own advantage estimator and policy loss once. Raises ConfigError if they fail."""
    algorithm = config.algorithm
    if is_own(algorithm.adv_estimator):
        rewards = [float(sibling % 2) for sibling in range(config.sampling.group_size)]
        lengths = [*range(1, len(rewards) + 1)]
        try:
            if takes_turns(algorithm.adv_estimator):
                turns = [[Turn(b"", 0.0, 1), Turn(b"1", reward, 1)] for reward in rewards]
                own_turn_advantages(algorithm.adv_estimator, rewards, lengths, turns)
            else:
                own_advantages(algorithm.adv_estimator, rewards, lengths)
        except RunError as error:
            raise ConfigError(f"{error}") from error
    if is_own(algorithm.policy_loss):
        settings = LossSettings(
            algorithm.clip_ratio_low,
            algorithm.clip_ratio_high,
            algorithm.clip_ratio_c,
            algorithm.dpo_beta,
        )
        has_reference, options = algorithm.kl_loss_coef > 0, algorithm.policy_loss_options
        check_own_loss(algorithm.policy_loss, settings, has_reference=has_reference, options=options)


def check_critic(config: Config, policy: ModelConfig) -> None:
    """Raises InputError for a critic that cannot score the sequences of the policy."""
    folder = Path(config.critic.path or "")
    critic = load_config(folder)
    check_pretrained(folder)
    if critic.vocab_size != policy.vocab_size or critic.max_position_embeddings < config.max_sequence_length:
        raise ConfigError(
            f"critic.path = {config.critic.path!r} has vocab_size {critic.vocab_size} and "
            f"{critic.max_position_embeddings} positions, but needs {policy.vocab_size} and at least "
            f"{config.max_sequence_length}; use a model of the policy's family, or remove critic.path"
        )


def check_teacher(config: Config, teacher: str, tokenizer: Tokenizer) -> None:
    """Raises InputError for a teacher in a folder that cannot score the policy's tokens."""
    folder, key = Path(teacher), f"distillation.teachers: {teacher}"
    check_pretrained(folder)
    if Tokenizer(folder).vocabulary != tokenizer.vocabulary:
        raise ConfigError(f"{key} has another vocabulary than model.path; name a model of the same tokenizer")
    if (positions := load_config(folder).max_position_embeddings) < config.max_sequence_length:
        raise ConfigError(
            f"{key} has {positions} positions, and sequences have up to {config.max_sequence_length} tokens; "
            "lower data.max_prompt_length or sampling.max_response_length"
        )


def check_fit(config: Config, tokenizer: Tokenizer, model: ModelConfig) -> None:
    """Raises ConfigError for settings that do not fit this model."""
    check_context(config, model.max_position_embeddings)
    # Siblings share the full blocks of a prompt; its last block is copied, and the original kept.
    needed = num_blocks_for(config.max_sequence_length) + 1
    if config.engine.num_kv_blocks is not None and config.engine.num_kv_blocks < needed:
        raise ConfigError(
            f"engine.num_kv_blocks = {config.engine.num_kv_blocks}: the longest sequence, "
            f"{config.max_sequence_length} tokens, needs {needed}; raise it, or lower data.max_prompt_length "
            "or sampling.max_response_length"
        )
    stop_ids, num_own = config.sampling.stop_token_ids, len(tokenizer.stop_ids)
    unknown = [i for i in stop_ids if i >= model.vocab_size]
    if unknown:
        raise ConfigError(
            f"sampling.stop_token_ids = {stop_ids}: {unknown[0]} is not a token id, as the model's "
            f"vocab_size is {model.vocab_size}; remove it"
        )
    if num_own + len(stop_ids) > MAX_STOP_IDS:
        raise ConfigError(
            f"sampling.stop_token_ids = {stop_ids}: with the model's {num_own} end tokens they are "
            f"{num_own + len(stop_ids)}; engines support at most {MAX_STOP_IDS}; name fewer"
        )
    known = model.linear_names
    unknown_targets = {*config.trainer.lora_targets} - {ALL_LINEAR, *known}
    if config.trainer.lora_rank and (unknown_targets or not known):
        raise ConfigError(
            f"trainer.lora_targets names {', '.join(sorted(unknown_targets)) or ALL_LINEAR}: the layers of "
            f"this {model.model_type} model that can have adapters are {', '.join(known) or 'none'}; "
            f"{'name some of these' if known else 'set trainer.lora_rank = 0'}"
        )
    if config.trainer.routing_replay and not model.moe_layers:
        reason = (
            f"transformers, which computes this {model.model_type} model, routes tokens by itself"
            if model.num_experts
            else f"no layer of this {model.model_type} model is a mixture of experts, so there are no routes "
            "to replay"
        )
        raise ConfigError(f"trainer.routing_replay = true: {reason}; remove it")


# prompts


def template_of(config: Config) -> ChatTemplate | None:
    """The template that turns conversations into text; None: prompts are plain text."""
    if not config.data.chat_template:
        return None
    data = config.data
    return ChatTemplate(Path(config.model.path), data.system_prompt, data.chat_template_kwargs)


def image_reader(tokenizer: Tokenizer, model: ModelConfig) -> ImageReader | None:
    """Reads images for a model that understands them; None: it reads text only."""
    if not isinstance(model, TransformersConfig) or (vision := model.vision) is None:
        return None
    ids = (vision.start_token_id, vision.image_token_id, vision.end_token_id)
    return ImageReader(
        placeholder="".join(map(tokenizer.decode_token, ids)),
        token_id=vision.image_token_id,
        token_side=vision.token_side,
        min_pixels=vision.min_pixels,
        max_pixels=vision.max_pixels,
    )


def check_images(config: Config) -> None:
    """Raises ConfigError if a run whose prompts have images needs what reads none."""
    rules = {
        f"{', '.join(without)}: set engine.backend = transformers": without
        for without in [engines_without_images(config)]
    } | {
        "environments and agents: remove env.environment, env.hosts and service.agents": config.has_episodes,
        "algorithm.adv_estimator = gae, a critic: use grpo": config.algorithm.adv_estimator == "gae",
        "distillation.teachers: remove them": config.distillation.teachers,
        f"trainer.backend = {config.trainer.backend}: remove it": config.trainer.backend,
        "runtime.kind = ray, other machines: set runtime.kind = local": config.runtime.kind == "ray",
        'data.path = "service": name a dataset': config.data.path == "service",
    }
    if reasons := [reason for reason, is_used in rules.items() if is_used]:
        raise ConfigError(f"prompts with images are not supported by {reasons[0]}")


def training_prompts(config: Config, out: Path, encoder: PromptEncoder) -> Dataset:
    """All rows of data.path or of the sources, or the uploaded prompts. Raises DataError.

    With data.filter_overlong_prompts, without prompts that are too long.
    """
    data = config.data
    if data.path == "service":
        return GrowingDataset(
            out / UPLOADED_PROMPTS, data.prompt_key, fsync=config.journal.fsync, image_key=data.image_key
        )
    built_in = BuiltInTask("the built-in task gcd", gcd.training_rows)
    if data.path is None:
        dataset: Dataset = _mixed(config, "source", config.source, built_in)
    else:
        dataset = _read(config, data, data.prompt_key, built_in)
    return _filtered(config, dataset, encoder)


def held_out_prompts(config: Config, encoder: PromptEncoder) -> Dataset | None:
    """At most the first `eval.num_prompts` rows of each held-out dataset; None: no evaluation.

    Raises DataError. Overlong prompts as in `training_prompts`.
    """
    settings = config.eval
    if settings.num_prompts == 0 or not config.has_held_out:
        return None
    built_in = BuiltInTask("the held-out part of gcd", gcd.held_out_rows)
    if settings.path is None:
        dataset: Dataset = _mixed(config, "eval_source", config.eval_source, built_in)
    else:
        dataset = _read(config, settings, config.data.prompt_key, built_in)
    return _filtered(config, dataset, encoder).head(settings.num_prompts)


class BuiltInTask(NamedTuple):
    """What the path "gcd" means: a name for errors, and the rows."""

    name: str
    rows: Callable[[], Rows]


def _mixed(
    config: Config,
    table: str,
    sources: Sequence[NamedSource],
    built_in: BuiltInTask,
) -> MixedDataset:
    parts = {}
    for source in sources:
        with naming_source(source.name, table):
            key = source.prompt_key or config.data.prompt_key
            parts[source.name] = _read(config, source, key, built_in)
    return MixedDataset(parts, table)


def _read(
    config: Config,
    section: DataSection | EvalSection | NamedSource,
    prompt_key: str,
    built_in: BuiltInTask,
) -> Dataset:
    assert section.path is not None
    if section.path == "gcd":
        return Dataset(built_in.rows(), "prompt", built_in.name)
    image_key = config.data.image_key
    return Dataset.from_path(Path(section.path), prompt_key, section.split, section.subset, image_key)


def _filtered(config: Config, dataset: Dataset, encoder: PromptEncoder) -> Dataset:
    if not config.data.filter_overlong_prompts:
        return dataset
    return dataset.without_overlong(encoder.num_tokens, config.data.max_prompt_length)


@dataclass(frozen=True)
class RunSetup:
    """The parts of a run before it starts. Prompts are tokenized when they are first needed."""

    config: Config
    out: Path
    model: ModelConfig
    num_parameters: int
    tokenizer: Tokenizer
    prompts: PromptEncoder
    dataset: Dataset
    held_out: Dataset | None
    earlier_schedules: tuple[EarlierSchedule, ...] = ()  # of a run that got more steps

    @classmethod
    def make(cls, config: Config, out: Path) -> RunSetup:
        """Load and check what the configuration names. Raises InputError."""
        folder = Path(config.model.path)
        model = load_config(folder)
        tokenizer = Tokenizer(folder)
        check_tokenizer(folder, tokenizer, model)
        check_fit(config, tokenizer, model)
        check_implementation(config, model)
        check_own_functions(config)
        check_trackers(config.metrics.report_to)
        launcher.check_ray_config(config)
        num_parameters = check_pretrained(folder)
        if config.critic.path is not None:
            check_critic(config, model)
        for teacher in config.distillation.folders:
            check_teacher(config, teacher, tokenizer)
        if config.distillation.servers:
            from dora.trainer.teachers import ServerTeacher
        for server in config.distillation.servers:
            ServerTeacher(server, config.distillation.timeout_s).check(tokenizer.vocab_size)
        prompts = PromptEncoder(tokenizer, template_of(config), image_reader(tokenizer, model))
        training, held_out = training_prompts(config, out, prompts), held_out_prompts(config, prompts)
        setup = cls(config, out, model, num_parameters, tokenizer, prompts, training, held_out)
        for dataset in setup.datasets:
            if not config.data.filter_overlong_prompts:
                setup.check_lengths(dataset)
            if prompts.images is not None and dataset.has_images:
                check_images(config)
        setup.check_memory()
        setup.check_start()
        return setup

    def check_start(self) -> None:
        """Raises ModelError if the checkpoint in trainer.continue_from does not fit the run."""
        if self._continued is None:
            return
        num_critic_weights = 0
        if self.config.algorithm.adv_estimator == "gae":
            num_critic_weights = value_layout(load_config(self._critic_spec.model)).numel
        check_start(self._continued, Path(self.config.model.path), self.lora, num_critic_weights)

    def check_memory(self) -> None:
        """Raises ConfigError if what processes share fits neither the memory nor the disk of this machine."""
        parts = {
            f"{size(self.weights_bytes)} of weights (orchestrator.max_staleness)": self.weights_bytes,
            f"{size(self.stream_bytes)} of samples (orchestrator.max_staleness, trainer.batch_size, "
            "sampling.max_response_length)": self.stream_bytes,
        }
        if self.config.runtime.kind == "local":
            pools = self.num_engines * self.pool_bytes
            parts[f"{size(pools)} of KV caches (engine.num_kv_blocks, engine.max_num_seqs)"] = pools
        needed, memory = sum(parts.values()), psutil.virtual_memory().total
        disk = shutil.disk_usage(tempfile.gettempdir()).free
        if needed > max(memory, disk):
            raise ConfigError(
                f"the processes of the run may share {size(needed)}, and this machine has {size(memory)} of "
                f"memory and {size(disk)} of free disk for temporary files; lower what takes most: "
                f"{max(parts, key=lambda part: parts[part])}"
            )

    @property
    def logits_chunk_tokens(self) -> int:
        """Response tokens whose logits are in memory at the same time."""
        trainer = self.config.trainer
        return trainer.logits_chunk_tokens or _LOGITS_CHUNK_TOKENS[is_gpu(trainer.device)]

    @property
    def torch_compile(self) -> bool:
        """Whether the trainer compiles layers and log-probs."""
        trainer = self.config.trainer
        if trainer.torch_compile is None:
            return is_gpu(trainer.device) and trainer.dtype == "bfloat16"
        return trainer.torch_compile

    @property
    def notices(self) -> list[str]:
        """Warnings about valid settings that are usually mistakes."""
        if not self.config.run.steps:
            return self._overlong_notices
        trainer, num_prompts = self.config.trainer, self.num_prompts
        notices = []
        if num_prompts is not None and trainer.batch_size > num_prompts:
            notices.append(
                f"trainer.batch_size = {trainer.batch_size} groups, and the dataset has "
                f"{plural(num_prompts, 'prompt')}: a batch has some prompts more than once; "
                "lower trainer.batch_size, or add prompts"
            )
        if is_gpu(trainer.device) and trainer.dtype == "float32" and trainer.backend is None:
            notices.append(
                f"trainer.dtype = float32 on trainer.device = {trainer.device}: GPUs have no fast attention "
                "for fp32 and multiply it slowly; set trainer.dtype = bfloat16, the optimizer stays in fp32"
            )
        if trainer.warmup_steps >= (num_steps := self.config.run.steps):
            notices.append(
                f"trainer.warmup_steps = {trainer.warmup_steps} and run.steps = {num_steps}: no step has the "
                f"learning rate trainer.lr = {trainer.lr}; lower warmup_steps"
            )
        return [*notices, *self._shared_row_notices, *self._overlong_notices]

    @property
    def _shared_row_notices(self) -> list[str]:
        """How many held-out rows are training rows, too."""
        if self.held_out is None or self.num_prompts is None:
            return []
        if not (num_shared := num_shared_rows(self.held_out, self.dataset)):
            return []
        rows, are = plural(len(self.held_out), "held-out row"), "is" if num_shared == 1 else "are"
        return [
            f"{num_shared} of {rows} {are} trained on, too, so the held-out reward may show what was "
            "memorized; remove them from one of the datasets"
        ]

    @property
    def _overlong_notices(self) -> list[str]:
        """How many prompts data.filter_overlong_prompts has left out of each dataset."""
        parts = [p for d in self.datasets for p in (d.parts.values() if isinstance(d, MixedDataset) else [d])]
        return [
            f"{part.origin}: left out {plural(part.num_overlong, 'prompt')} with more than "
            f"data.max_prompt_length = {self.config.data.max_prompt_length} tokens, {len(part)} remain"
            for part in parts
            if part.num_overlong
        ]

    @property
    def datasets(self) -> list[Dataset]:
        """The training prompts, and the held-out prompts if there are any."""
        return [self.dataset, *([] if self.held_out is None else [self.held_out])]

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The columns that every row has, whether training or held-out; None: not known yet."""
        first, *others = (dataset.columns for dataset in self.datasets)
        if first is None:
            return None
        return tuple(column for column in first if all(column in (other or ()) for other in others))

    @property
    def missing_columns(self) -> dict[str, str]:
        """Column that some datasets have -> one that does not."""
        found: dict[str, str] = {}
        for dataset in self.datasets:
            known = {column for other in self.datasets for column in other.columns or ()}
            own = known if dataset.columns is None else dataset.columns
            found |= dict.fromkeys(known.difference(own), dataset.origin)
        for dataset in reversed(self.datasets):
            found |= dataset.missing_columns()
        return found

    def check_lengths(self, dataset: Dataset) -> None:
        """Raises DataError for a prompt that is empty or too long."""
        dataset.check_prompt_lengths(self.prompts.num_tokens, self.config.data.max_prompt_length)

    @cached_property
    def limits(self) -> Limits:
        """The rules of the orchestrator."""
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
            weight_sync_interval=rules.weight_sync_interval,
            defers_loads=config.weights.load == "deferred",
            skip_below_kl=config.weights.skip_below_kl,
            max_retries=config.env.max_retries,
            num_queued=config.num_queued,
            is_static=config.has_static_placement,
            breaks_c1=config.breaks_c1,
            balance_running=rules.balance_running,
            prioritize_stragglers=config.prioritizes_stragglers,
            rebalance_interval_s=rules.rebalance_interval_s,
            kv_watermark=rules.kv_watermark,
            evaluation=self.evaluation,
            adaptive_staleness=AdaptiveStalenessRule(rules.min_ess, rules.max_kl, rules.staleness_window)
            if rules.staleness_mode == "adaptive"
            else None,
            curriculum=CurriculumRule(**config.curriculum.model_dump()) if config.curriculum.is_on else None,
            pass_threshold=config.reward.pass_threshold,
            ablations=tuple(rules.ablations),
        )

    @property
    def evaluation(self) -> EvaluationRule | None:
        """Number of held-out prompts and of responses to each; None: no evaluation."""
        if self.held_out is None:
            return None
        settings = self.config.eval
        num_answers = settings.num_samples + settings.greedy
        return EvaluationRule(settings.every, len(self.held_out), num_answers)

    @property
    def _continued(self) -> Path | None:
        """The checkpoint of another run with which this one starts."""
        path = self.config.trainer.continue_from
        return None if path is None else Path(path)

    @property
    def aux_columns(self) -> tuple[str, ...]:
        """Columns of the sample stream that the aux workers fill."""
        aux_workers = self.config.aux_workers
        return tuple(column for name, column in AUX_WORKER_COLUMNS.items() if name in aux_workers)

    @property
    def lora(self) -> LoraSettings | None:
        """The adapters to train; None: all weights are trained."""
        trainer = self.config.trainer
        if not trainer.lora_rank:
            return None
        named, known = trainer.lora_targets, self.model.linear_names
        targets = known if ALL_LINEAR in named else tuple(named)
        return LoraSettings(trainer.lora_rank, trainer.lora_alpha, targets)

    @cached_property
    def devices(self) -> DeviceAssignment:
        """The device of each process."""
        return DeviceAssignment.of(self.config)

    @property
    def num_engines(self) -> int:
        """Engine processes at the start; with trainer.elastic the last one is on the trainer's device."""
        return self.config.num_engines + self.config.trainer.elastic

    def is_colocated(self, engine: int) -> bool:
        """Whether an engine shares its device with the trainer, and so is paused while the trainer works."""
        is_elastic = self.config.trainer.elastic and engine == self.config.num_engines
        return is_elastic or self.config.orchestrator.placement == "colocated"

    @property
    def weights_bytes(self) -> int:
        """Maximum size of the weight store: all pinned versions, the newest, and one being written."""
        return self.version_bytes * (self.config.max_live_versions + 2)

    @property
    def version_bytes(self) -> int:
        """Size of a published version."""
        return self.num_parameters * self._itemsize

    @property
    def checkpoint_bytes(self) -> int:
        """Maximum size of a checkpoint: weights and two moments in fp32, of the policy and of a critic, and
        the older versions that unfinished requests need.
        """
        trained = 12 * (self.num_parameters + self.num_critic_parameters)
        return trained + self.config.max_live_versions * self.version_bytes

    @property
    def upload_bytes(self) -> int:
        """Maximum size of a file with all tensors in fp32, a copy of a tied embedding, and a header."""
        return 4 * (self.num_parameters + self.model.vocab_size * self.model.hidden_size) + MAX_HEADER_BYTES

    @property
    def _itemsize(self) -> int:
        """Bytes of an element of weights and KV in engines."""
        return DTYPES[self.config.engine.dtype].itemsize

    @property
    def kv_bytes(self) -> int:
        """Size of the KV cache of one engine.

        By default it has blocks for all rows at full context, and one more for each row.
        """
        engine = self.config.engine
        blocks = engine.num_kv_blocks or engine.max_num_seqs * (
            num_blocks_for(self.config.max_sequence_length) + 1
        )
        return blocks * self._block_bytes

    @property
    def _block_bytes(self) -> int:
        """Size of a KV block."""
        model = self.model
        keys_and_values = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim
        return BLOCK_SIZE * (model.kv_bytes_per_token - keys_and_values * (4 - self._itemsize))

    @property
    def kv_transfer(self) -> Literal["shared", "staged", "ipc", "none"]:
        """How KV reaches another engine in a migration: `engine.kv_transfer` with "auto" resolved."""
        engine = self.config.engine
        if self.config.has_static_placement:  # requests do not migrate
            return "none"
        if engine.kv_transfer != "auto":
            return engine.kv_transfer
        return "staged" if is_gpu(engine.device) else "shared"

    @property
    def pool_bytes(self) -> int:
        """Size of the file from which other engines copy an engine's KV: its KV cache, or a staging area."""
        if self.kv_transfer == "staged":
            num_bytes = self._block_bytes
            return num_bytes * num_staging_blocks(num_bytes, self.kv_bytes // num_bytes)
        is_in_file = self.kv_transfer in ("shared", "ipc") and not is_gpu(self.config.engine.device)
        return self.kv_bytes if is_in_file else 0

    @property
    def stream_bytes(self) -> int:
        """Maximum size of the sample stream: all responses in flight, and a segment for each writer."""
        config, model = self.config, self.model
        per_token = _BYTES_PER_TOKEN + 4 * len(self.aux_columns)
        if config.trainer.routing_replay:
            per_token += 2 * len(model.moe_layers) * model.num_experts_per_tok
        num_rows = config.max_groups_in_flight * config.sampling.group_size
        num_reward_workers = config.reward.num_workers + sum(task.num_workers for task in config.reward_task)
        num_writers = 1 + num_reward_workers + len(self.aux_columns)
        return num_rows * config.max_sequence_length * per_token + num_writers * SEGMENT_BYTES

    @property
    def stored_bytes(self) -> int:
        """Size of all memory that processes share: weights, KV caches of CPU engines, sample stream."""
        return self.weights_bytes + self.num_engines * self.pool_bytes + self.stream_bytes

    def cursor(self, index: int = 0) -> Cursor:
        """An iterator over the dataset that begins with group `index`.

        Uploaded prompts are used once, in the order of their upload.
        """
        if self.num_prompts is None:
            return Cursor(UNBOUNDED_ROWS, self.config.run.seed, shuffle=False, index=index)
        given = self.num_prompts, self.config.run.seed, self.config.data.shuffle, index
        if not isinstance(self.dataset, MixedDataset):
            return Cursor(*given)
        ratios = [source.ratio for source in self.config.source]
        return MixedCursor(*given, self.source_rows or (), ratios)

    @property
    def source_rows(self) -> tuple[int, ...] | None:
        """Rows of each source, if there are several."""
        if not isinstance(self.dataset, MixedDataset):
            return None
        return tuple(len(part) for part in self.dataset.parts.values())

    def source_name(self, group: GroupId) -> str | None:
        """The source of a group's prompt, if there are several."""
        dataset = self.source_of(group)
        return dataset.name_of(group.row) if isinstance(dataset, MixedDataset) else None

    @property
    def held_out_sources(self) -> dict[str, range]:
        """The rows of each held-out source; empty with one dataset."""
        return self.held_out.rows_by_source if isinstance(self.held_out, MixedDataset) else {}

    @property
    def num_prompts(self) -> int | None:
        """Rows of the dataset; None: it grows."""
        return None if isinstance(self.dataset, GrowingDataset) else len(self.dataset)

    def source_of(self, group: GroupId) -> Dataset:
        """The dataset of a group: training or held-out prompts."""
        if not group.is_held_out:
            return self.dataset
        assert self.held_out is not None
        return self.held_out

    def requests(self, ids: Sequence[RequestId], version: int) -> list[Request]:
        """Requests for an engine, with prompt tokens, seed and sampling parameters."""
        return [
            Request(
                id=request,
                group=(group := request.group),
                prompt_ids=self._encode_prompt(group),
                version=version,
                seed=self._seed(request),
                sampling=self.sampling_of(request),
            )
            for request in ids
        ]

    def prompt_ids(self, group: GroupId) -> list[int]:
        """Token ids of a group's prompt."""
        return [*self._encode_prompt(group)]

    @cached_property
    def _encode_prompt(self) -> Callable[[GroupId], tuple[int, ...]]:
        """Token ids of a group's prompt, cached because siblings start one by one."""

        def encode(group: GroupId) -> tuple[int, ...]:
            dataset = self.source_of(group)
            images = [self._store_image(image) for image in dataset.images(group.row)]
            return tuple(self.prompts.encode_with_images(dataset.prompt(group.row), images))

        return lru_cache(MAX_CACHED_PROMPTS)(encode)

    def _store_image(self, image: ImageSource) -> list[int]:
        """The token ids of an image, which is then in the run's folder. Raises DataError."""
        reader = self.prompts.images
        assert reader is not None, "the prompts were checked"
        pixels = reader.pixels(image)
        return [ImageFolder(self.images_folder).add(pixels)] * (pixels.size // (3 * reader.token_side**2))

    @property
    def images_folder(self) -> Path:
        """Where the run keeps the images of its prompts, which engines and trainer read by their ids."""
        return self.out / IMAGES_FOLDER

    def _seed(self, request: RequestId) -> int:
        """64 bits that depend on the run's seed and on the request only.

        Evaluations have their own seed, which is the same for all versions, so that they can be compared.
        """
        seed, name = self.config.run.seed, request
        if request.is_held_out:
            seed, name = self.config.eval.seed, request._replace(epoch=-1)
        digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def sampling_of(self, request: RequestId) -> SamplingParams:
        """Sampling parameters and stopping conditions of a request."""
        if not request.is_held_out:
            return self._sampling
        is_greedy = self.config.eval.greedy and request.sibling == GREEDY
        if not is_greedy:
            return self._eval_sampling
        return replace(self._sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)

    @cached_property
    def _sampling(self) -> SamplingParams:
        return self._sampling_params(self.config.sampling)

    @cached_property
    def _eval_sampling(self) -> SamplingParams:
        return self._sampling_params(self.config.eval_sampling)

    def _sampling_params(self, settings: SamplingSection) -> SamplingParams:
        return SamplingParams(
            temperature=settings.temperature,
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
        """Maximum length of a turn of an episode; 0: requests have a single turn."""
        settings = self.config.sampling
        limit = settings.max_turn_length or settings.max_response_length
        return limit if self.config.has_episodes else 0

    def engine_spec(self, weights: Path, engine: int, slot: int | None = None) -> EngineSpec:
        """The spec of an engine. What other engines copy its KV from is in the folder of the weights.

        The engine gets kind and device of engine `slot`, which it replaces.
        """
        config, slot = self.config, engine if slot is None else slot
        kind = config.kind_of_engine(slot)
        return EngineSpec(
            model=Path(config.model.path),
            weights=weights,
            pool=weights / f"pool-{engine}.kv" if self.kv_transfer != "none" else None,
            kv_transfer="shared" if self.kv_transfer == "none" else self.kv_transfer,
            max_rows=kind.max_num_seqs,
            max_context=config.max_sequence_length,
            version_slots=kind.version_slots,
            kernels=config.engine.kernels,
            pace_s=config.engine.min_step_time_s,
            reads_text=bool(config.sampling.stop),
            returns_routes=config.trainer.routing_replay,
            exact=config.engine.exact_logprobs,
            device=self.devices.engine_device(slot, is_colocated=self.is_colocated(slot)),
            num_gpus=config.engine.gpus_per_engine,
            dtype=config.engine.dtype,
            backend=kind.backend,
            backend_options=kind.options,
            prefetches_weights=config.weights.load == "deferred",
            images=self.images_folder if self.prompts.images else None,
            num_kv_blocks=config.engine.num_kv_blocks,
            prefill_budget=config.engine.max_prefill_tokens or _PREFILL_TOKENS[is_gpu(config.engine.device)],
            inflight_update=config.orchestrator.update_policy if config.breaks_c1 else None,
            output_interval_s=config.runtime.output_interval_s,
        )

    def trainer_spec(self, weights: Path, stream: Path, checkpoint: Path | None = None) -> TrainerSpec:
        """The spec of a trainer that begins with `checkpoint`, or with the initial model."""
        config, runtime = self.config, self.config.runtime
        settings = TrainerSettings(
            lr=config.trainer.lr,
            num_steps=config.run.steps,
            warmup_steps=config.trainer.warmup_steps,
            lr_decay=config.trainer.lr_decay,
            min_lr_ratio=config.trainer.min_lr_ratio,
            earlier_schedules=self.earlier_schedules,
            weight_decay=config.trainer.weight_decay,
            betas=(config.trainer.betas[0], config.trainer.betas[1]),
            max_grad_norm=config.trainer.max_grad_norm,
            clip_ratio_low=config.algorithm.clip_ratio_low,
            clip_ratio_high=config.algorithm.clip_ratio_high,
            clip_ratio_c=config.algorithm.clip_ratio_c,
            dpo_beta=config.algorithm.dpo_beta,
            policy_loss=config.algorithm.policy_loss,
            policy_loss_options=config.algorithm.policy_loss_options,
            correction=Correction(**config.correction.model_dump()),
            kl_loss_coef=config.algorithm.kl_loss_coef,
            kl_loss_type=config.algorithm.kl_loss_type,
            entropy_coeff=config.algorithm.entropy_coeff,
            loss_agg_mode=config.algorithm.loss_agg_mode,
            loss_scale_factor=config.sampling.max_response_length,
            mini_batch_tokens=config.trainer.mini_batch_tokens,
            micro_batch_tokens=config.trainer.micro_batch_tokens,
            logits_chunk_tokens=self.logits_chunk_tokens,
            torch_compile=self.torch_compile,
            model=config.trainer.model,
            dtype=config.trainer.dtype,
            activation_checkpointing=config.trainer.activation_checkpointing,
            temperature=config.sampling.temperature,
            lora=self.lora,
            offload_optimizer=config.trainer.offload_optimizer,
            samples_have_reference="reference" in self.aux_columns,
            images=self.images_folder if self.prompts.images else None,
        )
        return TrainerSpec(
            model=Path(config.model.path),
            weights=weights,
            stream=stream,
            settings=settings,
            advantage_settings=self.config.advantage_settings,
            streams_gradients=config.streams_gradients,
            masks_truncated=config.algorithm.mask_truncated_responses,
            max_staleness=config.orchestrator.max_staleness,
            exact_engine=self.engine_spec(weights, engine=0) if config.engine.exact_logprobs else None,
            checkpoint=checkpoint,
            continued=self._continued,
            device=self.devices.trainer_device(),
            published_dtype=config.engine.dtype,
            peak_tflops=config.metrics.peak_tflops,
            num_ranks=config.trainer.num_ranks,
            rank_timeout_s=max(runtime.start_timeout_s, 10 * runtime.trainer_timeout_s),
            critic=self._critic_spec if config.algorithm.adv_estimator == "gae" else None,
            columns=self.aux_columns,
            teachers=self._teacher_spec,
            column_timeout_s=runtime.trainer_timeout_s if self.aux_columns else None,
            backend=config.trainer.backend,
        )

    @property
    def _teacher_spec(self) -> TeacherSpec | None:
        given = self.config.distillation
        folders = tuple(map(Path, given.folders))
        return TeacherSpec(folders, tuple(given.servers), given.timeout_s) if given.teachers else None

    @cached_property
    def num_critic_parameters(self) -> int:
        """Parameters of the critic's decoder; 0 without a critic."""
        if self.config.algorithm.adv_estimator != "gae":
            return 0
        path = self.config.critic.path
        return self.num_parameters if path is None else check_pretrained(Path(path))

    @property
    def _critic_spec(self) -> CriticSpec:
        critic, algorithm, trainer = self.config.critic, self.config.algorithm, self.config.trainer
        settings = CriticSettings(
            lr=critic.lr,
            num_steps=self.config.run.steps,
            warmup_steps=critic.warmup_steps,
            lr_decay=trainer.lr_decay,
            min_lr_ratio=trainer.min_lr_ratio,
            earlier_schedules=self.earlier_schedules,
            weight_decay=trainer.weight_decay,
            max_grad_norm=critic.max_grad_norm,
            ppo_epochs=critic.ppo_epochs,
            cliprange_value=critic.cliprange_value,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            mini_batch_tokens=trainer.mini_batch_tokens,
            micro_batch_tokens=trainer.micro_batch_tokens,
            dtype=trainer.dtype,
            activation_checkpointing=trainer.activation_checkpointing,
        )
        return CriticSpec(Path(self.config.critic.path or self.config.model.path), settings)
