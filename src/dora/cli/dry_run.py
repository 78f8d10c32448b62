"""`dora train --dry-run`: load everything that a run needs, and describe the run without starting it."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from dora.config.schema import Config
from dora.core.events import GroupScored, ScoringFailed
from dora.core.types import GroupId
from dora.errors import ConfigError, RewardError
from dora.runtime.memory import memory_by_device
from dora.runtime.process import backends, resources
from dora.runtime.process.resources import run_resources
from dora.runtime.process.supervisor import Supervisor
from dora.runtime.process.worker_process import WorkerMessages
from dora.runtime.rollout.env_pool import try_environment
from dora.runtime.run_dir import check_out
from dora.runtime.run_setup import RunSetup
from dora.runtime.scoring.reward_manager import RewardManager, reward_tasks
from dora.runtime.scoring.reward_worker import encode_prompt_row
from dora.stream.run_stream import RunStream
from dora.stream.sample_db import HeldOutResponse
from dora.text import plural, size


def dry_run(config: Config, out: Path) -> str:
    """Load what the configuration names, call the rewards, start an episode; returns a table of the run.

    Writes nothing. Raises InputError for any problem that would prevent the run, except missing GPUs: runs
    are often planned on a machine without GPUs, so the table mentions them.
    """
    check_out(out)
    setup = RunSetup.make(config, out)
    reward = _call_rewards(setup)
    rows = _plan(setup) | _memory(setup) | _problems(config)
    if config.env.has_environments:
        rows["environment"] = try_environment(setup)
    rows["reward"] = reward
    rows |= {"notice": "; ".join(setup.notices)} if setup.notices else {}
    return "\n".join(f"{name:<22}{value}" for name, value in rows.items())


def _plan(setup: RunSetup) -> dict[str, str]:
    """Sizes that follow from the configuration, with their formulas."""
    config, limits, rules = setup.config, setup.limits, setup.config.orchestrator
    num_prompts = setup.num_prompts
    prompts = "submitted through the service" if num_prompts is None else f"{num_prompts:,} for training"
    own, *others = config.engine_kinds
    kinds = [own._replace(num_engines=own.num_engines + config.trainer.elastic), *others]
    num_seqs = " + ".join(f"{kind.num_engines} x {kind.max_num_seqs}" for kind in kinds)
    in_flight = plural(config.max_groups_in_flight, "group")
    lengths = f"{config.data.max_prompt_length} + {config.sampling.max_response_length}"
    return {
        "model": f"{setup.num_parameters:,} parameters, {size(setup.version_bytes)} per version in "
        f"{config.engine.dtype}",
        "prompts": f"{prompts}, {len(setup.held_out or ())} held out",
        "batch": f"{plural(limits.batch_size, 'group')} x {limits.group_size} = "
        f"{plural(config.samples_per_step, 'sample')}, {_updates(config)}",
        "critic": f"{num:,} parameters" if (num := setup.num_critic_parameters) else "none",
        "update policy": f"{rules.update_policy}, max_staleness {limits.max_staleness} "
        f"({rules.staleness_mode}), {_live_versions(limits.batches_per_version)}",
        "gradients": _gradients(config),
        "trainer": _ranks(config.trainer.num_ranks),
        "placement": rules.placement + (", with an elastic trainer" if config.trainer.elastic else ""),
        "groups in flight": f"at most (max_staleness + 1) x batch_size - slack = {in_flight}",
        "requests at once": f"engines x max_num_seqs = {num_seqs} = {config.max_concurrent_requests}",
        "version slots": f"{', '.join(str(kind.version_slots) for kind in kinds)} per engine",
        "sequence length": f"prompt + response = {lengths} = {config.max_sequence_length} tokens",
    }


def _updates(config: Config) -> str:
    budget = config.trainer.mini_batch_tokens
    return f"optimizer updates of about {budget} response tokens" if budget else "one optimizer update"


def _gradients(config: Config) -> str:
    if config.streams_gradients:
        return "accumulated while the batch fills up"
    return f"computed once the batch is complete: {config.why_not_streaming or 'trainer.streaming = false'}"


def _live_versions(batches_per_version: int | None) -> str:
    if batches_per_version is None:
        return "several live versions"
    return f"one live version at a time, batches_per_version = {batches_per_version}"


def _ranks(num_ranks: int) -> str:
    if num_ranks == 1:
        return "one process"
    return f"{num_ranks} ranks, each with 1/{num_ranks} of weights, gradients and optimizer state"


def _memory(setup: RunSetup) -> dict[str, str]:
    rows = {f"memory on {device}": parts for device, parts in memory_by_device(setup).items()}
    if setup.config.runtime.kind == "ray":
        actors = Counter(need.role for need in run_resources(setup.config))
        rows["actors"] = ", ".join(plural(num, kind) for kind, num in actors.items())
    rows["shared memory"] = (
        f"{size(setup.stored_bytes)} of it, for versions, the KV cache of CPU engines, and "
        f"{size(setup.stream_bytes)} of samples"
    )
    return rows


def _problems(config: Config) -> dict[str, str]:
    """Devices and libraries that the run needs and this machine lacks."""
    try:
        resources.check_devices(config)
        backends.check_backends(config)
    except ConfigError as error:
        return {"not on this machine": f"the run cannot start here: {error}"}
    return {}


def _call_rewards(setup: RunSetup) -> str:
    """Score an empty response to the first prompt with every reward task, in worker processes as in a run."""
    config, dataset = setup.config, setup.dataset
    tasks = reward_tasks(config, setup.columns, setup.missing_columns)
    if not tasks:
        return "given by the environment"
    if not len(dataset) or any(task.is_external for task in tasks):
        return "not checked: prompts or rewards come through the service"
    events: list[GroupScored | ScoringFailed] = []
    supervisor = Supervisor(config, setup.out, WorkerMessages())
    supervisor.check_starts()
    with tempfile.TemporaryDirectory(prefix="dora-") as folder:
        leases = {task.name: task.lease_s() for task in tasks}
        stream = RunStream(Path(folder) / "stream", 1, tasks=leases)
        manager = RewardManager(
            tasks, stream, supervisor, lambda group: [], lambda event, _: events.append(event), lambda _: None
        )
        try:
            question = encode_prompt_row(dataset.prompt(0), dataset.fields(0))
            response = HeldOutResponse([], "stop")
            manager.submit(GroupId(-1, 0), question, [response])  # a held-out group, which is not trained
            while not events:
                supervisor.poll(0.2)
                manager.check_deadlines()
        finally:
            manager.close()
            stream.close()
    if isinstance(events[0], ScoringFailed):
        raise RewardError(
            "the rewards must score an empty response, because a policy can generate one; "
            f"for the first prompt: {manager.first_failure}"
        )
    return f"{events[0].rewards[0]:g} for an empty response to the first prompt"
