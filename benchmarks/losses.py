"""Values and gradients of DORA's policy losses against TRL's on the same tensors.

Needs `pip install trl`. TRL computes its loss inside a trainer, so the benchmark passes an object with the
attributes that the loss reads; all tensors are in double precision. TRL computes the weights of tis while it
generates, so the benchmark computes them, and that row compares their use. TRL's names: `delta` is the cap of
dual clip, `epsilon_high` of CISPO is 1 + clip_ratio_high, loss_type grpo is seq-mean-token-mean, bnpo and
dapo are token-mean, dr_grpo is seq-mean-token-sum-norm. SAPO is not among DORA's losses: it is the example of
a loss of one's own, `examples/own_loss.py`.

    python benchmarks/losses.py [--quick] [--json FILE]
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dora.trainer.corrections import apply_correction
from dora.trainer.loss import (
    LossInputs,
    LossSettings,
    batch_divisor,
    kl_divergence,
    policy_loss_function,
    unnormalized_token_weights,
)
from dora.trainer.recipe import Correction, LossAggMode
from report import Row, parse_options, publish

try:
    from trl import GRPOTrainer
    from trl.experimental.online_dpo import OnlineDPOTrainer
except ImportError as error:
    sys.exit(f"benchmarks/losses.py compares with TRL, which cannot be imported ({error}): pip install trl")

OWN_LOSS = Path(__file__).parents[1] / "examples" / "own_loss.py"
MAX_TOKENS = 24
LENGTHS = [24, 1, 7, 13, 20, 3, 9, 16]
CLIP = LossSettings(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1.5)
UNCORRECTED = Correction()
TIS = Correction(proximal="recomputed", token="tis", tis_cap=1.2)


@dataclass(frozen=True)
class Case:
    """One objective, with DORA's settings and TRL's."""

    name: str
    loss: str
    mode: LossAggMode
    trl: dict[str, Any]
    settings: LossSettings = CLIP
    kl_coef: float = 0.0
    correction: Correction = UNCORRECTED


PPO = Case("ppo_clip", "ppo_clip", "seq-mean-token-mean", {"loss_type": "grpo"})
CASES = (
    PPO,
    replace(PPO, name="ppo_clip, token-mean", mode="token-mean", trl={"loss_type": "bnpo"}),
    replace(PPO, name="ppo_clip, sum-norm", mode="seq-mean-token-sum-norm", trl={"loss_type": "dr_grpo"}),
    replace(PPO, name="ppo_clip + k3", kl_coef=0.1),
    replace(PPO, name="ppo_clip, decoupled, tis", correction=TIS),
    Case("dual_clip", "dual_clip", "token-mean", {"loss_type": "dapo", "delta": 1.5}),
    Case(
        "gspo",
        "gspo",
        "seq-mean-token-mean",
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        LossSettings(clip_ratio_low=3e-2, clip_ratio_high=4e-2),
    ),
    Case(
        "cispo",
        "cispo",
        "token-mean",
        {"loss_type": "cispo", "epsilon_high": 1.4},
        LossSettings(clip_ratio_low=1.0, clip_ratio_high=0.4),
    ),
    Case("sapo (own)", f"{OWN_LOSS}:sapo", "seq-mean-token-mean", {"loss_type": "sapo"}),
)


class Batch:
    """Ragged responses with log-probs of three policies; TRL's loss reads padded tensors."""

    def __init__(self, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)

        def noise(scale: float) -> Tensor:
            return scale * torch.randn(sum(LENGTHS), generator=source, dtype=torch.float64)

        self.behaviour = -noise(1.0).abs()
        self.logprobs = self.behaviour + noise(0.5)
        self.reference = self.behaviour + noise(0.3)
        self.advantages = torch.randn(len(LENGTHS), generator=source, dtype=torch.float64)
        self.mask = torch.tensor([[i < num for i in range(MAX_TOKENS)] for num in LENGTHS])

    def padded(self, values: Tensor) -> Tensor:
        """[N] to [B, MAX_TOKENS], padded with zeros on the right."""
        return torch.zeros(self.mask.shape, dtype=values.dtype).masked_scatter(self.mask, values)


