"""`dora train --dry-run`: everything a run needs, tried once.

Prints the numbers that follow from the configuration, each with its formula; writes nothing.
"""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue

from dora.config import Config
from dora.core.events import GroupScored, GroupUnscorable
from dora.core.records import GroupId
from dora.errors import RewardError
from dora.runtime.folder import check_out
from dora.runtime.messages import Judge
from dora.runtime.plan import Plan
from dora.runtime.process import Told, take
from dora.runtime.rewarding import Rewarder

_MB = 1e6
_COPIES_IN_TRAINER = 4  # weights, gradient, and AdamW's two moments


def check(config: Config, out: Path) -> str:
    """Load what the configuration names and call the reward once; returns what a run would be.

    Raises InputError for whatever would stop the run at its start. Writes nothing.
    """
    check_out(out)
    plan = Plan.make(config, out)
    judged = _call_reward(plan)
    return "\n".join(f"{name:<22}{value}" for name, value in {**_derived(plan), "reward": judged}.items())


def _derived(plan: Plan) -> dict[str, str]:
    config, limits = plan.config, plan.limits
    engines, rows, slots = plan.num_engines, config.engine.max_rows, config.version_slots
    weights, kv = 4 * plan.num_parameters, plan.pool_bytes
    memory = engines * slots * weights + _COPIES_IN_TRAINER * weights + plan.stored_bytes
    rules = config.orchestrator
    return {
        "model": f"{plan.num_parameters:,} parameters, {weights / _MB:.1f} MB",
        "prompts": f"{len(plan.dataset):,} for training, {len(plan.held_out or ())} held out",
        "batch": f"{limits.batch_size} groups x {limits.group_size} = {config.samples_per_step} samples",
        "policy": f"{rules.update_policy}, max_staleness {limits.max_staleness}"
        + _live_versions(limits.batches_per_version),
        "gradients": "summed while a batch fills up"
        if config.streams
        else f"wait for the whole batch: {config.why_no_streaming or 'trainer.streaming = false'}",
        "placement": rules.placement + (", and the trainer lends itself" if config.trainer.elastic else ""),
        "window": f"(max_staleness + 1) x batch_size - slack = {config.window} groups admitted and untrained",
        "rows": f"engines x max_rows = {engines} x {rows} = {config.total_rows} requests at once",
        "version slots": f"{slots} per engine",
        "context": f"{config.data.max_prompt_length} + {config.sampling.max_response_length} tokens",
        "memory": f"{memory / _MB:.0f} MB: {engines} engines x ({slots} x weights + {kv / _MB:.0f} MB of "
        f"KV), {_COPIES_IN_TRAINER} x weights in the trainer, {plan.weights_bytes / _MB:.0f} MB in the store",
    }


def _live_versions(batches_per_version: int | None) -> str:
    if batches_per_version is None:
        return ", several live versions"
    return f", one live version at a time, for batches_per_version = {batches_per_version}"


def _call_reward(plan: Plan) -> str:
    """Judge an empty answer to the first prompt, as a rewarder process would."""
    config, dataset = plan.config, plan.dataset
    told: Told = SimpleQueue()
    rewarder = Rewarder(plan.rewarder_spec(), config.reward.timeout_s, config.runtime.start_timeout_s, told)
    try:
        rewarder.submit(Judge(GroupId(0, 0), dataset.prompt(0), dataset.fields(0), [[]]))
        facts: list[GroupScored | GroupUnscorable] = []
        while not facts:
            for _, message in take(told, 0.2):
                facts += rewarder.heard(message)
            facts += rewarder.check_deadline()
        if isinstance(facts[0], GroupUnscorable):
            raise RewardError(
                f"reward.function = {config.reward.function!r}, called with an empty answer to the first "
                f"prompt, as a policy may give: {rewarder.first_failure}"
            )
        return f"{facts[0].rewards[0]:g} for an empty answer to the first prompt"
    finally:
        rewarder.worker.kill()
