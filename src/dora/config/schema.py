"""The configuration of a run: every section and key with its type, default, bounds and help.

`Config` also derives the values that follow from several keys. `dora.config.validate` checks combinations of
keys, `dora.config.load` reads TOML files.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from dora.core.types import ABLATIONS, Ablation
from dora.trainer import recipe
from dora.trainer.advantage import AdvantageSettings
from dora.trainer.recipe import (
    AdvEstimator,
    Dtype,
    KLEstimator,
    LossAggMode,
    LrDecay,
    ModelImplementation,
    PolicyLoss,
    ProximalPolicy,
    SequenceCorrection,
    TokenCorrection,
)


def _name_or_function(names: tuple[str, ...]) -> AfterValidator:
    """A value is one of these names, or names a function of the user's."""

    def check(value: str) -> str:
        if value in names or recipe.is_own(value):
            return value
        near = difflib.get_close_matches(value, names, n=1)
        raise PydanticCustomError(
            "name_or_function",
            '{hint}input should be {names}, or a function, "file.py:function"',
            {"hint": f"did you mean {near[0]}? " if near else "", "names": ", ".join(map(repr, names))},
        )

    return AfterValidator(check)


Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Duration = Annotated[str, Field(pattern=r"^\d+(\.\d+)?(us|ms|s)$")]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]
TableName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")]

UpdatePolicy = Literal["dora", "sync", "one_step", "drain", "partial", "inflight"]
AuxWorker = Literal["reference", "proximal", "critic"]
# A single string needs no list.
_AS_LIST = BeforeValidator(lambda given: [given] if isinstance(given, str) else given)
LoraTargets = Annotated[list[str], Field(min_length=1), _AS_LIST]
Betas = Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]
Trackers = Annotated[list[Literal["tensorboard", "wandb", "trackio", "otel"]], _AS_LIST]

DEFAULT_STALENESS: dict[str, int] = {
    "dora": 2, "sync": 0, "one_step": 1, "drain": 1, "partial": 2, "inflight": 2,
}  # fmt: skip
FIXED_STALENESS: dict[str, int] = {"sync": 0, "one_step": 1}  # policies whose max_staleness is part of them
BREAKS_C1 = ("partial", "inflight")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class Section(BaseModel):
    """Base of all sections: immutable, without unknown keys, type coercion or nan.

    The docstring below a key is its description.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Join the lines of each description."""
        for field in cls.model_fields.values():
            field.description = field.description and " ".join(field.description.split())


class RunSection(Section):
    """Length and seed of the run."""

    steps: int = Field(ge=0)
    """Number of training steps (count). 0: the run only evaluates model.path, as `dora eval` does."""
    seed: int = Field(default=0, ge=0)
    """Seed of the data order and of sampling (integer)."""


class ModelSection(Section):
    """The policy to train."""

    path: str
    """Model folder in Hugging Face format (config.json, *.safetensors, tokenizer.json), or the name of a
    model on the hub, such as Qwen/Qwen3-0.6B (path or name).
    """
    revision: str | None = Field(default=None, min_length=1)
    """Branch, tag or commit on the hub (name). Unset: the newest; the run's configuration has the commit."""


class DataSection(Section):
    """The training prompts."""

    path: str | None = None
    """A .jsonl, .json, .csv or .parquet file, a folder that the library `datasets` reads, or the name of a
    dataset on the hub, such as openai/gsm8k (path or name); the built-in "gcd"; or "service", for prompts
    submitted through `dora serve`. Unset: [[source]].
    """
    split: str | None = Field(default=None, min_length=1)
    """Split of a dataset folder, such as "train" (name). Unset: its only split."""
    subset: str | None = Field(default=None, min_length=1)
    """Subset of a dataset folder, its configuration in `datasets`, such as "main" (name)."""
    revision: str | None = Field(default=None, min_length=1)
    """Branch, tag or commit on the hub (name). Unset: the newest; the run's configuration has the commit."""
    prompt_key: str = Field(default="prompt", min_length=1)
    """Column that holds the prompt, as text or as chat messages (name)."""
    image_key: str = Field(default="images", min_length=1)
    """Column with the images of a prompt, in whose text each is written <image> (name)."""
    chat_template: bool = False
    """Format prompts with the tokenizer's chat template."""
    chat_template_kwargs: dict[str, JsonValue] = {}
    """Variables of the chat template, such as {enable_thinking = false} of Qwen3 (table)."""
    system_prompt: str | None = Field(default=None, min_length=1)
    """System message of conversations that have none (text)."""
    max_prompt_length: Count = 256
    """Maximum prompt length; a longer prompt is an error, or left out (tokens)."""
    filter_overlong_prompts: bool = False
    """Leave out longer prompts, also of evaluations, and report their number."""
    shuffle: bool = True
    """Shuffle the prompts in every epoch, in an order fixed by run.seed."""


class NamedSource(Section):
    """One of several datasets. The column `source` has its name, for reward functions."""

    name: TableName
    """Name in metrics and in the column `source` (name)."""
    path: str
    """As data.path, without "service" (path)."""
    split: str | None = Field(default=None, min_length=1)
    """As data.split (name)."""
    revision: str | None = Field(default=None, min_length=1)
    """As data.revision (name)."""
    subset: str | None = Field(default=None, min_length=1)
    """As data.subset (name)."""
    prompt_key: str | None = Field(default=None, min_length=1)
    """As data.prompt_key (name). Unset: data.prompt_key."""


class SourceSection(NamedSource):
    """One of several datasets of training prompts. The column `source` has its name, for reward functions."""

    ratio: float = Field(default=1.0, gt=0)
    """Share of the groups, relative to the other sources (no unit)."""


