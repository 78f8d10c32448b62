"""Rules that involve several keys.

A broken rule raises ConfigError with the keys, their values, the rule and the remedy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set

from dora.config.schema import BREAKS_C1, FIXED_STALENESS, Config, NamedSource, Section
from dora.errors import ConfigError
from dora.trainer import recipe

Unused = tuple[str, ...]  # a section, a reason, and keys of the section without effect for this reason

_OF_FOLDER = ("split", "subset", "revision")  # keys of a dataset folder


def check(config: Config) -> None:
    """Check all rules. Raises ConfigError for the first that is broken."""
    _check_sources(config)
    _check_evaluation(config)
    _check_environment(config)
    _check_reward_tasks(config)
    _check_reward_source(config)
    _check_max_staleness(config)
    _check_inflight_update(config)
    _check_admission(config)
    _check_version_slots(config)
    _check_ablations(config)
    _check_fleet_names(config)
    _check_engine_device(config)
    _check_shared_device(config)
    _check_kv_transfer(config)
    _check_external_rewards(config)
    if config.run.steps:
        _check_training(config)
    _check_effect(config)


def _check_training(config: Config) -> None:
    """The rules of groups and of the trainer."""
    _check_filters(config)
    _check_curriculum(config)
    _check_groups(config)
    _check_elastic_trainer(config)
    _check_ranks(config)
    _check_keep_best(config)
    _check_trainer_backend(config)
    _check_aux_workers(config)
    _check_distillation(config)
    _check_external_trainer(config)
    _check_algorithm(config)
    _check_mini_batches(config)
    _check_streaming(config)
    _check_micro_batches(config)


def check_context(config: Config, max_position_embeddings: int) -> None:
    """Raises ConfigError if the longest sequence exceeds the model's positions."""
    if config.max_sequence_length > max_position_embeddings:
        raise ConfigError(
            f"data.max_prompt_length + sampling.max_response_length = {_lengths(config)} tokens exceed the "
            f"model's max_position_embeddings = {max_position_embeddings}; lower one of the lengths, or "
            "raise it in config.json if rope_scaling there extends the context"
        )


def _lengths(config: Config) -> str:
    lengths = config.data.max_prompt_length, config.sampling.max_response_length
    return f"{lengths[0]} + {lengths[1]} = {config.max_sequence_length}"


def _check_sources(config: Config) -> None:
    """Training prompts come from data.path or from named sources."""
    names = [source.name for source in config.source]
    if config.data.path is None and not names:
        raise ConfigError("data.path is missing: name the training prompts, or add [[source]] tables")
    if config.data.path is not None and names:
        raise ConfigError(
            f"data.path = {config.data.path!r} with [[source]] {names[0]}: list all datasets as [[source]] "
            "and remove data.path, or remove the sources"
        )
    for source in config.source:
        _check_table("source", source, names)
        if source.path == "service":
            raise ConfigError(
                f"source.{source.name}.path = service: a run with uploaded prompts has no other source; set "
                'data.path = "service" and remove the sources'
            )


def _check_table(table: str, source: NamedSource, names: list[str]) -> None:
    if names.count(source.name) > 1:
        raise ConfigError(f"{table}.{source.name} is there twice; give each [[{table}]] a name of its own")
    if source.path == "gcd" and (unused := _changed(source, {"prompt_key", *_OF_FOLDER})):
        raise ConfigError(
            f"{table}.{source.name}.{min(unused)} has no effect with path = gcd in that table; remove it"
        )


def _changed(table: Section, keys: Set[str]) -> set[str]:
    """Those of the keys whose values are no defaults. The configuration of a run has all keys."""
    fields = type(table).model_fields
    return {key for key in keys if getattr(table, key) != fields[key].get_default(call_default_factory=True)}


def _check_curriculum(config: Config) -> None:
    """Groups between the thresholds exist, and prompts come again in a later epoch."""
    easy, hard = config.curriculum.easy_threshold, config.curriculum.hard_threshold
    if easy is not None and hard is not None and hard >= easy:
        raise ConfigError(
            f"curriculum.hard_threshold = {hard:g} with curriculum.easy_threshold = {easy:g}: every prompt "
            "would be skipped; set hard_threshold below easy_threshold"
        )
    if config.curriculum.is_on and config.data.path == "service":
        raise ConfigError(
            "[curriculum] with data.path = service: each uploaded prompt is used once, so none can be "
            "skipped later; remove the thresholds"
        )


