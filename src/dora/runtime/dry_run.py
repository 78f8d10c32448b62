"""`dora train --dry-run`: everything a run needs, tried once.

Prints the numbers that follow from the configuration, each with its formula; writes nothing.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from dora.config import Config
from dora.core.events import GroupScored, GroupUnscorable
from dora.core.records import GroupId
from dora.core.wording import counted
from dora.errors import ConfigError, RewardError
from dora.fleets import kinds
from dora.runtime import adapters, devices
from dora.runtime.environments import try_environment
from dora.runtime.folder import check_out
from dora.runtime.judging import question_of
from dora.runtime.memory import memory, size
from dora.runtime.needs import needs_of
from dora.runtime.plan import Plan
from dora.runtime.process import Told, take
from dora.runtime.rewarding import Rewarding, reward_tasks
from dora.stream.feed import Feed


def check(config: Config, out: Path) -> str:
    """Load what the configuration names, call its reward, begin an episode; returns what a run would be.

    Raises InputError for whatever would stop the run at its start, but for GPUs that are not here: their
    absence is told, for a run is often thought out on a machine without any. Writes nothing.
    """
    check_out(out)
    plan = Plan.make(config, out)
    judged = _call_rewards(plan)
    played = {"environment": try_environment(plan)} if config.env.is_played else {}
    findings = {**_derived(plan), **_places(plan), **played, "reward": judged}
    return "\n".join(f"{name:<22}{value}" for name, value in findings.items())


def _derived(plan: Plan) -> dict[str, str]:
    config, limits = plan.config, plan.limits
    own, *others = kinds(config)
    engines = [own._replace(num_engines=own.num_engines + config.trainer.elastic), *others]
    rows = " + ".join(f"{kind.num_engines} x {kind.max_rows}" for kind in engines)
    rules = config.orchestrator
    return {
        "model": f"{plan.num_parameters:,} parameters, {size(plan.version_bytes)} a version in "
        f"{config.engine.dtype}",
        "prompts": f"{'put through the service' if plan.num_prompts is None else f'{plan.num_prompts:,}'} "
        f"for training, {len(plan.held_out or ())} held out",
        "batch": f"{counted(limits.batch_size, 'group')} x {limits.group_size} = "
        f"{counted(config.samples_per_step, 'sample')}, "
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
        "window": f"(max_staleness + 1) x batch_size - slack = {counted(config.window, 'group')} "
        "admitted and untrained",
        "rows": f"engines x max_rows = {rows} = {counted(config.total_rows, 'request')} at once",
        "version slots": f"{', '.join(str(kind.version_slots) for kind in engines)} per engine",
        "context": f"{config.data.max_prompt_length} + {config.sampling.max_response_length} tokens",
    }


def _places(plan: Plan) -> dict[str, str]:
    """Where what is computed, and what lies there, the activations of a micro-batch included."""
    findings = {f"memory on {device}": words for device, words in memory(plan).items()}
    what = f"versions, the KV of engines on the CPU, and {size(plan.stream_bytes)} of samples"
    if plan.config.runtime.kind == "ray":
        actors = Counter(need.kind for need in needs_of(plan))
        findings["actors"] = ", ".join(counted(num, kind) for kind, num in actors.items())
    findings["of it shared"] = f"{size(plan.stored_bytes)}, for {what}"
    try:
        devices.check(plan.config)
        adapters.check(plan.config)
    except ConfigError as error:
        findings["to be put right"] = f"a run would be refused here: {error}"
    return findings


def _live_versions(batches_per_version: int | None) -> str:
    if batches_per_version is None:
        return ", several live versions"
    return f", one live version at a time, for batches_per_version = {batches_per_version}"


def _call_rewards(plan: Plan) -> str:
    """Have every reward task judge an empty answer to the first prompt, in processes as those of a run."""
    config, dataset = plan.config, plan.dataset
    tasks = reward_tasks(config, dataset.columns)
    if not tasks:
        return "from the other side of each episode"
    if not len(dataset) or any(task.is_outside for task in tasks):
        return "not tried: prompts or rewards come from outside"
    told = Told()
    with tempfile.TemporaryDirectory(prefix="dora-") as folder:
        leases = {task.name: task.lease_s() for task in tasks}
        feed = Feed(Path(folder) / "stream", 1, tasks=leases, num_answers=1)
        rewarding = Rewarding(tasks, feed, config.runtime.start_timeout_s, told, lambda _: None)
        try:
            question = question_of(dataset.prompt(0), dataset.fields(0))
            rewarding.submit(GroupId(-1, 0), question, [[]])  # as if it were held out: nobody trains it
            facts: list[GroupScored | GroupUnscorable] = []
            while not facts:
                for worker, message in take(told, 0.2):
                    facts += rewarding.hear(worker, message) or []
                facts += rewarding.check_deadlines()
        finally:
            rewarding.kill()
            feed.close()
    if isinstance(facts[0], GroupUnscorable):
        raise RewardError(
            "the rewards, called with an empty answer to the first prompt, as a policy may give: "
            f"{rewarding.first_failure}"
        )
    return f"{facts[0].rewards[0]:g} for an empty answer to the first prompt"
