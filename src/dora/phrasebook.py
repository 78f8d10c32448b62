"""What other trainers call the keys of a configuration, for people who come from them.

An unknown key is looked up here first; the documentation has the same words as tables. A remark says where a
word means something else, or counts in other units.
"""

from __future__ import annotations

from typing import NamedTuple


class Word(NamedTuple):
    """A key of another trainer, and DORA's for the same thing."""

    theirs: str
    ours: str  # section.key
    remark: str = ""


GROUPS = "in groups, of all devices together"
EPOCHS = "in steps: epochs x prompts / trainer.batch_size"
LOSS = "it is in the loss, never in the reward; 0 is off"
UPDATES = "one update a step, or one for each so many answer tokens"
TOKENS = "in tokens, prompts and answers"
VERSIONS = "in versions of the policy"
ROWS = "of one engine"

PHRASEBOOK: dict[str, tuple[Word, ...]] = {
    "TRL": (
        Word("num_generations", "sampling.group_size"),
        Word("max_completion_length", "sampling.max_response_length"),
        Word("per_device_train_batch_size", "trainer.batch_size", GROUPS),
        Word("generation_batch_size", "trainer.batch_size", GROUPS),
        Word("gradient_accumulation_steps", "trainer.micro_batch_tokens", TOKENS),
        Word("max_steps", "run.steps"),
        Word("num_train_epochs", "run.steps", EPOCHS),
        Word("learning_rate", "trainer.lr"),
        Word("lr_scheduler_type", "trainer.lr_decay"),
        Word("beta", "algorithm.kl_loss_coef"),
        Word("epsilon", "algorithm.clip_ratio_low"),
        Word("epsilon_high", "algorithm.clip_ratio_high"),
        Word("delta", "algorithm.clip_ratio_c"),
        Word("loss_type", "algorithm.loss_agg_mode", "for dr_grpo also algorithm.adv_estimator"),
        Word("scale_rewards", "algorithm.adv_estimator", "grpo divides by the deviation, dr_grpo does not"),
        Word("importance_sampling_level", "algorithm.policy_loss", "gspo has one ratio per answer"),
        Word("entropy_coef", "algorithm.entropy_coeff"),
        Word("vllm_importance_sampling_correction", "correction.token", "tis"),
        Word("vllm_importance_sampling_cap", "correction.tis_cap"),
        Word("max_inflight_tasks", "engine.max_rows", ROWS),
        Word("weight_sync_steps", "orchestrator.load_interval"),
        Word("model_name_or_path", "model.path", "a folder"),
        Word("dataset_name", "data.path", "a file or a folder"),
        Word("reward_funcs", "reward.function"),
        Word("reward_weights", "task.weight", "a table [[task]] for each reward but the first"),
        Word("bf16", "trainer.dtype"),
        Word("gradient_checkpointing", "trainer.activation_checkpointing"),
        Word("lora_r", "trainer.lora_rank"),
        Word("save_steps", "trainer.save_freq"),
        Word("save_total_limit", "trainer.keep_last"),
        Word("eval_steps", "eval.every"),
        Word("num_generations_eval", "eval.num_samples"),
    ),
    "verl": (
        Word("actor_rollout_ref.rollout.n", "sampling.group_size"),
        Word("data.train_batch_size", "trainer.batch_size", "in groups"),
        Word("data.train_files", "data.path"),
        Word("data.val_files", "eval.path"),
        Word("actor_rollout_ref.model.path", "model.path"),
        Word("actor_rollout_ref.actor.optim.lr", "trainer.lr"),
        Word("actor_rollout_ref.actor.optim.lr_warmup_steps", "trainer.warmup_steps"),
        Word("actor_rollout_ref.actor.ppo_mini_batch_size", "trainer.batch_tokens", UPDATES),
        Word("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "trainer.micro_batch_tokens", TOKENS),
        Word("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "trainer.micro_batch_tokens", TOKENS),
        Word("actor_rollout_ref.actor.clip_ratio", "algorithm.clip_ratio_low", "and clip_ratio_high"),
        Word("actor_rollout_ref.actor.use_kl_loss", "algorithm.kl_loss_coef", "0 is off"),
        Word("actor_rollout_ref.actor.grad_clip", "trainer.max_grad_norm"),
        Word("actor_rollout_ref.rollout.max_num_seqs", "engine.max_rows", ROWS),
        Word("actor_rollout_ref.rollout.gpu_memory_utilization", "engine.kv_blocks", "blocks of 16 tokens"),
        Word("actor_rollout_ref.rollout.val_kwargs.n", "eval.num_samples"),
        Word("algorithm.kl_ctrl.kl_coef", "algorithm.kl_loss_coef", LOSS),
        Word("algorithm.use_kl_in_reward", "algorithm.kl_loss_coef", LOSS),
        Word("algorithm.filter_groups.enable", "algorithm.filter_groups"),
        Word("algorithm.norm_adv_by_std_in_grpo", "algorithm.adv_estimator", "dr_grpo does not divide"),
        Word("async_training.staleness_threshold", "orchestrator.max_staleness", VERSIONS),
        Word("max_off_policy_threshold", "orchestrator.max_staleness", VERSIONS),
        Word("custom_reward_function.path", "reward.function", "with the function's name behind a colon"),
        Word("critic.optim.lr", "critic.lr"),
        Word("critic.model.path", "critic.path"),
        Word("enable_gradient_checkpointing", "trainer.activation_checkpointing"),
        Word("trainer.total_training_steps", "run.steps"),
        Word("trainer.total_epochs", "run.steps", EPOCHS),
        Word("trainer.test_freq", "eval.every"),
        Word("trainer.n_gpus_per_node", "trainer.num_ranks", "of the trainer alone"),
        Word("trainer.logger", "metrics.report_to"),
        Word("trainer.project_name", "metrics.project"),
    ),
    "prime-rl": (
        Word("rollouts_per_example", "sampling.group_size"),
        Word("orchestrator.batch_size", "trainer.batch_size", "in groups"),
        Word("sampling.max_tokens", "sampling.max_response_length"),
        Word("sampling.max_completion_tokens", "sampling.max_response_length"),
        Word("max_async_level", "orchestrator.max_staleness"),
        Word("max_off_policy_steps", "orchestrator.max_staleness"),
        Word("trainer.optim.lr", "trainer.lr"),
        Word("kl_tau", "algorithm.kl_loss_coef"),
        Word("ckpt.interval", "trainer.save_freq"),
    ),
    "slime": (
        Word("n_samples_per_prompt", "sampling.group_size"),
        Word("rollout_batch_size", "trainer.batch_size", "in groups"),
        Word("global_batch_size", "trainer.batch_tokens", UPDATES),
        Word("num_rollout", "run.steps"),
        Word("rollout_max_response_len", "sampling.max_response_length"),
        Word("rollout_max_prompt_len", "data.max_prompt_length"),
        Word("rollout_temperature", "sampling.temperature"),
        Word("rollout_num_gpus", "engine.num_engines"),
        Word("hf_checkpoint", "model.path"),
        Word("prompt_data", "data.path"),
        Word("input_key", "data.prompt_key"),
        Word("apply_chat_template", "data.chat_template"),
        Word("custom_rm_path", "reward.function"),
        Word("advantage_estimator", "algorithm.adv_estimator"),
        Word("eps_clip", "algorithm.clip_ratio_low"),
        Word("eps_clip_high", "algorithm.clip_ratio_high"),
        Word("eps_clip_c", "algorithm.clip_ratio_c"),
        Word("use_tis", "correction.token", "tis"),
        Word("tis_clip", "correction.tis_cap"),
        Word("max_tokens_per_gpu", "trainer.micro_batch_tokens", TOKENS),
        Word("max_weight_staleness", "orchestrator.max_staleness"),
        Word("save_interval", "trainer.save_freq"),
        Word("eval_interval", "eval.every"),
        Word("n_samples_per_eval_prompt", "eval.num_samples"),
    ),
    "AReaL": (
        Word("gconfig.n_samples", "sampling.group_size"),
        Word("gconfig.max_new_tokens", "sampling.max_response_length"),
        Word("train_dataset.batch_size", "trainer.batch_size", "in groups"),
        Word("train_dataset.path", "data.path"),
        Word("max_head_offpolicyness", "orchestrator.max_staleness"),
        Word("max_concurrent_rollouts", "engine.max_rows", ROWS),
        Word("actor.path", "model.path"),
        Word("actor.optimizer.lr", "trainer.lr"),
        Word("c_clip", "algorithm.clip_ratio_c"),
        Word("kl_ctl", "algorithm.kl_loss_coef", LOSS),
        Word("total_train_epochs", "run.steps", EPOCHS),
    ),
    "SkyRL": (
        Word("generator.n_samples_per_prompt", "sampling.group_size"),
        Word("generator.sampling_params.max_generate_length", "sampling.max_response_length"),
        Word("generator.num_inference_engines", "engine.num_engines"),
        Word("trainer.train_batch_size", "trainer.batch_size", "in groups"),
        Word("trainer.policy_mini_batch_size", "trainer.batch_tokens", UPDATES),
        Word("trainer.policy.model.path", "model.path"),
        Word("trainer.policy.optimizer_config.lr", "trainer.lr"),
        Word("trainer.algorithm.eps_clip_low", "algorithm.clip_ratio_low"),
        Word("trainer.algorithm.eps_clip_high", "algorithm.clip_ratio_high"),
        Word("max_staleness_steps", "orchestrator.max_staleness"),
    ),
}


def translated(typed: str) -> Word | None:
    """The word for a key as somebody typed it, with all or some of the sections it has elsewhere."""
    typed = typed.lstrip("-").replace("-", "_")
    words = [word for own in PHRASEBOOK.values() for word in own if _is_meant(typed, word.theirs)]
    return max(words, key=lambda word: len(word.theirs), default=None)


def _is_meant(typed: str, theirs: str) -> bool:
    """A single part, such as `lr`, is no key of anybody with sections."""
    is_part = "." in typed and theirs.endswith("." + typed)
    return typed == theirs or typed.endswith("." + theirs) or is_part