def _check_evaluation(config: Config) -> None:
    """Evaluation settings need prompts, and a kind of response."""
    evaluation = config.eval
    given = evaluation.model_fields_set - {"path"}
    if not config.has_held_out and evaluation.num_prompts and given:
        raise ConfigError(
            f"eval.{min(given)} is set without eval.path, so nothing is evaluated; set eval.path, or "
            "eval.num_prompts = 0"
        )
    if config.run.steps == 0 and not (config.has_held_out and evaluation.num_prompts):
        raise ConfigError(
            "run.steps = 0: the run only evaluates, and it has no held-out prompts; set eval.path, or raise "
            "run.steps or eval.num_prompts"
        )
    names = [source.name for source in config.eval_source]
    if names and evaluation.path is not None:
        raise ConfigError(
            f"eval.path = {evaluation.path!r} with [[eval_source]] {names[0]}: list all held-out datasets as "
            "[[eval_source]] and remove eval.path, or remove the sources"
        )
    for source in config.eval_source:
        _check_table("eval_source", source, names)
    if not evaluation.greedy and not evaluation.num_samples:
        raise ConfigError(
            "eval.greedy = false with eval.num_samples = 0: an evaluation would generate no response; set "
            "one of them, or eval.num_prompts = 0 for no evaluation"
        )


def _check_environment(config: Config) -> None:
    """Episodes use either agents or environments, and remote environments need an auth token."""
    env = config.env
    if env.environment is not None and env.hosts:
        raise ConfigError(
            f"env.environment = {env.environment!r} with env.hosts = {env.hosts}: episodes run either in "
            "this run's workers or on the hosts; remove one of the two"
        )
    if env.hosts and env.token_file is None:
        raise ConfigError(
            f"env.hosts = {env.hosts} without env.token_file: environment servers require their auth token; "
            "set env.token_file to a copy of the file that `dora env-server` names"
        )
    if env.has_environments and config.service.agents:
        raise ConfigError(
            "service.agents = true with env.environment or env.hosts: an episode has either an agent or an "
            "environment; remove one of the two"
        )


def _check_reward_tasks(config: Config) -> None:
    """Reward tasks have distinct names, and one has a weight other than 0: others may be only logged."""
    names = [task.name for task in config.reward_task]
    for task in config.reward_task:
        if task.name == "reward" or names.count(task.name) > 1:
            raise ConfigError(
                f"reward_task.name = {task.name!r}: every [[reward_task]] needs a name of its own, and the "
                "section [reward] has the name reward; choose another"
            )
    weights = config.reward_weights
    if weights and not any(weights.values()):
        raise ConfigError(
            f"reward_task.{names[0]}.weight = 0: no other reward has a weight, so every sum of rewards would "
            "be 0; raise the weight, or add the reward to train on"
        )


def _check_reward_source(config: Config) -> None:
    """Some reward exists."""
    if not (config.reward_weights or config.env.has_environments or config.service.agents):
        raise ConfigError(
            "reward.function: not set, and no environment (env.environment) gives rewards; add "
            "`function = ...` to [reward]"
        )


def _check_groups(config: Config) -> None:
    """Groups can have a reward signal, unless rewards are only measured."""
    group_size, estimator = config.sampling.group_size, config.algorithm.adv_estimator
    needs_others = estimator not in ("reinforce_plus_plus", "gae") and not recipe.is_own(estimator)
    if group_size == 1 and _rewards_count(config) and needs_others:
        raise ConfigError(
            f"sampling.group_size = 1 with algorithm.adv_estimator = {estimator}: every advantage from "
            "rewards would be reward - mean(rewards of the group) = 0; set sampling.group_size >= 2, or "
            "adv_estimator = reinforce_plus_plus or gae"
        )
    if group_size == 1 and config.algorithm.filter_groups:
        raise ConfigError(
            "algorithm.filter_groups = true with sampling.group_size = 1: all rewards of a group of one are "
            "equal, so every group would be filtered; remove filter_groups or set group_size >= 2"
        )
    if estimator == "gigpo" and not config.has_episodes:
        raise ConfigError(
            "algorithm.adv_estimator = gigpo without turns: a response of one turn has no steps to compare; "
            "use grpo, or set env.environment or service.agents = true"
        )
    if config.algorithm.filter_groups and estimator == "gae":
        raise ConfigError(
            "algorithm.filter_groups = true with algorithm.adv_estimator = gae: groups with equal rewards "
            "have a signal too, since gae compares rewards with values of the critic; remove filter_groups"
        )
    if config.algorithm.mask_truncated_responses and _compares_pairs(config):
        raise ConfigError(
            "algorithm.mask_truncated_responses = true with algorithm.policy_loss = online_dpo: without one "
            "of its responses a pair has no loss; remove mask_truncated_responses or choose another loss"
        )


def _check_filters(config: Config) -> None:
    """Sampling filters leave more than one token."""
    for key, remedy in (("top_k", "raise"), ("min_p", "lower")):
        if getattr(config.sampling, key) == 1:
            raise ConfigError(
                f"sampling.{key} = 1 leaves one token to sample, so all responses of a group would be equal "
                f"and have no advantage; {remedy} it"
            )


