"""Estimates of the memory that a run needs, by device and part."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from dora.engine.cuda_graphs import MAX_GRAPHS
from dora.engine.kernels.workspace import (
    MAX_PADDING,
    MAX_PREFILL_READS,
    MAX_PREFILL_ROWS,
    MIN_PARTITION,
    PARTITION,
)
from dora.errors import ConfigError
from dora.model.pretrained import check_pretrained
from dora.model.weights import WeightLayout
from dora.runtime.process.resources import is_gpu
from dora.runtime.run_setup import RunSetup
from dora.text import plural, size
from dora.trainer.perf import activation_bytes, logits_bytes, sharded_micro_batch_bytes
from dora.weights.store import MEMORY_FS

# Bytes per parameter in fp32: the weight; with the two moments of AdamW; with these and the gradient.
_WEIGHT, _WITH_MOMENTS, _WITH_GRADIENT = 4, 12, 16
# Estimates for GPUs: context and libraries of a process; a layer of a CUDA graph; and what the logit of a
# token takes with the temporaries of the sampler, which sorts them for filters.
_CONTEXT, _GRAPH_LAYER, _PER_LOGIT, _WITH_FILTERS = 600_000_000, 2**18, 16, 48
_TOLERANCE = 1.25  # estimated over available memory that is not refused


def memory_by_device(setup: RunSetup) -> dict[str, str]:
    """Device -> total and parts, see `bytes_by_device`.

    Devices with the same contents are merged into ranges, such as cuda:0-3.
    """
    by_text: dict[str, list[str]] = {}
    for device, held in bytes_by_device(setup).items():
        by_text.setdefault(f"{size(sum(held.values()))}: {', '.join(held)}", []).append(device)
    grouped = sorted((sorted(devices), text) for text, devices in by_text.items())
    return {
        devices[0] if len(devices) == 1 else f"{devices[0]}-{devices[-1].removeprefix('cuda:')}": text
        for devices, text in grouped
    }


def check_gpu_memory(setup: RunSetup, total_bytes: Callable[[int], int] | None = None) -> None:
    """Raises ConfigError if a GPU is far too small. `total_bytes` of a GPU by number: by default torch's.

    The estimates are rough, so a GPU is refused only if they exceed its memory by a quarter.
    """
    if setup.config.runtime.kind == "ray":  # its GPUs are on other machines
        return
    for device, parts in bytes_by_device(setup).items():
        if not is_gpu(device):
            continue
        needed, total = sum(parts.values()), (total_bytes or _gpu_bytes)(int(device.removeprefix("cuda:")))
        if needed > _TOLERANCE * total:
            raise ConfigError(
                f"{device} has {size(total)}, and the run needs about {size(needed)} there: "
                f"{', '.join(parts)}; lower engine.max_num_seqs (or engine.num_kv_blocks), "
                "engine.version_slots or trainer.micro_batch_tokens"
            )


def explain_slow_store(folder: Path, num_bytes: int) -> str:
    """Why the weight store's folder, for `num_bytes`, is not in memory, and the remedy; "" if it is."""
    if folder.parent == MEMORY_FS or not MEMORY_FS.exists():
        return ""
    return (
        f"{MEMORY_FS} has {size(shutil.disk_usage(MEMORY_FS).free)} free, and weights, KV caches and samples "
        f"need {size(num_bytes)}: they are on the disk of {folder.parent}, which is slower; enlarge "
        f"{MEMORY_FS} (in a container with --shm-size)"
    )


def _gpu_bytes(number: int) -> int:
    return int(torch.cuda.get_device_properties(number).total_memory)


def bytes_by_device(setup: RunSetup) -> dict[str, dict[str, int]]:
    """Device -> bytes of each part.

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
    num_bytes = _checkpoint_bytes(setup)
    add("cpu", f"{size(num_bytes)} for copies while a checkpoint is written", num_bytes)
    return parts


def trainer_bytes(setup: RunSetup) -> Counter[str]:
    """Device -> bytes of weights, gradients, optimizer state and a frozen reference policy.

    Ranks shard them, except for the critic, which rank 0 holds alone, and for adapters, which every rank
    holds. Rank 0 gathers the weights on the CPU, in fp32 and as they are published. A single rank that
    computes in bf16 has a bf16 copy of the weights.
    """
    config, devices = setup.config, setup.devices
    num_ranks = devices.num_ranks
    copy = 2 if config.trainer.dtype == "bfloat16" and num_ranks == 1 else 0
    reference = (copy or _WEIGHT) * _has_reference(setup)
    num_bytes, num_bytes_of_each = (copy + reference) * setup.num_parameters, 0
    held = Counter[str]()
    if (lora := setup.lora) is None:
        moments = (_WITH_MOMENTS - _WEIGHT) * setup.num_parameters
        num_bytes += _WITH_GRADIENT * setup.num_parameters
        if config.trainer.offload_optimizer:
            num_bytes -= moments
            held["cpu"] += moments
    else:  # all weights, merged; for the adapted matrices also the original weights and a gradient
        layout = WeightLayout(setup.model)
        num_adapted = sum(map(math.prod, lora.target_shapes(layout).values()))
        num_frozen = num_adapted if num_ranks == 1 else setup.num_parameters  # whole shards have a gradient
        num_bytes += _WEIGHT * (setup.num_parameters + 2 * num_frozen)
        num_bytes_of_each = _WITH_GRADIENT * lora.adapter_layout(layout).numel
    if "values" not in setup.aux_columns:
        held[devices.trainer_device(0)] += (_WITH_GRADIENT + copy) * setup.num_critic_parameters
    for rank in range(num_ranks):
        held[devices.trainer_device(rank)] += num_bytes // num_ranks + num_bytes_of_each
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
    has_filters = config.sampling.has_filters or config.eval_sampling.has_filters
    num_bytes = num_rows * model.vocab_size * (_WITH_FILTERS if has_filters else _PER_LOGIT)
    num_partitions = num_rows * -(-config.max_sequence_length // PARTITION)
    num_partitions = max(num_partitions, MAX_PREFILL_ROWS + MAX_PREFILL_READS // MIN_PARTITION)
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
    num_frozen_parameters = num_frozen * setup.num_parameters
    if (distillation := setup.config.distillation).teachers:  # in place of the initial policy
        num_frozen_parameters += sum(check_pretrained(Path(folder)) for folder in distillation.folders)
        num_frozen_parameters -= setup.num_parameters
    return (copy or _WEIGHT) * num_frozen_parameters + (_WITH_GRADIENT + copy) * num_critic


def _snapshot_bytes(setup: RunSetup) -> int:
    """Weights and moments that the trainer keeps to roll back a failed step."""
    num_parameters = 0 if "values" in setup.aux_columns else setup.num_critic_parameters
    num_parameters += setup.num_parameters if setup.config.trainer.mini_batch_tokens else 0
    return _WITH_MOMENTS * num_parameters


def _checkpoint_bytes(setup: RunSetup) -> int:
    """Copies of weights and moments from which a checkpoint is written while training goes on."""
    num_bytes = _WEIGHT * setup.num_parameters
    if (lora := setup.lora) is None:
        num_bytes += (_WITH_MOMENTS - _WEIGHT) * setup.num_parameters
    else:
        num_bytes += _WITH_MOMENTS * lora.adapter_layout(WeightLayout(setup.model)).numel
    return num_bytes + _WITH_MOMENTS * setup.num_critic_parameters
