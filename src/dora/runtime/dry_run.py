"""`dora train --dry-run`: everything a run needs, tried once.

Prints the numbers that follow from the configuration, each with its formula; writes nothing.
"""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue

from dora.config import Config
from dora.core.events import GroupScored, GroupUnscorable
from dora.core.records import GroupId
from dora.errors import ConfigError, RewardError
from dora.runtime import devices
from dora.runtime.folder import check_out
from dora.runtime.memory import memory, size
from dora.runtime.messages import Judge
from dora.runtime.plan import Plan
from dora.runtime.process import Told, take
from dora.runtime.rewarding import Rewarder


def check(config: Config, out: Path) -> str:
    """Load what the configuration names and call the reward once; returns what a run would be.

    Raises InputError for whatever would stop the run at its start, but for GPUs that are not here: their
    absence is told, for a run is often thought out on a machine without any. Writes nothing.
    """
    check_out(out)
    plan = Plan.make(config, out)
    judged = _call_reward(plan)
    findings = {**_derived(plan), **_places(plan), "reward": judged}
    return "\n".join(f"{name:<22}{value}" for name, value in findings.items())


def _derived(plan: Plan) -> dict[str, str]:
    config, limits = plan.config, plan.limits
    engines, rows, slots = plan.num_engines, config.engine.max_rows, config.version_slots
    rules = config.orchestrator
    return {
        "model": f"{plan.num_parameters:,} parameters, {size(plan.version_bytes)} a version in "
        f"{config.engine.dtype}",
        "prompts": f"{len(plan.dataset):,} for training, {len(plan.held_out or ())} held out",
        "batch": f"{limits.batch_size} groups x {limits.group_size} = {config.samples_per_step} samples, "
        + (f"updates of about {budget} tokens" if (budget := config.trainer.batch_tokens) else "one update"),
        "critic": f"{num:,} parameters" if (num := plan.num_critic_parameters) else "none",
        "policy": f"{rules.update_policy}, max_staleness {limits.max_staleness} ({rules.staleness})"
        + _live_versions(limits.batches_per_version),
        "gradients": "summed while a batch fills up"
        if config.streams
        else f"wait for the whole batch: {config.why_no_streaming or 'trainer.streaming = false'}",
        "ranks": f"num_ranks = {num_ranks}: 1 / {num_ranks} of policy, gradient and moments on each"
        if (num_ranks := config.trainer.num_ranks) > 1
        else "one trainer process",
        "placement": rules.placement + (", and the trainer lends itself" if config.trainer.elastic else ""),
        "window": f"(max_staleness + 1) x batch_size - slack = {config.window} groups admitted and untrained",
        "rows": f"engines x max_rows = {engines} x {rows} = {config.total_rows} requests at once",
        "version slots": f"{slots} per engine",
        "context": f"{config.data.max_prompt_length} + {config.sampling.max_response_length} tokens",
    }


def _places(plan: Plan) -> dict[str, str]:
    """Where what is computed, and what lies there, the activations of a micro-batch included."""
    findings = {f"memory on {device}": words for device, words in memory(plan).items()}
    findings["of it shared"] = f"{size(plan.stored_bytes)}, for versions and the KV of engines on the CPU"
    try:
        devices.check(plan.config)
    except ConfigError as error:
        findings["to be put right"] = f"a run would be refused here: {error}"
    return findings


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
