"""Which keys change nothing in a configuration, and why: setting one of them is an error.

Asked of a whole configuration, for most answers depend on other keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora.sections import BREAKS_C1
from dora.serving import awaited
from dora.trainer import recipe

if TYPE_CHECKING:
    from dora.config import Config


def without_effect(config: Config) -> dict[str, dict[str, str]]:
    """Section -> key -> why it changes nothing in this configuration."""
    found: dict[str, dict[str, str]] = {section: {} for section in type(config).model_fields}
    policy = config.orchestrator.update_policy
    if policy != "drain":
        found["orchestrator"]["batches_per_version"] = "without update_policy = drain"
    if policy not in ("dora", *BREAKS_C1):
        found["orchestrator"]["load_interval"] = f"with update_policy = {policy}: one version is live"
        found["weights"]["skip_below_kl"] = f"with update_policy = {policy}: one version is live"
    elif config.orchestrator.max_staleness == 0:
        found["weights"]["skip_below_kl"] = "with max_staleness = 0: every version is asked for"
    elif config.service.trainer == "external":
        found["weights"]["skip_below_kl"] = "with service.trainer = external: nobody measures"
    if config.orchestrator.staleness == "fixed":
        by = ("min_ess", "max_kl", "staleness_window")
        found["orchestrator"] |= dict.fromkeys(by, "without orchestrator.staleness = adaptive")
    if config.orchestrator.max_staleness < 2 or config.orchestrator.staleness == "adaptive":
        why = "with max_staleness < 2 or staleness = adaptive: any old version may be at its deadline"
        found["engine"]["tail_interval"] = why
    if config.breaks_c1:
        found["engine"]["tail_interval"] = f"with update_policy = {policy}: one version decodes"
        if config.orchestrator.placement != "colocated":
            found["orchestrator"]["placement"] = f"with update_policy = {policy}: nothing is moved"
    if config.is_static:
        setting = "orchestrator.placement = static"
        if config.breaks_c1:
            setting = f"update_policy = {policy}"
        elif config.orchestrator.placement != "static":
            setting = f"engine.device = {config.engine.device!r}"
        why = f"with {setting}, for nothing is moved"
        moving = ("level_running", "rebalance_interval_s", "kv_watermark")
        found["orchestrator"] |= dict.fromkeys(moving, why)
        found["runtime"]["move_timeout_s"] = why
    found["algorithm"], found["correction"] = _on_loss(config)
    found["critic"] = _on_critic(config)
    if not {"wandb", "trackio"} & {*config.metrics.report_to}:
        found["metrics"]["project"] = "unless metrics.report_to names wandb or trackio"
    if config.data.path == "gcd":
        found["data"] |= dict.fromkeys(("prompt_key", "split"), "with data.path = gcd")
    if config.data.path == "service":
        why = "with data.path = service: prompts are taken once, in the order in which they come"
        found["data"] |= dict.fromkeys(("split", "shuffle"), why)
    if config.eval.every >= config.run.steps:
        found["eval"]["every"] = f"with run.steps = {config.run.steps}: no version between is due"
    if config.eval.path == "gcd":
        found["eval"]["split"] = "with eval.path = gcd"
    if config.engine.adapter is not None:
        own = ("kernels", "kv_blocks", "pace", "tail_interval")
        found["engine"] |= dict.fromkeys(own, "with engine.adapter: they are of DORA's own engine")
    else:
        found["engine"]["options"] = "without engine.adapter: they are what its class is made with"
    if config.engine.exact:
        found["trainer"]["routing_replay"] = "with engine.exact = true: equal bits are routed alike"
    if not config.trainer.lora_rank:
        found["trainer"] |= dict.fromkeys(("lora_alpha", "lora_targets"), "without trainer.lora_rank")
    _add_those_outside(config, found)
    found["trainer"] |= _on_stations(config)
    if not config.data.chat_template:
        found["data"]["system_prompt"] = "without data.chat_template = true"
    return found


def _add_those_outside(config: Config, found: dict[str, dict[str, str]]) -> None:
    """The same of what judges answers, or says its part in them, beside the run; and of other machines."""
    if config.runtime.kind != "ray":
        found["ray"] = dict.fromkeys(type(config.ray).model_fields, "without runtime.kind = ray")
    if not config.has_episodes:
        found["sampling"]["max_turn_length"] = "without env.environment, env.hosts or service.agents"
    if not config.env.is_played:
        found["env"] |= dict.fromkeys(("num_workers", "max_turns", "timeout_s"), "without env.environment")
    if not config.env.hosts:
        found["env"]["token_file"] = "without env.hosts"
    if config.reward.function is None:
        found["reward"] |= dict.fromkeys(("timeout_s", "num_workers"), "without reward.function")
    if config.reward.function == "service":
        found["reward"]["num_workers"] = "with reward.function = service: others judge"
    if awaited(config) is None:
        found["service"]["patience_s"] = "where the run waits for nobody outside"
    if not config.service.agents:
        found["service"]["session_lease_s"] = "without service.agents = true"


def _on_loss(config: Config) -> tuple[dict[str, str], dict[str, str]]:
    """The same of the sections algorithm and correction."""
    algorithm, correction = config.algorithm, config.correction
    objective: dict[str, str] = {}
    if algorithm.policy_loss not in ("dual_clip", "triplet_clip"):
        objective["clip_ratio_c"] = "without policy_loss = dual_clip or triplet_clip"
    if algorithm.policy_loss == "online_dpo":
        why = "with policy_loss = online_dpo: it compares two answers, with the initial policy between them"
        unused = ("adv_estimator", "clip_ratio_low", "clip_ratio_high", "kl_loss_coef", "entropy_coeff")
        objective |= dict.fromkeys(unused, why)
    else:
        objective["dpo_beta"] = "without policy_loss = online_dpo"
    rules = algorithm.policy_loss, correction.proximal, config.orchestrator.max_staleness
    if (never := recipe.why_never_clipped(*rules, config.trainer.batch_tokens)) is not None:
        objective |= dict.fromkeys(("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"), never)
    if algorithm.adv_estimator != "gae":
        objective |= dict.fromkeys(("gamma", "lam"), "without adv_estimator = gae")
    if not algorithm.kl_loss_coef:
        objective["kl_loss_type"] = "with kl_loss_coef = 0"
    if not algorithm.overlong_buffer_tokens:
        objective["overlong_penalty"] = "with overlong_buffer_tokens = 0"
    corrected: dict[str, str] = {}
    for kind, name, keys in (
        ("token", "tis", ("tis_cap",)),
        ("token", "icepop", ("icepop_low", "icepop_high")),
        ("sequence", "mis", ("mis_low", "mis_high")),
    ):
        if getattr(correction, kind) != name:
            corrected |= dict.fromkeys(keys, f"without correction.{kind} = {name}")
    if config.orchestrator.max_staleness == 0:
        corrected["age_decay"] = "with max_staleness = 0: all samples are fresh"
    return objective, corrected


def _on_critic(config: Config) -> dict[str, str]:
    """The same of the section critic."""
    if config.algorithm.adv_estimator != "gae":
        return dict.fromkeys(type(config.critic).model_fields, "without algorithm.adv_estimator = gae")
    if config.critic.ppo_epochs == 1 and config.trainer.batch_tokens is None:
        why = "with critic.ppo_epochs = 1: in the only update of a step no value has moved yet"
        return {"cliprange_value": why}
    return {}


def _on_stations(config: Config) -> dict[str, str]:
    """The same of the stations beside the trainer."""
    stations, algorithm = config.trainer.stations, config.algorithm
    compares = algorithm.kl_loss_coef > 0 or recipe.TRAITS[algorithm.policy_loss].unit == "pair"
    whys = {
        "reference": None if compares else "kl_loss_coef = 0: nothing compares with the initial policy",
        "proximal": None
        if config.correction.proximal == "recomputed"
        else f"correction.proximal = {config.correction.proximal}: no log-probs are computed again",
        "critic": None
        if algorithm.adv_estimator == "gae"
        else f"algorithm.adv_estimator = {algorithm.adv_estimator}: there is no critic",
    }
    for name, why in whys.items():
        if why and name in stations:
            return {"stations": f"for {name}, with {why}"}
    return {} if stations else {"station_device": "without trainer.stations"}
