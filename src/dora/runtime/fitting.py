"""Whether model, tokenizer and critic fit each other and the configuration.

All of it is asked before anything is started.
"""

from __future__ import annotations

from pathlib import Path

from dora.config import Config
from dora.data.tokenizer import Tokenizer
from dora.engine.blocks import num_blocks_for
from dora.engine.rows import MAX_STOP_IDS
from dora.errors import ConfigError, ModelError
from dora.model.config import ModelConfig
from dora.model.folder import check_folder, load_config


def check_tokenizer(folder: Path, tokenizer: Tokenizer, model: ModelConfig) -> None:
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


def check_critic(config: Config, policy: ModelConfig) -> None:
    """Raises InputError for a critic that cannot read what the policy writes."""
    folder = Path(config.critic.path or "")
    critic = load_config(folder)
    check_folder(folder)
    if critic.vocab_size != policy.vocab_size or critic.max_position_embeddings < config.context:
        raise ConfigError(
            f"critic.path = {config.critic.path!r}: it has a vocab_size of {critic.vocab_size} and "
            f"{critic.max_position_embeddings} positions, and needs {policy.vocab_size} and "
            f"{config.context}; take a model of the policy's family, or remove critic.path"
        )


def check_fit(config: Config, tokenizer: Tokenizer, model: ModelConfig) -> None:
    """Raises ConfigError for settings that this model cannot follow."""
    config.check_context(model.max_position_embeddings)
    needed = num_blocks_for(config.context) + 1  # the block that a prompt ends in is kept beside its copy
    if config.engine.kv_blocks is not None and config.engine.kv_blocks < needed:
        raise ConfigError(
            f"engine.kv_blocks = {config.engine.kv_blocks}: the longest answer with its prompt, "
            f"{config.context} tokens, takes {needed}; raise it, or lower data.max_prompt_length or "
            "sampling.max_response_length"
        )
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
    in_mixtures = {"gate_proj", "up_proj", "down_proj"} & {*config.trainer.lora_targets}
    if config.trainer.lora_rank and model.mixture_layers and in_mixtures:
        raise ConfigError(
            f"trainer.lora_targets names {', '.join(sorted(in_mixtures))}: experts of a mixture have no "
            "adapters; name those of attention only"
        )
    if config.trainer.routing_replay and not model.mixture_layers:
        raise ConfigError(
            f"trainer.routing_replay = true: no layer of this {model.model_type} model is a mixture of "
            "experts, so there are no routes to replay; remove it"
        )