class EvalSourceSection(NamedSource):
    """One of several datasets of held-out prompts. The column `source` has its name, as in [[source]]."""


class CurriculumSection(Section):
    """Skip prompts that the policy always or never solves: responses solve a prompt with a reward >= 1."""

    easy_threshold: float | None = Field(default=None, gt=0, le=1)
    """A prompt is skipped for some epochs after a group with at least this solved share, which is the
    fraction of its responses that solve the prompt (0 to 1). Unset: no limit.
    """
    hard_threshold: float | None = Field(default=None, ge=0, lt=1)
    """A prompt is also skipped after a group with at most this solved share (0 to 1). Unset: no limit."""
    skip_epochs: int = Field(default=1, ge=1, le=100)
    """Epochs in which such a prompt is skipped (count)."""

    @property
    def is_on(self) -> bool:
        return self.easy_threshold is not None or self.hard_threshold is not None


class SamplingSection(Section):
    """How responses are sampled. Log-probs for training are taken before top_k, top_p and min_p."""

    group_size: Count = 8
    """Responses sampled per prompt (count)."""
    max_response_length: Count
    """Maximum response length; generation stops there (tokens)."""
    max_turn_length: int = Field(default=0, ge=0)
    """Maximum length of one turn of an episode (tokens). 0: max_response_length."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature, which divides the logits (no unit)."""
    top_k: int = Field(default=0, ge=0, lt=2**31)
    """Sample from the k most likely tokens (count). 0: from all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: the smallest set of tokens with cumulative probability >= top_p (0 to 1)."""
    min_p: Fraction = 0.0
    """Sample from tokens with at least this fraction of the most likely token's probability (0 to 1)."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Strings that end a response and stay in it, such as ["\\n\\n"] (list of strings)."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    """Tokens that end a response, in addition to the model's end tokens (list of ids)."""

    @property
    def has_filters(self) -> bool:
        """Whether some tokens may never be sampled."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)


class RewardSection(Section):
    """The reward function."""

    function: str | None = None
    """Reward function, "file.py:function" or "package.module:function"; or "service", for rewards submitted
    through `dora serve`. Unset: the environment scores its episodes.
    """
    timeout_s: float = Field(default=10.0, gt=0)
    """Time limit of one call; with "service", of the wait for the rewards of a group (s)."""
    num_workers: Count = 1
    """Reward worker processes, each of which scores one group at a time (count)."""
    pass_threshold: float = 1.0
    """A response with at least this reward solves its prompt, in pass@k, solved shares and [curriculum]
    (reward).
    """
    max_failed_fraction: Fraction = 0.2
    """The run stops if a larger fraction of its finished groups has failed; the fraction is taken of at least
    20 groups (0 to 1).
    """


class RewardTaskSection(Section):
    """An additional reward; each table [[reward_task]] has its own worker processes."""

    name: TableName
    """Name in overrides and error messages, such as "brevity" (lower-case name)."""
    factory: str = Field(alias="class")
    """Class or function, "file.py:Class" or "package.module:Class"; or "service", as in [reward]."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments of the class (table). An existing file or folder named by `path` becomes an absolute
    path.
    """
    weight: float = 1.0
    """Weight of this reward in the sum of rewards; [reward] has weight 1 (no unit). A reward of weight 0 is
    only logged.
    """
    num_workers: Count = 1
    """Reward worker processes (count)."""
    micro_batch_size: Count | None = None
    """Maximum responses per call, in whole groups (count). Unset: as many as micro_batch_tokens allows, or
    one group.
    """
    micro_batch_tokens: Count | None = None
    """Maximum prompt and response tokens per call (tokens). Unset: no limit."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Time limit of one call, as in [reward] (s)."""


class EnvSection(Section):
    """The environment of multi-turn episodes. Without one, every response is a single turn."""

    environment: str | None = None
    """Environment class, "file.py:Class" or "package.module:Class"."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments of the class (table)."""
    hosts: list[Annotated[str, Field(pattern=r"^[^:/]+:\d+$")]] = []
    """Remote environment servers, started by `dora env-server`, such as ["10.0.0.7:7600"] (list of
    host:port).
    """
    token_file: str | None = None
    """File with the auth token of these servers, a copy of their --token-file (path)."""
    num_workers: Count = 1
    """Environment worker processes (count)."""
    max_turns: Count = 8
    """Maximum turns of an episode (count)."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Time limit of one reset or step (s)."""
    max_retries: int = Field(default=1, ge=0)
    """How often an episode is generated again after a failure of its environment or agent, before its group
    fails (count).
    """

    @property
    def has_environments(self) -> bool:
        """Whether responses are episodes with an environment."""
        return self.environment is not None or bool(self.hosts)


