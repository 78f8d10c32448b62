"""What an update policy and its bound allow.

Asked of a whole configuration, for most answers depend on other keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora.errors import ConfigError
from dora.sections import FIXED_STALENESS

if TYPE_CHECKING:
    from dora.config import Config


def check_policy(config: Config) -> None:
    """Raises ConfigError for what the update policy or the bound does not allow."""
    o, slots = config.orchestrator, config.engine.version_slots
    staleness, policy = o.max_staleness, o.update_policy
    fixed = FIXED_STALENESS.get(policy)
    if fixed not in (None, staleness):
        meaning = "only on-policy samples" if policy == "sync" else "each batch one step late"
        raise ConfigError(
            f"orchestrator.max_staleness = {staleness}: update_policy = {policy} trains {meaning}, "
            f"max_staleness = {fixed}; remove max_staleness or use update_policy = dora"
        )
    if config.breaks_c1:
        _check_renewal(config, policy, slots)
    if o.batches_per_version > staleness + 1:
        raise ConfigError(
            f"orchestrator.batches_per_version = {o.batches_per_version}: a version may be trained by at "
            f"most max_staleness + 1 = {staleness} + 1 batches; lower it or raise max_staleness"
        )
    if o.slack > (most := staleness * config.trainer.batch_size):
        raise ConfigError(
            f"orchestrator.slack = {o.slack}: it must leave one whole batch, so it is at most "
            f"max_staleness * batch_size = {staleness} * {config.trainer.batch_size} = {most}; lower it"
        )
    if o.staleness == "adaptive" and (fixed is not None or staleness == 0):
        found = "max_staleness = 0" if fixed is None else f"update_policy = {policy}"
        raise ConfigError(
            f"orchestrator.staleness = adaptive: {found} leaves nothing to adapt; remove staleness, or "
            "use update_policy = dora with max_staleness >= 1"
        )
    if o.load_interval > staleness + 1:
        raise ConfigError(
            f"orchestrator.load_interval = {o.load_interval}: a version can be used for at most "
            f"max_staleness + 1 = {staleness} + 1 steps; lower it or raise max_staleness"
        )
    if slots is not None and slots > config.live_versions:
        raise ConfigError(
            f"engine.version_slots = {slots}: at most max_staleness + 1 = {staleness} + 1 versions are "
            "alive at once, with eval.every one more; more slots have no effect, lower or remove it"
        )
    if config.trainer.elastic and o.placement == "colocated":
        raise ConfigError(
            "trainer.elastic = true: with orchestrator.placement = colocated every engine already shares "
            "the trainer's device; remove one of the two"
        )


def _check_renewal(config: Config, policy: str, slots: int | None) -> None:
    """Raises ConfigError for what cannot be had with answers that go on with newer weights."""
    wanted = {
        "engine.adapter": (config.engine.adapter is not None, "only DORA's own engine does so"),
        "fleet": (bool(config.fleet), "only DORA's own engine does so"),
        "trainer.routing_replay": (
            config.trainer.routing_replay and policy == "partial",
            "the experts of what is computed again are not those that drew it",
        ),
        "engine.exact": (config.engine.exact, "no version can find such log-probs again"),
        "env.environment, env.hosts and service.agents": (
            config.has_episodes,
            "episodes keep the version they began with",
        ),
    }
    for key, (is_set, why) in wanted.items():
        if is_set:
            raise ConfigError(
                f"orchestrator.update_policy = {policy} lets answers go on with newer weights; {why}: "
                f"remove {key}, or use update_policy = dora"
            )
    fitting = min(config.live_versions, 2 + config.evaluates_beside)
    if slots not in (None, fitting):
        raise ConfigError(
            f"engine.version_slots = {slots}: update_policy = {policy} needs {fitting}, for the old weights "
            "are let go of once the new ones are there, and with eval.every one version is kept; remove it"
        )