def _check_max_staleness(config: Config) -> None:
    """The staleness bound fits the update policy."""
    rules = config.orchestrator
    policy, staleness, fixed = (
        rules.update_policy,
        rules.max_staleness,
        FIXED_STALENESS.get(rules.update_policy),
    )
    if fixed not in (None, staleness):
        raise ConfigError(
            f"orchestrator.max_staleness = {staleness} with update_policy = {policy}: this policy always has "
            f"max_staleness = {fixed}; remove max_staleness, or set update_policy = dora"
        )
    if rules.staleness_mode == "adaptive" and (fixed is not None or staleness == 0):
        found = "max_staleness = 0" if fixed is None else f"update_policy = {policy}"
        raise ConfigError(
            f"orchestrator.staleness_mode = adaptive with {found}: the staleness bound cannot vary; remove "
            "staleness_mode, or set update_policy = dora with max_staleness >= 1"
        )


def _check_inflight_update(config: Config) -> None:
    """Policies that continue responses with newer weights exclude features that need one version."""
    policy = config.orchestrator.update_policy
    if not config.breaks_c1:
        return
    conflicts = {
        "trainer.routing_replay": (
            config.trainer.routing_replay and policy == "partial",
            "recomputed tokens take other experts than those that sampled them",
        ),
        "engine.exact_logprobs": (
            config.engine.exact_logprobs,
            "no single version can reproduce their log-probs",
        ),
        "env.environment, env.hosts and service.agents": (
            config.has_episodes,
            "episodes keep the version that began them",
        ),
    }
    for key, (is_set, reason) in conflicts.items():
        if is_set:
            raise ConfigError(
                f"orchestrator.update_policy = {policy} continues responses with newer weights; {reason}: "
                f"remove {key}, or set update_policy = dora"
            )
    needed = config.inflight_version_slots
    for kind in config.engine_kinds:
        if kind.version_slots != needed:
            raise ConfigError(
                f"{kind.key}.version_slots = {kind.version_slots} with update_policy = {policy}, which needs "
                f"{needed}: the old version, the new one, and with eval.every an evaluated one; remove "
                "version_slots"
            )


def _check_admission(config: Config) -> None:
    """Batches per version, slack and weight sync stay within the staleness bound."""
    rules = config.orchestrator
    staleness = rules.max_staleness
    if rules.batches_per_version > staleness + 1:
        raise ConfigError(
            f"orchestrator.batches_per_version = {rules.batches_per_version}: one version can fill at most "
            f"max_staleness + 1 = {staleness} + 1 batches; lower it or raise max_staleness"
        )
    max_slack = staleness * config.trainer.batch_size
    if rules.slack > max_slack:
        raise ConfigError(
            f"orchestrator.slack = {rules.slack}: it must leave one whole batch, so it is at most "
            f"max_staleness * batch_size = {staleness} * {config.trainer.batch_size} = {max_slack}; lower it"
        )
    if rules.weight_sync_interval > staleness + 1:
        raise ConfigError(
            f"orchestrator.weight_sync_interval = {rules.weight_sync_interval}: a version is usable for at "
            f"most max_staleness + 1 = {staleness} + 1 steps; lower it or raise max_staleness"
        )


def _check_version_slots(config: Config) -> None:
    """Engines have no more slots than there are live versions."""
    slots, staleness = config.engine.version_slots, config.orchestrator.max_staleness
    if slots is not None and slots > config.max_live_versions:
        raise ConfigError(
            f"engine.version_slots = {slots}: at most max_staleness + 1 = {staleness} + 1 versions are live "
            "at once, and one more with eval.every; more slots have no effect, so lower or remove it"
        )


def _check_ablations(config: Config) -> None:
    """No rule is named twice."""
    ablations = config.orchestrator.ablations
    for name in (name for name in ablations if ablations.count(name) > 1):
        raise ConfigError(f"orchestrator.ablations = {ablations} names {name} twice; remove one of the two")


def _check_elastic_trainer(config: Config) -> None:
    if config.trainer.elastic and config.orchestrator.placement == "colocated":
        raise ConfigError(
            "trainer.elastic = true with orchestrator.placement = colocated: every engine already shares the "
            "trainer's device; remove one of the two"
        )


def _check_fleet_names(config: Config) -> None:
    names = [fleet.name for fleet in config.fleet]
    for name in (name for name in names if names.count(name) > 1):
        raise ConfigError(f"fleet.name = {name!r}: every [[fleet]] needs a name of its own; choose another")


