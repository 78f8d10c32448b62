"""`dora train --dry-run`: load everything that a run needs, and describe the run without starting it."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from pathlib import Path

from dora.config.schema import Config
from dora.core.events import GroupScored, ScoringFailed
from dora.core.types import GroupId
from dora.engine.cuda_graphs import MAX_GRAPHS
from dora.engine.kernels.workspace import MAX_PADDING, PARTITION
from dora.errors import ConfigError, RewardError
from dora.model.weights import WeightLayout
from dora.runtime.process import backends, resources
from dora.runtime.process.resources import is_gpu, run_resources
from dora.runtime.process.supervisor import Supervisor
from dora.runtime.process.worker_process import WorkerMessages
from dora.runtime.rollout.env_pool import try_environment
from dora.runtime.run_dir import check_out
from dora.runtime.run_setup import RunSetup
from dora.runtime.scoring.reward_manager import RewardManager, reward_tasks
from dora.runtime.scoring.reward_worker import encode_prompt_row
from dora.stream.run_stream import RunStream
from dora.text import plural, size
from dora.trainer.perf import activation_bytes, logits_bytes, sharded_micro_batch_bytes

# Bytes per parameter in fp32: the weight; with the two moments of AdamW; with these and the gradient.
_WEIGHT, _WITH_MOMENTS, _WITH_GRADIENT = 4, 12, 16
# Estimates for GPUs: context and libraries of a process; a layer of a CUDA graph; and what the logit of a
# token takes with the temporaries of the sampler, which sorts them for filters.
_CONTEXT, _GRAPH_LAYER, _PER_LOGIT, _WITH_FILTERS = 600_000_000, 2**18, 16, 48


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


def memory_by_device(setup: RunSetup) -> dict[str, str]:
    """Device, or a range of devices with the same contents -> total and parts.

    A micro-batch of the trainer counts at its maximum. Activations of prefill and of decode steps on the CPU
    are not included.
    """
    devices = setup.devices
    parts: dict[str, dict[str, int]] = {}

    def add(device: str, part: str, num_bytes: int) -> None:
        parts.setdefault(device, {})[part] = num_bytes

    slots, version, kv = setup.config.version_slots, setup.version_bytes, setup.kv_bytes
    engines = Counter(
        devices.engine_device(engine, is_colocated=setup.is_colocated(engine))
        for engine in range(setup.num_engines)
    )
    processes = Counter(devices.trainer_device(rank) for rank in range(devices.num_ranks)) + engines
    for device, num in processes.items():
        if is_gpu(device):
            add(device, f"{num} x {size(_CONTEXT)} for CUDA", num * _CONTEXT)
    for device, num in engines.items():
        if is_gpu(device):
            num_bytes = decode_step_bytes(setup)
            add(device, f"{num} x {size(num_bytes)} for decode steps and graphs", num * num_bytes)
        per_engine = f"({slots} x {size(version)} of weights + {size(kv)} of KV cache)"
        add(device, f"{plural(num, 'engine')} x {per_engine}", num * (slots * version + kv))
    for device, num_bytes in trainer_bytes(setup).items():
        add(device, f"{size(num_bytes)} for the trainer", num_bytes)
    if is_gpu(rank_0 := devices.trainer_device(0)) and (num_bytes := copied_version_bytes(setup)):
        add(rank_0, f"{size(num_bytes)} to check an older version", num_bytes)
    micro_batch = micro_batch_bytes(setup)
    for device, num in Counter(map(devices.trainer_device, range(devices.num_ranks))).items():
        add(device, f"at most {num} x {size(micro_batch)} for a micro-batch", num * micro_batch)
    if setup.aux_columns:
        num_bytes = aux_worker_bytes(setup)
        add(devices.aux_device(), f"{size(num_bytes)} for auxiliary workers", num_bytes)
    add("cpu", f"{size(setup.weights_bytes)} for the weight store", setup.weights_bytes)
    add("cpu", f"{size(setup.stream_bytes)} for the sample stream", setup.stream_bytes)
    if setup.config.weights.load == "deferred":
        prefetched = f"{setup.num_engines} x {size(version)} for prefetched versions"
        add("cpu", prefetched, setup.num_engines * version)
    if num_bytes := _snapshot_bytes(setup):
        add("cpu", f"{size(num_bytes)} to roll back a step that fails between two updates", num_bytes)
    return _grouped(parts)


def _grouped(parts: dict[str, dict[str, int]]) -> dict[str, str]:
    """Merge devices with the same contents into ranges, such as cuda:0-3."""
    by_text: dict[str, list[str]] = {}
    for device, held in parts.items():
        by_text.setdefault(f"{size(sum(held.values()))}: {', '.join(held)}", []).append(device)
    grouped = sorted((sorted(devices), text) for text, devices in by_text.items())
    return {
        devices[0] if len(devices) == 1 else f"{devices[0]}-{devices[-1].removeprefix('cuda:')}": text
        for devices, text in grouped
    }


def trainer_bytes(setup: RunSetup) -> Counter[str]:
    """Device -> bytes of weights, gradients, optimizer state and a frozen reference policy.

    Ranks shard them, and rank 0 gathers the weights on the CPU, in fp32 and as they are published. A single
    rank that computes in bf16 has a bf16 copy of the weights.
    """
    config, devices = setup.config, setup.devices
    num_ranks = devices.num_ranks
    copy = 2 if config.trainer.dtype == "bfloat16" and num_ranks == 1 else 0
    reference = (copy or _WEIGHT) * _has_reference(setup)
    num_bytes = (copy + reference) * setup.num_parameters
    if (lora := setup.lora) is None:
        num_bytes += _WITH_GRADIENT * setup.num_parameters
    else:  # all weights, merged; for the adapted matrices also the original weights and a gradient
        layout = WeightLayout(setup.model)
        num_adapted = sum(map(math.prod, lora.target_shapes(layout).values()))
        num_bytes += _WEIGHT * (setup.num_parameters + 2 * num_adapted)
        num_bytes += _WITH_GRADIENT * lora.adapter_layout(layout).numel
    if "values" not in setup.aux_columns:
        num_bytes += (_WITH_GRADIENT + copy) * setup.num_critic_parameters
    held = Counter[str]()
    for rank in range(num_ranks):
        held[devices.trainer_device(rank)] += num_bytes // num_ranks
    if num_ranks > 1:
        rounded = setup.version_bytes if config.engine.dtype == "bfloat16" else 0
        held["cpu"] += _WEIGHT * setup.num_parameters + rounded
    return +held


def _has_reference(setup: RunSetup) -> bool:
    """Whether the trainer itself holds a reference policy."""
    config = setup.config
    needs_one = bool(config.algorithm.kl_loss_coef) or config.advantage_settings.is_paired
    return needs_one and "reference" not in setup.aux_columns


def micro_batch_bytes(setup: RunSetup) -> int:
    """Activations, logits and gathered weights of a full micro-batch on one rank."""
    trainer, model = setup.config.trainer, setup.model
    itemsize = 2 if trainer.dtype == "bfloat16" else _WEIGHT
    if setup.devices.num_ranks > 1:
        return sharded_micro_batch_bytes(
            model,
            trainer.micro_batch_tokens,
            setup.logits_chunk_tokens,
            itemsize,
            trainer.activation_checkpointing,
            _has_reference(setup),
        )
    activations = activation_bytes(
        model, trainer.micro_batch_tokens, itemsize, trainer.activation_checkpointing
    )
    trains_head = setup.lora is None
    return activations + logits_bytes(model, setup.logits_chunk_tokens, itemsize, trains_head)


def decode_step_bytes(setup: RunSetup) -> int:
    """Logits, sampler, partial attention and CUDA graphs of one engine on a GPU."""
    config, model = setup.config, setup.model
    num_rows = config.engine.max_num_seqs + MAX_PADDING * config.version_slots
    sampling = config.sampling
    has_filters = bool(sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
    num_bytes = num_rows * model.vocab_size * (_WITH_FILTERS if has_filters else _PER_LOGIT)
    num_partitions = num_rows * -(-config.max_sequence_length // PARTITION)
    num_bytes += num_partitions * model.num_attention_heads * (model.head_dim + 1) * 4
    return num_bytes + MAX_GRAPHS * model.num_hidden_layers * _GRAPH_LAYER


def copied_version_bytes(setup: RunSetup) -> int:
    """An older version on the device of rank 0, as published and as computed with."""
    itemsize = 2 if setup.config.trainer.dtype == "bfloat16" else _WEIGHT
    if not setup.config.orchestrator.max_staleness:
        return 0
    rounded = setup.version_bytes if setup.config.engine.dtype == "bfloat16" else 0
    return itemsize * setup.num_parameters + rounded


def aux_worker_bytes(setup: RunSetup) -> int:
    """Frozen weights of the auxiliary workers, and the critic's training state."""
    copy = 2 if setup.config.trainer.dtype == "bfloat16" else 0
    num_frozen = len({"reference", "proximal"} & {*setup.aux_columns})
    num_critic = setup.num_critic_parameters if "values" in setup.aux_columns else 0
    return (copy or _WEIGHT) * num_frozen * setup.num_parameters + (_WITH_GRADIENT + copy) * num_critic