class AlgorithmSection(Section):
    """Advantages and policy loss."""

    adv_estimator: Annotated[str, _name_or_function(get_args(AdvEstimator))] = "grpo"
    """Advantage estimator. grpo: reward minus the group mean, divided by the group standard deviation;
    dr_grpo: reward minus the group mean; rloo: reward minus the mean of the other responses; gigpo: grpo,
    plus an advantage of each turn of an episode among the group's turns after the same observation;
    reinforce_plus_plus: rewards normalized over the batch; reinforce_plus_plus_baseline: dr_grpo, normalized
    over the batch; gae: GAE with a critic. Or a function of one group's rewards, "file.py:function" or
    "package.module:function".
    """
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount factor of gae (per token) and gigpo (per turn)."""
    step_advantage_w: float = Field(default=1.0, ge=0)
    """In gigpo, the weight of a turn's own advantage beside that of its episode (no unit)."""
    lam: Fraction = 1.0
    """GAE lambda (0 to 1)."""
    filter_groups: bool = False
    """Replace groups whose rewards are all equal by other groups (DAPO's dynamic sampling)."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """DAPO's soft overlong punishment: responses whose length is in the last part of max_response_length lose
    reward; size of this part (tokens). 0: off.
    """
    overlong_penalty: float = Field(default=1.0, gt=0)
    """Reward that a response of max_response_length loses (reward)."""
    mask_truncated_responses: bool = False
    """Leave responses that end at their maximum length out of the loss (DAPO's overlong filtering). Rewards,
    baseline and advantages of their group count them. An episode that ends because the next observation does
    not fit is not left out.
    """
    policy_loss: Annotated[str, _name_or_function(get_args(PolicyLoss))] = "ppo_clip"
    """Policy loss. ppo_clip: PPO's clipped loss; dual_clip: the same, bounded for negative advantages;
    triplet_clip: LongCat's, for which loss_agg_mode is seq-mean-token-sum-norm; gspo: one ratio per response;
    cispo: a clipped ratio as a constant weight; reinforce: an unclipped ratio as a constant weight;
    online_dpo: DPO on the best and the worst response of each group. Or a function, "file.py:function" or
    "package.module:function".
    """
    policy_loss_options: dict[str, JsonValue] = {}
    """Keyword arguments of a policy_loss of your own."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses are aggregated, as in verl."""
    clip_ratio_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped from below at 1 - clip_ratio_low (no unit)."""
    clip_ratio_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped from above at 1 + clip_ratio_high (no unit)."""
    clip_ratio_c: float = Field(default=3.0, gt=1)
    """Upper bound of the ratio at negative advantages, in dual_clip and triplet_clip (no unit)."""
    dpo_beta: float = Field(default=0.1, gt=0)
    """DPO's beta, in online_dpo (per nat)."""
    kl_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the initial policy in the loss (no unit)."""
    kl_loss_type: KLEstimator = "k3"
    """Estimator of the KL of kl_loss_coef. k1+ and k3+ have the value of k1 and k3 and the gradient of k2."""
    entropy_coeff: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus (no unit)."""


class CorrectionSection(Section):
    """Correction of off-policy samples."""

    proximal: ProximalPolicy = "behavior"
    """Old policy of the ratio. behavior: the policy that sampled; recomputed: the trainer's policy before the
    step (decoupled PPO); interpolated: between the sampling and the current policy, by staleness.
    """
    token: TokenCorrection = "none"
    """Weight of each token, from r = proximal / behavior probability. tis: r, at most tis_cap; icepop: r from
    icepop_low to icepop_high, else 0.
    """
    sequence: SequenceCorrection = "none"
    """mis: leave out responses whose geometric mean of r is outside mis_low to mis_high."""
    tis_cap: float = Field(default=2.0, ge=1)
    """Largest weight of tis (no unit)."""
    icepop_low: Fraction = 0.5
    """Lower end of icepop's range (no unit)."""
    icepop_high: float = Field(default=5.0, ge=1)
    """Upper end of icepop's range (no unit)."""
    mis_low: Fraction = 0.9
    """Lower end of mis's range (no unit)."""
    mis_high: float = Field(default=1.1, ge=1)
    """Upper end of mis's range (no unit)."""
    staleness_decay: float = Field(default=1.0, gt=0, le=1)
    """A response has weight staleness_decay ** staleness (no unit). 1: all weigh the same."""


class DistillationSection(Section):
    """On-policy distillation: teachers score each token of the policy's own responses (arXiv 2306.13649)."""

    teachers: list[str] = []
    """Model folders, or URLs of OpenAI-compatible servers that return log-probs of prompts (list). Several
    teachers: the mean of their log-probs. Empty: no distillation.
    """
    coef: float = Field(default=1.0, gt=0)
    """Weight of log teacher - log policy, the advantage of each token (per nat)."""
    reward_coef: float = Field(default=0.0, ge=0)
    """Weight of the advantage from rewards, which is added to it (no unit). 0: rewards are only measured."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of a request to a teacher's server, retries included (s)."""

    @property
    def servers(self) -> list[str]:
        """The teachers that are URLs."""
        return [teacher for teacher in self.teachers if teacher.startswith(("http://", "https://"))]

    @property
    def folders(self) -> list[str]:
        """The other teachers."""
        return [teacher for teacher in self.teachers if teacher not in self.servers]


class CriticSection(Section):
    """The critic of adv_estimator = gae, which predicts the value of every token."""

    path: str | None = None
    """Model folder that the critic starts from, with a new value head (path). Unset: model.path."""
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate of the critic's AdamW (per step)."""
    warmup_steps: int = Field(default=0, ge=0)
    """Linear warm-up of this learning rate (steps)."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient norm above which the critic's gradients are clipped (no unit)."""
    ppo_epochs: Count = 1
    """Passes of the critic over each batch (count)."""
    cliprange_value: float = Field(default=0.5, gt=0)
    """Clip range of a value around its old value (reward)."""


class TrainerSection(Section):
    """Batch, optimizer and processes of the trainer."""

    batch_size: Count
    """Groups per training step (count)."""
    mini_batch_tokens: Count | None = None
    """Response tokens per optimizer update; a batch is split into updates of about this size (tokens). Unset:
    one update per batch.
    """
    micro_batch_tokens: Count = 4096
    """Maximum prompt and response tokens of one forward and backward pass (tokens)."""
    logits_chunk_tokens: Count | None = None
    """Response tokens whose logits are in memory at the same time (tokens). Unset: 256 on the CPU, 2048 on a
    GPU.
    """
    torch_compile: bool | None = None
    """Compile the model's layers and its log-probs with torch.compile. The first step takes about half a
    minute longer, and so does the first batch of another kind, such as one without shared prompts. Layers
    need bfloat16 on a GPU. No effect on experts, a critic, and models that transformers computes. Unset: on a
    GPU in bfloat16.
    """
    lr: float = Field(gt=0)
    """Peak learning rate of AdamW (per step)."""
    warmup_steps: int = Field(default=0, ge=0)
    """Linear warm-up of the learning rate (steps)."""
    lr_decay: LrDecay = "linear"
    """Learning rate after the warm-up. linear, cosine: falls to lr * min_lr_ratio at the last step; constant:
    stays.
    """
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Fraction of lr that a linear or cosine lr_decay falls to, of the critic's, too (no unit)."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay (per step and lr)."""
    betas: Betas = [0.9, 0.999]
    """AdamW's beta1 and beta2, of the policy: the decay of its two moments (no unit)."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient norm above which gradients are clipped (no unit)."""
    device: Device = "cpu"
    """Device of the trainer. "cpu"; "cuda": the last GPUs, one for each rank; "cuda:N": GPU N for the first
    rank and the next ones for the others.
    """
    num_ranks: Count = 1
    """Trainer processes, which shard model and micro-batches, each on its own device (count)."""
    dtype: Dtype = "float32"
    """Data type of forward and backward passes; the optimizer works in float32."""
    offload_optimizer: bool = False
    """Keep AdamW's moments (8 bytes per parameter) in host memory; each update copies them to the GPU and
    back.
    """
    activation_checkpointing: bool = False
    """Keep only the input of each layer and recompute the rest in the backward pass."""
    model: ModelImplementation = "auto"
    """Implementation of the policy's forward pass. dora: DORA-RL's decoder, for Llama, Qwen2, Qwen3 and
    Qwen3-MoE; transformers: any causal language model of transformers; auto: transformers for models that
    DORA-RL's decoder does not support.
    """
    streaming: bool | None = None
    """Accumulate gradients while the batch fills up. Unset: wherever the objective allows it."""
    deterministic: bool = False
    """Sum gradients in the order of group ids, not in the order in which groups finish."""
    lora_rank: int = Field(default=0, ge=0)
    """Rank of LoRA adapters to train (count). 0: train all weights."""
    lora_alpha: float = Field(default=32.0, gt=0)
    """LoRA adapters are scaled by lora_alpha / lora_rank (no unit)."""
    lora_targets: LoraTargets = ["all-linear"]
    """Linear layers that get a LoRA adapter (list of names, as q_proj). all-linear: those of the model,
    without its head and the experts of a mixture.
    """
    routing_replay: bool = False
    """Mixture of experts: the trainer routes each token to the experts that the engine chose."""
    aux_workers: list[AuxWorker] = []
    """Computations in auxiliary worker processes beside the trainer (list of names). reference: log-probs of
    the initial policy; proximal: log-probs before the step; critic: values, and the critic's training.
    """
    aux_device: Device | None = None
    """Device of the auxiliary workers: "cpu", "cuda" or "cuda:N". Unset: the trainer's."""
    elastic: bool = False
    """While the trainer waits for a batch, one more engine decodes on the trainer's device."""
    save_freq: int = Field(default=50, ge=0)
    """Steps between two checkpoints (steps). 0: none during training. A run always saves one when it ends or
    stops.
    """
    keep_last: Count = 2
    """Number of newest checkpoints to keep (count)."""
    keep_best: bool = False
    """Keep one more checkpoint: of the evaluated versions, that with the highest val/reward_mean, or without
    sampled responses val/greedy_reward_mean. A version that is being evaluated keeps its checkpoint, too.
    """
    continue_from: str | None = None
    """Checkpoint of another run whose weights and optimizer moments the run starts with, as --continue-from
    sets it (path). Unset: the weights of model.path and a new optimizer.
    """
    backend: str | None = None
    """Class of another training engine, "file.py:Class" or "package.module:Class". Unset: DORA-RL's own."""


class EngineSection(Section):
    """The rollout engines."""

    num_engines: Count = 2
    """Engine processes (count)."""
    max_num_seqs: Count = 32
    """Requests that one engine decodes at once (count)."""
    max_num_queued: int | None = Field(default=None, ge=0)
    """Requests that wait in one engine beyond max_num_seqs, so that it refills a free row without waiting for
    the driver (count). Unset: 1, or 0 with episodes, whose rows are free between turns.
    """
    version_slots: Count | None = None
    """Policy versions that one engine holds at once (count). Unset: max_staleness + 1, plus 1 with
    eval.every; with partial and inflight at most 2, or 3 with eval.every. With another backend than DORA-RL's
    own: 1, or as many as partial and inflight need.
    """
    num_kv_blocks: Count | None = None
    """KV cache of one engine (blocks of 16 tokens). Unset: room for max_num_seqs sequences of full length."""
    max_prefill_tokens: Count | None = None
    """Prompt tokens that an engine computes beside a decode step; eight times as many while nothing decodes
    (tokens). Unset: 512 on the CPU, 4096 on a GPU.
    """
    device: Device = "cpu"
    """Device of the engines. "cpu"; "cuda": one GPU each, apart from the trainer's; "cuda:N": GPU N for
    all.
    """
    gpus_per_engine: Count = 1
    """GPUs among which each engine divides its model, with backend vllm or sglang (tensor parallelism)
    (count).
    """
    dtype: Dtype = "float32"
    """Data type of weights and KV cache, and of published versions."""
    kv_transfer: Literal["auto", "shared", "staged", "ipc", "none"] = "auto"
    """How the KV of a migrating request reaches another engine. shared: from the first one's KV cache, on the
    CPU; staged: through host memory; ipc: from the first one's GPU (CUDA IPC), on one machine; none: it is
    computed again. auto: shared on the CPU, staged on a GPU. Between vLLM or SGLang servers KV moves through
    files in memory or over NIXL (docs/vllm.md, docs/sglang.md); with none it is computed again.
    """
    kernels: Literal["auto", "numba", "eager"] = "auto"
    """CPU kernels. numba: compiled; eager: plain torch; auto: numba where it works."""
    backend: str | None = None
    """Another inference engine: "vllm", "vllm-lora", "sglang", "sglang-lora", "transformers" (slow), or a
    class, "file.py:Class" or "package.module:Class". Unset: DORA-RL's own.
    """
    options: dict[str, JsonValue] | None = None
    """Keyword arguments of the backend's class (table)."""
    exact_logprobs: bool = False
    """Compute batch-invariantly: log-probs of engines and trainer are equal bit for bit."""
    min_step_time: Duration = "0ms"
    """Minimum duration of a decode step, such as "8ms", to imitate an accelerator on a CPU (us, ms or s)."""

    @property
    def min_step_time_s(self) -> float:
        """`min_step_time` in seconds."""
        number, unit = re.findall(r"[\d.]+|[a-z]+", self.min_step_time)
        return float(number) * _SECONDS[unit]


class FleetSection(Section):
    """Additional engines with their own backend; one table [[fleet]] for each kind."""

    name: TableName
    """Name in overrides and error messages, such as "vllm" (lower-case name)."""
    backend: str
    """Inference engine of this kind, as in [engine]."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments of the backend's class (table)."""
    num_engines: Count = 1
    """Engine processes of this kind (count)."""
    max_num_seqs: Count | None = None
    """Requests that one of these engines decodes at once (count). Unset: as in [engine]."""
    version_slots: Count | None = None
    """Policy versions that one of these engines holds at once (count). Unset: 1; with partial and inflight at
    most 2, or 3 with eval.every.
    """


class OrchestratorSection(Section):
    """How far generation runs ahead of training, and where requests run."""

    update_policy: UpdatePolicy = "dora"
    """When new versions are used. dora: several versions generate at once, and a response is finished by the
    version that started it; sync: generate a batch, then train it; one_step: generate one batch ahead; drain:
    one version generates batches_per_version batches before the next one; partial and inflight: responses
    continue with newer weights, which breaks guarantee C1; partial recomputes their KV cache, inflight keeps
    it.
    """
    max_staleness: int = Field(default=DEFAULT_STALENESS["dora"], ge=0)
    """Maximum staleness of a trained sample (versions). 0: on-policy. Unset: 2, and 1 with drain; it is
    always 0 with sync and 1 with one_step.
    """
    staleness_mode: Literal["fixed", "adaptive"] = "fixed"
    """Staleness bound of new groups. fixed: max_staleness; adaptive: between 0 and max_staleness, by
    effective sample size (ESS) and KL of the trained batches.
    """
    min_ess: float = Field(default=0.9, gt=0, lt=1)
    """adaptive: the bound decreases if the mean ESS of the batches is lower (fraction of tokens)."""
    max_kl: float = Field(default=0.01, gt=0)
    """adaptive: the bound decreases if the mean KL to the sampling policies is higher (nats per token)."""
    staleness_window: Count = 8
    """adaptive: batches over which 1 - ESS and KL are averaged. If both means are at most half of their
    limits, the bound rises by 1 (count).
    """
    batches_per_version: Count = 1
    """drain: batches that one version generates (count)."""
    slack: int = Field(default=0, ge=0)
    """Number of groups by which admission stays below the bound, so that training can overtake a straggler
    (count).
    """
    placement: Literal["dynamic", "static", "colocated"] = "dynamic"
    """dynamic: engines change versions and requests migrate between engines, with their KV cache where
    engine.kv_transfer allows it, else prefilled again; static: neither does; colocated: dynamic, and engines
    pause while the trainer uses their device.
    """
    weight_sync_interval: Count = 1
    """n: engines load every n-th version, and another version only if the bound requires it (versions). Only
    with dora, partial and inflight.
    """
    prioritize_stragglers: bool | None = None
    """While the trainer waits for a group at its deadline, engines that run requests of such groups decode
    only these. Unset: true if all engines are DORA-RL's own.
    """
    balance_running: bool = False
    """Balance the number of running requests across engines."""
    rebalance_interval_s: float = Field(default=1.0, gt=0)
    """Maximum time between two checks for useful migrations (s)."""
    kv_watermark: float = Field(default=0.9, gt=0, le=1)
    """If an engine uses a larger fraction of its KV cache, requests migrate to other engines (0 to 1)."""
    ablations: list[Ablation] = Field(
        default=[],
        description="dora: rules to turn off, to measure what each contributes (list of names). "
        "docs/policies.md describes them: " + ", ".join(ABLATIONS) + ".",
    )

    @model_validator(mode="before")
    @classmethod
    def default_max_staleness(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """Give `max_staleness` the default of the chosen update policy."""
        if not isinstance(raw, dict):
            return raw
        default = DEFAULT_STALENESS.get(str(raw.get("update_policy", "dora")))
        return raw if default is None else {"max_staleness": default, **raw}


class WeightsSection(Section):
    """How engines load new versions."""

    load: Literal["eager", "deferred"] = "eager"
    """eager: every engine loads a version as soon as it can; deferred: up to a quarter of the engines at a
    time, each when it has a free row or the bound requires it, from a prefetched copy in host memory.
    """
    skip_below_kl: float | None = Field(default=None, gt=0)
    """An engine skips a version whose KL to the version that it holds is lower, unless the bound requires the
    load (nats per token). Unset: no version is skipped. Only with dora, partial and inflight.
    """


class EvalSection(Section):
    """Evaluation on held-out prompts, before, during and after training."""

    path: str | None = None
    """Held-out prompts: a file or folder, as in data.path (path), or "gcd". Unset: [[eval_source]], or no
    evaluation.
    """
    split: str | None = Field(default=None, min_length=1)
    """Split of a dataset folder, such as "test" (name). Unset: its only split."""
    revision: str | None = Field(default=None, min_length=1)
    """As data.revision (name)."""
    subset: str | None = Field(default=None, min_length=1)
    """As data.subset (name)."""
    num_prompts: int = Field(default=256, ge=0)
    """Maximum number of prompts of each dataset, from its start (count). 0: no evaluation."""
    greedy: bool = True
    """Generate one greedy response for each prompt."""
    num_samples: int = Field(default=1, ge=0)
    """Sampled responses per prompt (count)."""
    temperature: float | None = Field(default=None, gt=0)
    """As sampling.temperature, of the sampled responses (no unit). Unset: sampling.temperature."""
    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    """As sampling.top_k (count). Unset: sampling.top_k."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """As sampling.top_p (0 to 1). Unset: sampling.top_p."""
    min_p: Fraction | None = None
    """As sampling.min_p (0 to 1). Unset: sampling.min_p."""
    every: int = Field(default=0, ge=0)
    """Steps between two evaluations during training (steps). 0: only before and after it."""
    seed: int = Field(default=0, ge=0)
    """Seed of sampling in evaluations (integer)."""


class MetricsSection(Section):
    """Metrics of each step. metrics.jsonl in the run folder always has them."""

    report_to: Trackers = []
    """Experiment trackers to report to, such as ["tensorboard"] (list of names). Each needs the extra of that
    name.
    """
    project: str = Field(default="dora", min_length=1)
    """Project name in wandb and trackio, service name in OpenTelemetry."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Peak performance of one trainer device, for perf/mfu/actor (TFLOP/s). Unset: the data sheet's value for
    common GPUs; no value for other devices.
    """


class JournalSection(Section):
    """The journal: the record of every event and action of the run."""

    fsync: bool = False
    """Flush every record to disk, so that the journal survives a power failure; slower."""


class RuntimeSection(Section):
    """The processes of the run, and the time limits after which they count as lost."""

    kind: Literal["local", "ray"] = "local"
    """Where workers run. local: processes on this machine; ray: actors of a Ray cluster."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """A process that takes longer to start is lost; while the run starts, the run fails (s)."""
    heartbeat_timeout_s: float = Field(default=15.0, gt=0)
    """An engine or reward worker without a heartbeat for this long is lost (s). A driver that runs late
    itself waits up to four times as long.
    """
    trainer_timeout_s: float = Field(default=60.0, gt=0)
    """A trainer process without a heartbeat for this long is lost (s)."""
    step_timeout_s: float = Field(default=3600.0, gt=0)
    """A trainer that takes longer for one request of the driver, such as a step, is lost (s)."""
    migration_timeout_s: float = Field(default=5.0, gt=0)
    """A migration that copies nothing for this long is aborted (s)."""
    max_restarts: int = Field(default=3, ge=0)
    """Maximum consecutive restarts of the trainer, or of one other process (count)."""
    output_interval_s: float = Field(default=0.5, ge=0)
    """How often engines report the tokens of unfinished responses, which then survive a crash of the engine
    or of the run (s). 0: never; these responses restart.
    """


class RaySection(Section):
    """The Ray cluster of runtime.kind = "ray"."""

    address: Annotated[str, Field(pattern=r"^(auto|[^:/\s]+:\d+)$")] | None = None
    """Running cluster, host:port, or "auto" for the cluster of this machine. Unset: the run starts Ray on
    this machine and stops it at the end.
    """
    dashboard: bool = False
    """Serve Ray's dashboard on loopback while the run starts Ray itself. Needs ray[default]."""
    spread: bool = True
    """Spread engines and reward workers over the nodes. false: use as few nodes as possible."""
    max_engines: int | None = Field(default=None, ge=1)
    """Engines are added up to this number as soon as nodes have capacity (count). Unset:
    engine.num_engines.
    """
    trainer_nodes: Literal["driver", "any"] = "driver"
    """Nodes of the trainer's ranks. driver: all run on the driver's node; any: only the first must, and ranks
    exchange weights and gradients without authentication and encryption.
    """
    engine_cpus: float = Field(default=1.0, ge=0)
    """CPUs reserved for each engine (count)."""
    trainer_cpus: float = Field(default=1.0, ge=0)
    """CPUs reserved for each trainer process and each auxiliary worker (count)."""
    reward_cpus: float = Field(default=1.0, ge=0)
    """CPUs reserved for each reward worker (count)."""


class ServiceSection(Section):
    """The HTTP service of `dora serve`."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on. Traffic is not encrypted: an address that other machines reach belongs in a
    private network.
    """
    port: int = Field(default=0, ge=0, lt=2**16)
    """Port to listen on (number). 0: a free port."""
    token_file: str | None = None
    """File with the auth token of all requests, at least 16 characters (path). Unset: a new token for each
    run, in service.json of its folder.
    """
    max_body_bytes: Count = 2**20
    """Maximum size of a request body; uploads of weights have their own limit (bytes)."""
    trainer: Literal["internal", "external"] = "internal"
    """external: an external trainer fetches each batch and uploads the new weights."""
    agents: bool = False
    """External agents generate the responses, in sessions of the service."""
    session_timeout_s: float = Field(default=60.0, gt=0)
    """A session without a request for this long has failed (s)."""
    idle_timeout_s: float = Field(default=3600.0, gt=0)
    """A run that waits for external input for this long stops (s)."""
    linger_s: float = Field(default=5.0, ge=0)
    """After the end of the run the service answers requests with 410 for this long, so that clients learn how
    the run ended (s). 0: the service ends with the run.
    """


class EngineKind(NamedTuple):
    """Engines with the same settings; `key` is the section that configures them."""

    key: str
    backend: str | None
    options: dict[str, JsonValue]
    num_engines: int
    max_num_seqs: int
    version_slots: int


class Config(Section):
    """A complete run: what to train on, how to train, how to generate, and the processes that do it."""

    run: RunSection
    model: ModelSection
    data: DataSection = DataSection()
    source: list[SourceSection] = []
    curriculum: CurriculumSection = CurriculumSection()
    sampling: SamplingSection
    reward: RewardSection = RewardSection()
    reward_task: list[RewardTaskSection] = []
    env: EnvSection = EnvSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    correction: CorrectionSection = CorrectionSection()
    critic: CriticSection = CriticSection()
    distillation: DistillationSection = DistillationSection()
    trainer: TrainerSection
    engine: EngineSection = EngineSection()
    fleet: list[FleetSection] = []
    orchestrator: OrchestratorSection = OrchestratorSection()
    weights: WeightsSection = WeightsSection()
    eval: EvalSection = EvalSection()
    eval_source: list[EvalSourceSection] = []
    metrics: MetricsSection = MetricsSection()
    journal: JournalSection = JournalSection()
    runtime: RuntimeSection = RuntimeSection()
    ray: RaySection = RaySection()
    service: ServiceSection = ServiceSection()

    @property
    def samples_per_step(self) -> int:
        """batch_size * group_size."""
        return self.trainer.batch_size * self.sampling.group_size

    @property
    def max_sequence_length(self) -> int:
        """max_prompt_length + max_response_length, in tokens."""
        return self.data.max_prompt_length + self.sampling.max_response_length

    @property
    def max_groups_in_flight(self) -> int:
        """Groups admitted but not trained: at most (max_staleness + 1) * batch_size - slack."""
        return (self.orchestrator.max_staleness + 1) * self.trainer.batch_size - self.orchestrator.slack

    @property
    def max_concurrent_requests(self) -> int:
        """Sum of num_engines * max_num_seqs; an elastic trainer counts as one more engine of [engine]."""
        num_seqs = sum(kind.num_engines * kind.max_num_seqs for kind in self.engine_kinds)
        return num_seqs + self.trainer.elastic * self.engine.max_num_seqs

    @property
    def engine_kinds(self) -> list[EngineKind]:
        """The engines of [engine], then those of each [[fleet]]."""
        own = self.engine
        first = EngineKind(
            "engine", own.backend, own.options or {}, own.num_engines, own.max_num_seqs, self.version_slots
        )
        others = [
            EngineKind(
                f"fleet.{fleet.name}",
                fleet.backend,
                fleet.options,
                fleet.num_engines,
                fleet.max_num_seqs or own.max_num_seqs,
                fleet.version_slots or (self.inflight_version_slots if self.breaks_c1 else 1),
            )
            for fleet in self.fleet
        ]
        return [first, *others]

    @property
    def num_engines(self) -> int:
        """Engines of all kinds, without the one that an elastic trainer adds."""
        return sum(kind.num_engines for kind in self.engine_kinds)

    def kind_of_engine(self, engine: int) -> EngineKind:
        """The kind of an engine by its number; engines that join later are of [engine]."""
        kinds = self.engine_kinds
        numbered = [kind for kind in kinds for _ in range(kind.num_engines)]
        return numbered[engine] if engine < len(numbered) else kinds[0]

    @property
    def num_reward_workers(self) -> int:
        """Processes that score responses; rewards from the service need none."""
        functions = [(self.reward.function, self.reward.num_workers)]
        functions += [(task.factory, task.num_workers) for task in self.reward_task]
        return sum(count for function, count in functions if function not in (None, "service"))

    @property
    def version_slots(self) -> int:
        """engine.version_slots. Unset: what partial and inflight need; otherwise all live versions on
        DORA-RL's own engines, and 1 on another backend.
        """
        if self.engine.version_slots is not None:
            return self.engine.version_slots
        if self.breaks_c1:
            return self.inflight_version_slots
        return self.max_live_versions if self.engine.backend is None else 1

    @property
    def prioritizes_stragglers(self) -> bool:
        """orchestrator.prioritize_stragglers, or whether all engines are DORA-RL's own."""
        if self.orchestrator.prioritize_stragglers is not None:
            return self.orchestrator.prioritize_stragglers
        return all(kind.backend is None for kind in self.engine_kinds)

    @property
    def inflight_version_slots(self) -> int:
        """Slots under partial and inflight: the old and the new version, and an evaluated one."""
        return min(self.max_live_versions, 2 + self.evaluates_during_training)

    @property
    def max_live_versions(self) -> int:
        """max_staleness + 1, and one that is evaluated with eval.every."""
        return self.orchestrator.max_staleness + 1 + self.evaluates_during_training

    @property
    def has_held_out(self) -> bool:
        """Whether held-out prompts are named."""
        return self.eval.path is not None or bool(self.eval_source)

    @property
    def resume_command(self) -> str:
        """The command that continues the run, without the run's folder."""
        return f"dora {'train' if self.external_source is None else 'serve'} --resume"

    @property
    def logs_evaluations(self) -> bool:
        """Whether metrics.jsonl has the evaluations: there is a curve of them, or nothing else."""
        return self.eval.every > 0 or self.run.steps == 0

    @property
    def eval_sampling(self) -> SamplingSection:
        """[sampling] as it applies to the sampled responses of evaluations."""
        own = {key: getattr(self.eval, key) for key in ("temperature", "top_k", "top_p", "min_p")}
        return self.sampling.model_copy(update={k: value for k, value in own.items() if value is not None})

    @property
    def evaluates_during_training(self) -> bool:
        """Whether held-out prompts are generated during training."""
        return self.has_held_out and self.eval.every > 0

    @property
    def breaks_c1(self) -> bool:
        """Whether running responses continue with newer versions."""
        return self.orchestrator.update_policy in BREAKS_C1

    @property
    def num_queued(self) -> int:
        """`engine.max_num_queued`, or its default."""
        chosen = self.engine.max_num_queued
        return chosen if chosen is not None else int(not self.has_episodes)

    @property
    def has_episodes(self) -> bool:
        """Whether responses are episodes of several turns, with environments or external agents."""
        return self.env.has_environments or self.service.agents

    @property
    def has_static_placement(self) -> bool:
        """Whether requests never migrate: placement = static, or C1 is broken."""
        return self.orchestrator.placement == "static" or self.breaks_c1

    @property
    def start(self) -> tuple[str, str]:
        """The key and the path of the weights of version 0."""
        path = self.trainer.continue_from
        return ("model.path", self.model.path) if path is None else ("trainer.continue_from", path)

    @property
    def streams_gradients(self) -> bool:
        """trainer.streaming, or whether the objective allows it."""
        wanted = self.trainer.streaming
        return self.why_not_streaming is None if wanted is None else wanted

    @property
    def why_not_streaming(self) -> str | None:
        """Why gradients cannot be accumulated while the batch fills up; None if they can."""
        estimator = self.algorithm.adv_estimator
        if recipe.advantage_scope(estimator) == "batch":
            return f"algorithm.adv_estimator = {estimator}: its advantages need the whole batch"
        if self.trainer.mini_batch_tokens:
            return "trainer.mini_batch_tokens: the split into updates needs all response lengths"
        if self.trainer.deterministic:
            return "trainer.deterministic = true: the first group in order may finish last"
        if self.orchestrator.placement == "colocated" or self.trainer.elastic:
            return "a colocated or elastic trainer: it runs only when the batch is complete"
        return None

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weight of each reward task in the sum; the function of the section [reward] has weight 1."""
        section = {} if self.reward.function is None else {"reward": 1.0}
        return section | {task.name: task.weight for task in self.reward_task}

    @property
    def aux_workers(self) -> set[AuxWorker]:
        """trainer.aux_workers; with teachers also the one that asks them, in place of a reference policy."""
        asks_teachers: set[AuxWorker] = {"reference"} if self.distillation.teachers else set()
        return {*self.trainer.aux_workers} | asks_teachers

    @property
    def advantage_settings(self) -> AdvantageSettings:
        """How rewards become advantages."""
        algorithm = self.algorithm
        return AdvantageSettings(
            algorithm.adv_estimator,
            self.sampling.max_response_length,
            algorithm.overlong_buffer_tokens,
            algorithm.overlong_penalty,
            is_paired=algorithm.policy_loss == "online_dpo",
            teacher_coef=self.distillation.coef if self.distillation.teachers else 0.0,
            reward_coef=self.distillation.reward_coef if self.distillation.teachers else 1.0,
            gamma=algorithm.gamma,
            step_advantage_w=algorithm.step_advantage_w,
        )

    @property
    def external_source(self) -> str | None:
        """The first setting that makes the run depend on input from outside; None if none does."""
        sources = {
            "service.agents = true": self.service.agents,
            'service.trainer = "external"': self.service.trainer == "external",
            'data.path = "service"': self.data.path == "service",
            'reward.function = "service"': self.reward.function == "service",
            'class = "service" of a [[reward_task]]': any(
                task.factory == "service" for task in self.reward_task
            ),
        }
        return next((setting for setting, is_set in sources.items() if is_set), None)


LIST_SECTIONS: dict[str, type[Section]] = {
    "source": SourceSection,
    "eval_source": EvalSourceSection,
    "reward_task": RewardTaskSection,
    "fleet": FleetSection,
}  # sections that are lists of named tables


def iter_sections() -> Iterator[tuple[str, type[Section]]]:
    """(name, class) of every section, in order."""
    for name, field in Config.model_fields.items():
        section = LIST_SECTIONS.get(name, field.annotation)
        assert isinstance(section, type)
        yield name, section


def iter_keys() -> Iterator[tuple[str, str, FieldInfo]]:
    """(section, key, field) of every key, in order."""
    for name, section in iter_sections():
        for attribute, field in section.model_fields.items():
            yield name, field.alias or attribute, field


def iter_values(config: Config) -> Iterator[tuple[str, Any]]:
    """("section.key", value) of every key; keys of a list of tables are "section.NAME.key"."""
    tables = [(name, getattr(config, name)) for name in Config.model_fields if name not in LIST_SECTIONS]
    tables += [(f"{name}.{table.name}", table) for name in LIST_SECTIONS for table in getattr(config, name)]
    for name, table in tables:
        for attribute, field in type(table).model_fields.items():
            yield f"{name}.{field.alias or attribute}", getattr(table, attribute)