def _check_engine_device(config: Config) -> None:
    """The device of the engines supports what they are configured to compute."""
    engine, trainer = config.engine, config.trainer
    device = f"engine.device = {engine.device!r}"
    if engine.exact_logprobs and {engine.device, trainer.device} != {"cpu"}:
        raise ConfigError(
            f"engine.exact_logprobs = true with {device}, trainer.device = {trainer.device!r}: exact "
            "log-probs need the CPU; remove exact_logprobs, or set both devices to cpu"
        )
    if engine.gpus_per_engine > 1:
        several = f"engine.gpus_per_engine = {engine.gpus_per_engine}"
        if engine.device == "cpu":
            raise ConfigError(f"{several} with {device}: set engine.device = cuda, or remove gpus_per_engine")
        if any(kind.backend is None for kind in config.engine_kinds):
            raise ConfigError(
                f"{several}: DORA-RL's own engine computes on one GPU; set engine.backend = vllm or sglang, "
                "or remove gpus_per_engine"
            )
        if config.orchestrator.placement == "colocated" or trainer.elastic:
            raise ConfigError(
                f"{several}: an engine that shares the trainer's device has one GPU; remove "
                "placement = colocated and trainer.elastic, or gpus_per_engine"
            )
    if engine.device != "cpu" and engine.kernels != "auto":
        raise ConfigError(
            f"engine.kernels = {engine.kernels} with {device}: these kernels run on a CPU; remove kernels"
        )
    if engine.kernels == "numba" and engine.dtype != "float32":
        raise ConfigError(
            f"engine.kernels = numba with engine.dtype = {engine.dtype}: these kernels compute in float32 "
            "only; remove one of the two"
        )


def _check_shared_device(config: Config) -> None:
    """Engines that share the trainer's device are configured with the same device."""
    engine, trainer, placement = config.engine.device, config.trainer.device, config.orchestrator.placement
    if placement != "colocated" and not config.trainer.elastic:
        return
    setting = "orchestrator.placement = colocated" if placement == "colocated" else "trainer.elastic = true"
    has_other_kind = engine.partition(":")[0] != trainer.partition(":")[0]
    if has_other_kind or (placement == "colocated" and engine != trainer):
        raise ConfigError(
            f"engine.device = {engine!r}, trainer.device = {trainer!r} with {setting}: an engine computes on "
            "the trainer's device; set both to the same device"
        )


def _check_kv_transfer(config: Config) -> None:
    """Other processes cannot map a GPU's KV cache, and other machines cannot open its handle."""
    if config.engine.kv_transfer == "shared" and config.engine.device != "cpu":
        raise ConfigError(
            f"engine.kv_transfer = shared with engine.device = {config.engine.device!r}: engines map KV only "
            "of engines on the CPU; set engine.kv_transfer = staged, or ipc on one machine"
        )
    if config.engine.kv_transfer == "ipc" and config.runtime.kind == "ray":
        raise ConfigError(
            "engine.kv_transfer = ipc with runtime.kind = ray: an engine reads only the memory of GPUs of "
            "its own machine; set engine.kv_transfer = staged"
        )


def _check_ranks(config: Config) -> None:
    """Several trainer ranks support the configured features, and each rank has a sample."""
    ranks, num_samples = f"trainer.num_ranks = {config.trainer.num_ranks}", config.samples_per_step
    if config.trainer.num_ranks > 1 and config.engine.exact_logprobs:
        raise ConfigError(
            f"{ranks} with engine.exact_logprobs = true: exact log-probs need unsharded weights; remove one "
            "of the two"
        )
    if config.trainer.num_ranks > num_samples:
        raise ConfigError(
            f"{ranks}: a step has batch_size * group_size = {num_samples} samples, and every rank needs one; "
            "lower num_ranks"
        )


def _check_keep_best(config: Config) -> None:
    """Some version before the last one is evaluated and has a checkpoint."""
    if not config.trainer.keep_best:
        return
    steps, every, save_freq = config.run.steps, config.eval.every, config.trainer.save_freq
    if not (config.has_held_out and config.eval.num_prompts):
        why = "without held-out prompts: no version is evaluated; set eval.path and eval.every"
    elif not 0 < every < steps:
        why = (
            f"with eval.every = {every} and run.steps = {steps}: no version is evaluated during training; "
            "set eval.every between 1 and run.steps - 1"
        )
    elif not 0 < math.lcm(every, save_freq) < steps:
        why = (
            f"with eval.every = {every} and trainer.save_freq = {save_freq}: of the evaluated versions only "
            f"the last one has a checkpoint; set trainer.save_freq = {every}, or to a divisor of it"
        )
    else:
        return
    raise ConfigError(f"trainer.keep_best = true {why}, or remove keep_best")


def _check_trainer_backend(config: Config) -> None:
    """Another training engine is not combined with features of DORA-RL's own."""
    conflicts = {
        "trainer.num_ranks > 1": config.trainer.num_ranks > 1,
        "trainer.lora_rank": config.trainer.lora_rank > 0,
        "trainer.offload_optimizer = true": config.trainer.offload_optimizer,
        "engine.exact_logprobs = true": config.engine.exact_logprobs,
        "algorithm.adv_estimator = gae": _uses_critic(config),
        "trainer.aux_workers": bool(config.trainer.aux_workers),
        "trainer.continue_from": config.trainer.continue_from is not None,
        f"trainer.model = {config.trainer.model}": config.trainer.model != "auto",
    }
    if config.trainer.backend is not None:
        for conflict in _true_keys(conflicts):
            raise ConfigError(
                f"trainer.backend = {config.trainer.backend!r} with {conflict}: only DORA-RL's own trainer "
                "supports this; remove one of the two"
            )