def _snapshot_bytes(setup: RunSetup) -> int:
    """Weights and moments that the trainer keeps to roll back a failed step."""
    num_parameters = 0 if "values" in setup.aux_columns else setup.num_critic_parameters
    num_parameters += setup.num_parameters if setup.config.trainer.mini_batch_tokens else 0
    return _WITH_MOMENTS * num_parameters


def _call_rewards(setup: RunSetup) -> str:
    """Score an empty response to the first prompt with every reward task, in worker processes as in a run."""
    config, dataset = setup.config, setup.dataset
    tasks = reward_tasks(config, dataset.columns)
    if not tasks:
        return "given by the environment"
    if not len(dataset) or any(task.is_external for task in tasks):
        return "not checked: prompts or rewards come through the service"
    events: list[GroupScored | ScoringFailed] = []
    supervisor = Supervisor(config, setup.out, WorkerMessages(), lambda message: manager.on_message(message))
    supervisor.check_starts()
    with tempfile.TemporaryDirectory(prefix="dora-") as folder:
        leases = {task.name: task.lease_s() for task in tasks}
        stream = RunStream(Path(folder) / "stream", 1, tasks=leases, held_out_size=1)
        manager = RewardManager(tasks, stream, supervisor, events.append, lambda _: None)
        try:
            question = encode_prompt_row(dataset.prompt(0), dataset.fields(0))
            manager.submit(GroupId(-1, 0), question, [[]])  # a held-out group, which is not trained
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