def dora_loss(case: Case, batch: Batch) -> tuple[Tensor, Tensor]:
    """DORA's loss and its gradient by every log-prob [N]."""
    leaf = batch.logprobs.clone().requires_grad_()
    repeats = torch.tensor(LENGTHS)
    corrected = apply_correction(case.correction, leaf, batch.behaviour, LENGTHS, torch.ones(len(leaf)))
    advantages = batch.advantages.repeat_interleave(repeats)
    tokens = LossInputs(leaf, corrected.old_logprobs, advantages, LENGTHS, batch.reference)
    losses = policy_loss_function(case.loss)(tokens, case.settings)[0] * corrected.weights
    if case.kl_coef:
        losses = losses + case.kl_coef * kl_divergence(leaf, batch.reference, "k3")
    unnormalized = unnormalized_token_weights(LENGTHS, case.mode, MAX_TOKENS)
    weights = torch.tensor(unnormalized, dtype=torch.float64).repeat_interleave(repeats)
    loss = (losses * weights).sum() / batch_divisor(LENGTHS, case.mode)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def trl_loss(case: Case, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss of TRL's GRPOTrainer and its gradient by every log-prob [N]."""
    leaf = batch.logprobs.clone().requires_grad_()
    weights = batch.padded((leaf.detach() - batch.behaviour).exp().clamp(max=TIS.tis_cap))
    is_corrected = case.correction == TIS
    old = leaf.detach() if is_corrected else batch.behaviour
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1),
        "prompt_mask": torch.ones(len(LENGTHS), 1),
        "completion_ids": torch.zeros(batch.mask.shape),
        "completion_mask": batch.mask.double(),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.padded(old),
        "ref_per_token_logps": batch.padded(batch.reference),
        "importance_sampling_ratio": weights,
        "num_items_in_batch": torch.tensor(float(sum(LENGTHS))),
    }
    trainer = _fake_trainer(case, batch.padded(leaf), is_corrected)
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def _fake_trainer(case: Case, logprobs: Tensor, is_corrected: bool) -> SimpleNamespace:
    """The attributes of a GRPOTrainer that its loss reads."""
    settings: dict[str, Any] = {
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "epsilon_low": case.settings.clip_ratio_low,
        "epsilon_high": case.settings.clip_ratio_high,
        "beta": case.kl_coef,
        "use_vllm": is_corrected,
        "vllm_importance_sampling_correction": is_corrected,
        "max_completion_length": MAX_TOKENS,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
    }
    named = {key: value for key, value in case.trl.items() if key != "delta"}
    return SimpleNamespace(
        **settings | named,
        args=SimpleNamespace(
            delta=case.trl.get("delta"),
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
        ),
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, torch.zeros_like(logprobs), None),
    )


def online_dpo(batch: Batch) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """DORA's loss and TRL's, on pairs of neighbouring responses, the better one first in both."""
    case = Case("online_dpo", "online_dpo", "seq-mean-token-sum", {})
    leaf = batch.logprobs.clone().requires_grad_()
    order = torch.tensor([*range(0, len(LENGTHS), 2), *range(1, len(LENGTHS), 2)])
    policies = iter([batch.padded(leaf)[order], batch.padded(batch.reference)[order]])
    half = len(LENGTHS) // 2
    losses: list[Tensor] = []
    empty = torch.zeros(2 * half, 1)
    trainer = SimpleNamespace(
        args=SimpleNamespace(
            use_vllm=False,
            missing_eos_penalty=None,
            loss_type="sigmoid",
            n_gpu=1,
            gradient_accumulation_steps=1,
            torch_empty_cache_steps=None,
            optim="adamw_torch",
        ),
        beta=case.settings.dpo_beta,
        eos_token_ids=[0],
        ref_model=object(),
        reward_funcs=True,
        state=SimpleNamespace(global_step=0),
        stats=defaultdict(list),
        processing_class=SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
        accelerator=SimpleNamespace(
            gather_for_metrics=lambda x: x, backward=lambda loss, **_: losses.append(loss)
        ),
        use_apex=False,
        _generate=lambda *_: (empty, empty, torch.zeros(batch.mask.shape), batch.mask[order].long(), None),
        _forward=lambda *_: next(policies),
        _calculate_rewards_from_functions=lambda **_: torch.tensor([1.0] * half + [0.0] * half),
    )
    OnlineDPOTrainer.training_step(trainer, SimpleNamespace(train=lambda: None), {"prompt": [""] * half})
    return dora_loss(case, batch), (losses[0].detach(), torch.autograd.grad(losses[0], leaf)[0])


def gap(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    return float((a - b).abs().max() / b.abs().max())


def digits(relative_gap: float) -> float:
    """Decimal digits that agree; a double has 17."""
    return -math.log10(max(relative_gap, 1e-17))


def main() -> None:
    options = parse_options(__doc__ or "")
    rows: list[Row] = []
    seeds = range(3 if options.quick else 20)
    batches = [Batch(seed) for seed in seeds]
    for case in CASES:
        pairs = [(dora_loss(case, batch), trl_loss(case, batch)) for batch in batches]
        rows.append(comparison_row(case.name, pairs))
    rows.append(comparison_row("online_dpo", [online_dpo(batch) for batch in batches]))
    publish(
        options,
        rows,
        {
            "common_digits_of_values": digits(max(float(row["value_gap"]) for row in rows)),
            "common_digits_of_gradients": digits(max(float(row["gradient_gap"]) for row in rows)),
        },
    )


def comparison_row(name: str, pairs: list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]) -> Row:
    """The first batch's values, and the largest relative gaps of all batches."""
    (own, _), (other, _) = pairs[0]
    return {
        "loss": name,
        "peer": f"TRL {version('trl')}",
        "ours": own.item(),
        "trl": other.item(),
        "value_gap": f"{max(gap(a[0], b[0]) for a, b in pairs):.1e}",
        "gradient_gap": f"{max(gap(a[1], b[1]) for a, b in pairs):.1e}",
    }


if __name__ == "__main__":
    main()