def _check_aux_workers(config: Config) -> None:
    """Auxiliary workers compute log-probs with the trainer's own weights."""
    dtypes = config.engine.dtype, config.trainer.dtype
    if "proximal" in config.trainer.aux_workers and dtypes == ("bfloat16", "float32"):
        raise ConfigError(
            "trainer.aux_workers = proximal with engine.dtype = bfloat16 and trainer.dtype = float32: the "
            "worker loads published weights, which are rounded to bfloat16, so its log-probs would differ "
            "from the trainer's; set trainer.dtype = bfloat16, or remove proximal"
        )


def _check_distillation(config: Config) -> None:
    """The advantages of teachers take the place of a reference policy."""
    if not config.distillation.teachers:
        return
    algorithm, temperature = config.algorithm, config.sampling.temperature
    conflicts = {
        "algorithm.kl_loss_coef: they take the place of the initial policy": algorithm.kl_loss_coef > 0,
        "algorithm.policy_loss = online_dpo: it compares whole responses": _compares_pairs(config),
        "algorithm.adv_estimator = gae: the critic predicts rewards": _uses_critic(config),
        "algorithm.filter_groups = true and reward_coef = 0: groups of equal rewards train as well": (
            algorithm.filter_groups and not _rewards_count(config)
        ),
        "trainer.backend: only DORA-RL's own trainer supports it": config.trainer.backend is not None,
        'service.trainer = "external": it computes its own loss': config.service.trainer == "external",
        f"sampling.temperature = {temperature}: servers score with temperature 1": (
            temperature != 1.0 and bool(config.distillation.servers)
        ),
    }
    for conflict in _true_keys(conflicts):
        raise ConfigError(f"distillation.teachers with {conflict}; remove one of the two")


def _check_external_rewards(config: Config) -> None:
    """A reward task of the service has no settings of local workers."""
    local = {"options", "num_workers", "micro_batch_size", "micro_batch_tokens"}
    for task in config.reward_task:
        if task.factory == "service" and (unused := _changed(task, local)):
            raise ConfigError(
                f"reward_task.{task.name}.{min(unused)} has no effect with class = service: its rewards "
                "come from an external worker; remove it"
            )


def _check_external_trainer(config: Config) -> None:
    """An external trainer excludes features of the run's own trainer."""
    if config.service.trainer != "external":
        return
    trainer, orchestrator = config.trainer, config.orchestrator
    conflicts = {
        "trainer.backend: there would be two trainers": trainer.backend is not None,
        "trainer.num_ranks > 1: it manages its own processes": trainer.num_ranks > 1,
        "trainer.lora_rank: it uploads whole versions": trainer.lora_rank > 0,
        "trainer.offload_optimizer = true: it has its own optimizer": trainer.offload_optimizer,
        "trainer.aux_workers: they assist the run's own trainer": bool(trainer.aux_workers),
        "trainer.continue_from: it has its own optimizer": trainer.continue_from is not None,
        "trainer.elastic = true: it has its own device": trainer.elastic,
        "orchestrator.placement = colocated: it has its own device": orchestrator.placement == "colocated",
        "engine.exact_logprobs = true: they need DORA-RL's trainer": config.engine.exact_logprobs,
        "algorithm.adv_estimator = gae: the critic needs DORA-RL's trainer": _uses_critic(config),
        "orchestrator.staleness_mode = adaptive: it reports no ESS and KL": (
            orchestrator.staleness_mode == "adaptive"
        ),
    }
    for conflict in _true_keys(conflicts):
        raise ConfigError(f'service.trainer = "external" with {conflict}; remove one of the two')


def _check_algorithm(config: Config) -> None:
    """The objective is safe at this staleness and consistent with the lengths."""
    algorithm, max_length = config.algorithm, config.sampling.max_response_length
    correction = recipe.Correction(**config.correction.model_dump())
    recipe.check_recipe(
        algorithm.policy_loss, algorithm.loss_agg_mode, correction, config.orchestrator.max_staleness
    )
    if algorithm.overlong_buffer_tokens > max_length:
        raise ConfigError(
            f"algorithm.overlong_buffer_tokens = {algorithm.overlong_buffer_tokens}: it is the last part of "
            f"sampling.max_response_length = {max_length} and cannot be longer; lower it"
        )
    needed = 2 * config.max_sequence_length
    if _compares_pairs(config) and config.trainer.micro_batch_tokens < needed:
        raise ConfigError(
            f"trainer.micro_batch_tokens = {config.trainer.micro_batch_tokens} with policy_loss = "
            f"{algorithm.policy_loss}: a micro-batch must fit a pair of responses, "
            f"2 * {config.max_sequence_length} = {needed} tokens; raise it"
        )


