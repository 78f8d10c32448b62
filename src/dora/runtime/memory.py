"""How much memory a run takes on each device, as far as it follows from the configuration.

What a step of an engine computes with comes on top; a micro-batch of the trainer is counted at its largest.
"""

from __future__ import annotations

import math
from collections import Counter

from dora.model.weights import Layout
from dora.runtime.plan import Plan
from dora.trainer.memory import activation_bytes, logits_bytes

# Bytes of a parameter in fp32: alone, with AdamW's two moments, and with its gradient, too.
_WHOLE, _KEPT, _TRAINED = 4, 12, 16


def memory(plan: Plan) -> dict[str, str]:
    """Device, or several that hold the same -> bytes in all, and of what."""
    slots, version, kv = plan.config.version_slots, plan.version_bytes, plan.kv_bytes
    places = (
        plan.devices.of_engine(engine, is_colocated=plan.is_colocated(engine))
        for engine in range(plan.num_engines)
    )
    parts: dict[str, dict[str, int]] = {}
    for device, num in Counter(places).items():
        words = f"{num} engine{'s' * (num > 1)} x ({slots} x {size(version)} of weights + {size(kv)} of KV)"
        parts.setdefault(device, {})[words] = num * (slots * version + kv)
    for device, num_bytes in trainer_bytes(plan).items():
        parts.setdefault(device, {})[f"{size(num_bytes)} in the trainer"] = num_bytes
    computed = micro_batch_bytes(plan)
    for device, num in Counter(map(plan.devices.of_trainer, range(plan.devices.num_trainers))).items():
        parts[device][f"at most {num} x {size(computed)} for a micro-batch"] = num * computed
    if plan.columns:
        num_bytes = station_bytes(plan)
        parts.setdefault(plan.devices.of_station(), {})[f"{size(num_bytes)} in stations"] = num_bytes
    parts.setdefault("cpu", {})[f"{size(plan.weights_bytes)} of versions in the store"] = plan.weights_bytes
    parts["cpu"][f"{size(plan.stream_bytes)} of samples in the stream"] = plan.stream_bytes
    if plan.config.weights.load == "deferred":
        words = f"{plan.num_engines} x {size(version)} of a version on its way to an engine"
        parts["cpu"][words] = plan.num_engines * version
    num_kept = 0 if "values" in plan.columns else plan.num_critic_parameters
    num_kept += plan.num_parameters if plan.config.trainer.batch_tokens else 0
    if num_kept:
        kept = _KEPT * num_kept
        parts["cpu"][f"{size(kept)} to take back a step that fails between two updates"] = kept
    alike: dict[str, list[str]] = {}
    for device, held in parts.items():
        alike.setdefault(f"{size(sum(held.values()))}: {', '.join(held)}", []).append(device)
    return {_joined(sorted(devices)): words for words, devices in sorted(alike.items(), key=lambda x: x[1])}


def trainer_bytes(plan: Plan) -> Counter[str]:
    """Device -> bytes: the weights in training with all that belongs to them, and a frozen reference.

    Several ranks share them out, and rank 0 brings the weights together on the CPU. One alone computes in
    bf16 with a copy of all weights.
    """
    config, devices = plan.config, plan.devices
    num_ranks = devices.num_trainers
    copy = 2 if config.trainer.dtype == "bfloat16" and num_ranks == 1 else 0
    compares = bool(config.algorithm.kl_loss_coef) or plan.scoring.is_paired
    frozen = (copy or _WHOLE) if compares and "reference" not in plan.columns else 0
    num_bytes = (copy + frozen) * plan.num_parameters
    if (lora := plan.lora) is None:
        num_bytes += _TRAINED * plan.num_parameters
    else:  # merged weights; beside adapted ones those they were, and a gradient
        layout = Layout(plan.model)
        num_adapted = sum(map(math.prod, lora.adapted(layout).values()))
        num_bytes += _WHOLE * (plan.num_parameters + 2 * num_adapted)
        num_bytes += _TRAINED * lora.factors(layout).numel
    if "values" not in plan.columns:
        num_bytes += (_TRAINED + copy) * plan.num_critic_parameters
    held = Counter[str]()
    for rank in range(num_ranks):
        held[devices.of_trainer(rank)] += num_bytes // num_ranks
    held["cpu"] += _WHOLE * plan.num_parameters * (num_ranks > 1)
    return +held


def station_bytes(plan: Plan) -> int:
    """The weights of stations beside the trainer, and what a critic learns with."""
    copy = 2 if plan.config.trainer.dtype == "bfloat16" else 0
    num_frozen = len({"reference", "proximal"} & {*plan.columns})
    num_learning = plan.num_critic_parameters if "values" in plan.columns else 0
    return (copy or _WHOLE) * num_frozen * plan.num_parameters + (_TRAINED + copy) * num_learning


def micro_batch_bytes(plan: Plan) -> int:
    """What a rank's micro-batch takes while it is computed, if it is full."""
    trainer, model = plan.config.trainer, plan.model
    num_bytes = 2 if trainer.dtype == "bfloat16" else _WHOLE
    keeps = not trainer.activation_checkpointing
    activations = activation_bytes(model, trainer.micro_batch_tokens, num_bytes, keeps)
    learns_head = plan.lora is None
    return activations + logits_bytes(model, trainer.logits_chunk_tokens, num_bytes, learns_head)


def size(num_bytes: float) -> str:
    """In GB, or MB to three digits."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 999.5e6 else f"{num_bytes / 1e6:.3g} MB"


def _joined(devices: list[str]) -> str:
    return devices[0] if len(devices) == 1 else f"{devices[0]}-{devices[-1].removeprefix('cuda:')}"