def _check_mini_batches(config: Config) -> None:
    """trainer.mini_batch_tokens divides a batch into updates."""
    budget, mode = config.trainer.mini_batch_tokens, config.algorithm.loss_agg_mode
    if budget is None:
        return
    if mode != "token-mean":
        raise ConfigError(
            f"trainer.mini_batch_tokens = {budget} with algorithm.loss_agg_mode = {mode}: updates of equally "
            "many tokens need loss_agg_mode = token-mean; set it, or remove mini_batch_tokens"
        )
    shortest = config.sampling.max_response_length
    longest = config.samples_per_step * shortest
    if not shortest <= budget <= longest:
        raise ConfigError(
            f"trainer.mini_batch_tokens = {budget}: an update has at least one response, up to "
            f"sampling.max_response_length = {shortest} tokens, and at most the {config.samples_per_step} of "
            f"a batch, {longest} tokens; choose a number between the two"
        )


def _check_streaming(config: Config) -> None:
    if config.trainer.streaming and (reason := config.why_not_streaming) is not None:
        raise ConfigError(f"trainer.streaming = true with {reason}; remove one of the two")


def _check_micro_batches(config: Config) -> None:
    """A micro-batch fits one sample."""
    if config.trainer.micro_batch_tokens < config.max_sequence_length:
        raise ConfigError(
            f"trainer.micro_batch_tokens = {config.trainer.micro_batch_tokens}: a micro-batch must fit one "
            f"sample of max_prompt_length + max_response_length = {_lengths(config)} tokens; raise "
            "micro_batch_tokens or lower one of the lengths"
        )


def _check_effect(config: Config) -> None:
    """Every key that was set has an effect; without steps, of those that evaluations use."""
    unused = keys_without_effect(config)
    for section, reasons in unused.items() if config.run.steps else _of_evaluations(unused):
        for key in sorted(getattr(config, section).model_fields_set & reasons.keys()):
            raise ConfigError(f"{section}.{key} has no effect {reasons[key]}; remove it")


def _of_evaluations(unused: dict[str, dict[str, str]]) -> Iterator[tuple[str, dict[str, str]]]:
    sections = ("data", "env", "eval", "metrics", "reward", "sampling")
    return ((section, unused[section]) for section in sections if section in unused)


def keys_without_effect(config: Config) -> dict[str, dict[str, str]]:
    """Section -> key -> why it has no effect in this configuration."""
    unused: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for rules in (
        _unused_for_prompts,
        _unused_for_rewards,
        _unused_for_the_loss,
        _unused_for_auxiliary_models,
        _unused_for_processes,
        _unused_for_versions,
        _unused_for_placement,
    ):
        for section, reason, *keys in rules(config):
            unused[section] |= dict.fromkeys(keys, reason)
    return unused


def _unused_for_prompts(config: Config) -> Iterator[Unused]:
    data = config.data
    if config.source:
        yield "data", "with [[source]]: each source has its own", *_OF_FOLDER
    if data.path == "gcd":
        yield "data", "with data.path = gcd", "prompt_key", "image_key", *_OF_FOLDER
    if data.path == "service":
        reason = "with data.path = service: each prompt is used once, in the order of arrival"
        yield "data", reason, *_OF_FOLDER, "shuffle"
        if not config.has_held_out:
            reason = "with data.path = service: an upload with such a prompt is refused"
            yield "data", reason, "filter_overlong_prompts"
    if not data.chat_template:
        yield "data", "without data.chat_template = true", "chat_template_kwargs", "system_prompt"
    if not config.curriculum.is_on:
        reason = "without curriculum.easy_threshold or curriculum.hard_threshold"
        yield "curriculum", reason, "skip_epochs"
    if config.eval.every >= config.run.steps > 0:
        reason = f"with run.steps = {config.run.steps}: no evaluation is due during training"
        yield "eval", reason, "every"
    if config.eval.path == "gcd":
        yield "eval", "with eval.path = gcd", *_OF_FOLDER
    if not config.eval.num_samples:
        reason = "with eval.num_samples = 0: only greedy responses are generated"
        yield "eval", reason, "temperature", "top_k", "top_p", "min_p"
    if config.eval_source:
        yield "eval", "with [[eval_source]]: each source has its own", *_OF_FOLDER


def _unused_for_rewards(config: Config) -> Iterator[Unused]:
    if config.reward.function is None:
        yield "reward", "without reward.function", "timeout_s", "num_workers"
    if config.reward.function == "service":
        yield "reward", "with reward.function = service: external workers score", "num_workers"
    if not config.has_episodes:
        yield "sampling", "without env.environment, env.hosts or service.agents", "max_turn_length"
    if not config.env.has_environments:
        yield "env", "without env.environment", "num_workers", "max_turns", "timeout_s"
    if config.env.environment is None:
        yield "env", "without env.environment: servers make their own environments", "options"
    if not config.env.hosts:
        yield "env", "without env.hosts", "token_file"
    if config.external_source is None:
        yield "service", "in a run that needs no external input", "idle_timeout_s"
    if not config.service.agents:
        yield "service", "without service.agents = true", "session_timeout_s"


def _unused_for_the_loss(config: Config) -> Iterator[Unused]:
    algorithm, correction = config.algorithm, config.correction
    has_own_loss = recipe.is_own(algorithm.policy_loss)  # which gets all settings
    if algorithm.policy_loss not in ("dual_clip", "triplet_clip") and not has_own_loss:
        yield "algorithm", "without policy_loss = dual_clip or triplet_clip", "clip_ratio_c"
    if algorithm.policy_loss == "online_dpo":
        reason = "with policy_loss = online_dpo: it compares two responses, relative to the initial policy"
        keys = ("adv_estimator", "clip_ratio_low", "clip_ratio_high", "kl_loss_coef", "entropy_coeff")
        yield "algorithm", reason, *keys
    elif not has_own_loss:
        yield "algorithm", "without policy_loss = online_dpo", "dpo_beta"
    if not has_own_loss:
        yield "algorithm", "without a policy_loss of your own", "policy_loss_options"
    settings = algorithm.policy_loss, correction.proximal, config.orchestrator.max_staleness
    never_clipped = recipe.never_clipped_reason(*settings, config.trainer.mini_batch_tokens)
    if never_clipped is not None:
        yield "algorithm", never_clipped, "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"
    if algorithm.adv_estimator != "gae":
        yield "algorithm", "without adv_estimator = gae", "lam"
    if algorithm.adv_estimator not in ("gae", "gigpo"):
        yield "algorithm", "without adv_estimator = gae or gigpo", "gamma"
    if algorithm.adv_estimator != "gigpo":
        yield "algorithm", "without adv_estimator = gigpo", "step_advantage_w"
    if not _rewards_count(config):
        reason = "with distillation.reward_coef = 0: rewards are only measured"
        yield "algorithm", reason, "adv_estimator", "overlong_buffer_tokens"
    if not algorithm.kl_loss_coef:
        yield "algorithm", "with kl_loss_coef = 0", "kl_loss_type"
    if not algorithm.overlong_buffer_tokens:
        yield "algorithm", "with overlong_buffer_tokens = 0", "overlong_penalty"
    if correction.token != "tis":
        yield "correction", "without correction.token = tis", "tis_cap"
    if correction.token != "icepop":
        yield "correction", "without correction.token = icepop", "icepop_low", "icepop_high"
    if correction.sequence != "mis":
        yield "correction", "without correction.sequence = mis", "mis_low", "mis_high"
    if config.orchestrator.max_staleness == 0:
        reason = "with max_staleness = 0: all samples have staleness 0"
        yield "correction", reason, "staleness_decay"


def _unused_for_auxiliary_models(config: Config) -> Iterator[Unused]:
    if not config.aux_workers:
        yield "trainer", "without trainer.aux_workers or distillation.teachers", "aux_device"
    elif (reason := _unused_aux_worker(config)) is not None:
        yield "trainer", reason, "aux_workers"
    if not _uses_critic(config):
        yield "critic", "without algorithm.adv_estimator = gae", *type(config.critic).model_fields
    elif config.critic.ppo_epochs == 1 and config.trainer.mini_batch_tokens is None:
        reason = "with critic.ppo_epochs = 1: in the only update of a step no value has changed yet"
        yield "critic", reason, "cliprange_value"
    if not config.distillation.teachers:
        yield "distillation", "without distillation.teachers", "coef", "reward_coef", "timeout_s"
    elif not config.distillation.servers:
        yield "distillation", "without a teacher on a server", "timeout_s"


def _unused_aux_worker(config: Config) -> str | None:
    """Why one of `trainer.aux_workers` has no effect; None if all have one."""
    algorithm, proximal = config.algorithm, config.correction.proximal
    reasons: dict[str, str] = {}
    if not algorithm.kl_loss_coef and not _compares_pairs(config):
        reasons["reference"] = "kl_loss_coef = 0: the loss does not use the initial policy"
    if proximal != "recomputed":
        reasons["proximal"] = f"correction.proximal = {proximal}: it recomputes no log-probs"
    if not _uses_critic(config):
        reasons["critic"] = f"algorithm.adv_estimator = {algorithm.adv_estimator}: there is no critic"
    workers = config.trainer.aux_workers
    return next((f"for {name}, with {reasons[name]}" for name in reasons if name in workers), None)


def _unused_for_processes(config: Config) -> Iterator[Unused]:
    trainer = config.trainer
    if trainer.lr_decay == "constant":
        yield "trainer", "with trainer.lr_decay = constant: the learning rate does not fall", "min_lr_ratio"
    if config.engine.exact_logprobs:
        reason = "with engine.exact_logprobs = true: both route tokens identically"
        yield "trainer", reason, "routing_replay"
    if not trainer.lora_rank:
        yield "trainer", "without trainer.lora_rank", "lora_alpha", "lora_targets"
    elif trainer.offload_optimizer:
        reason = "with trainer.lora_rank: the moments of adapters are small"
        yield "trainer", reason, "offload_optimizer"
    if config.engine.backend is None:
        yield "engine", "without engine.backend: they are arguments of its class", "options"
    else:
        reason = "with engine.backend: it is a setting of DORA-RL's own engine"
        yield "engine", reason, "kernels", "num_kv_blocks", "max_prefill_tokens", "min_step_time"
    if not {"wandb", "trackio", "otel"} & {*config.metrics.report_to}:
        yield "metrics", "unless metrics.report_to names wandb, trackio or otel", "project"
    if config.runtime.kind != "ray":
        yield "ray", "without runtime.kind = ray", *type(config.ray).model_fields
    elif trainer.num_ranks == 1:
        yield "ray", "with trainer.num_ranks = 1", "trainer_nodes"
    elif not config.ray.address:
        yield "ray", "without ray.address: the cluster has one node", "trainer_nodes"


def _unused_for_versions(config: Config) -> Iterator[Unused]:
    rules = config.orchestrator
    one_live = f"with update_policy = {rules.update_policy}: one version is live"
    if rules.update_policy != "drain":
        yield "orchestrator", "without update_policy = drain", "batches_per_version"
    if rules.staleness_mode == "fixed":
        reason = "without orchestrator.staleness_mode = adaptive"
        yield "orchestrator", reason, "min_ess", "max_kl", "staleness_window"
    if rules.update_policy not in ("dora", *BREAKS_C1):
        yield "orchestrator", one_live, "weight_sync_interval"
        yield "weights", one_live, "skip_below_kl"
    elif rules.max_staleness == 0:
        yield "weights", "with max_staleness = 0: the bound requires every version", "skip_below_kl"
    elif config.service.trainer == "external":
        yield "weights", "with service.trainer = external: it reports no KL", "skip_below_kl"


def _unused_for_placement(config: Config) -> Iterator[Unused]:
    rules = config.orchestrator
    if (reason := _unused_ablation(config)) is not None:
        yield "orchestrator", reason, "ablations"
    if config.breaks_c1:
        reason = f"with update_policy = {rules.update_policy}: requests do not migrate"
        if config.engine.backend is None:
            yield "engine", reason, "kv_transfer"
        if rules.placement != "colocated":
            yield "orchestrator", reason, "placement"
    if (reason := _no_migration_reason(config)) is not None:
        yield "orchestrator", reason, "balance_running"
        yield "runtime", reason, "migration_timeout_s"
        if config.has_static_placement:  # else engines change versions, which these keys also control
            yield "orchestrator", reason, "rebalance_interval_s", "kv_watermark"


def _unused_ablation(config: Config) -> str | None:
    """Why `orchestrator.ablations`, or the first of its rules without effect, has no effect."""
    rules = config.orchestrator
    if rules.update_policy != "dora":
        return f"with update_policy = {rules.update_policy}: these are rules of dora"
    reasons: dict[str, str] = {}
    if "shares" in rules.ablations:
        reasons |= {name: f"shares: {name} is a part of shares" for name in ("remainders", "room")}
    if config.has_static_placement:
        names = ("moves", "shares", "fill", "remainders", "room")
        reasons = dict.fromkeys(names, f"{_static_setting(config)}: engines keep their versions and requests")
    return next((f"for {name}, with {reasons[name]}" for name in rules.ablations if name in reasons), None)


def _no_migration_reason(config: Config) -> str | None:
    """The setting that keeps requests on their engine; None if they migrate."""
    if config.has_static_placement:
        return f"with {_static_setting(config)}: requests do not migrate"
    if "moves" in config.orchestrator.ablations:
        return "with orchestrator.ablations = moves: requests do not migrate"
    return None


def _static_setting(config: Config) -> str:
    """The setting that causes `has_static_placement`."""
    if config.breaks_c1:
        return f"update_policy = {config.orchestrator.update_policy}"
    return "orchestrator.placement = static"


def _uses_critic(config: Config) -> bool:
    return config.algorithm.adv_estimator == "gae"


def _rewards_count(config: Config) -> bool:
    """Whether advantages depend on rewards."""
    return not config.distillation.teachers or config.distillation.reward_coef > 0


def _compares_pairs(config: Config) -> bool:
    return recipe.traits_of(config.algorithm.policy_loss).unit == "pair"


def _true_keys(flags: Mapping[str, bool]) -> Iterator[str]:
    return (key for key, is_set in flags.items() if is_set)
