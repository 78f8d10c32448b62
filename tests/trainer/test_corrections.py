"""Off-policy corrections of a hand-made micro-batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dora.trainer.corrections import CorrectedTokens, apply_correction, interpolated_logprobs
from dora.trainer.recipe import Correction

RATIOS = (1.0, 4.0, 0.25, 1.5)  # current / behaviour, of two responses with three tokens and one
LENGTHS = [3, 1]


def log_ratios(*ratios: float) -> Tensor:
    return torch.tensor([math.log(ratio) for ratio in ratios], dtype=torch.float64)


def corrected(correction: Correction, staleness: int = 0, proximal: Tensor | None = None) -> CorrectedTokens:
    current = log_ratios(*RATIOS).requires_grad_()
    staleness_of_tokens = torch.full((4,), staleness)
    return apply_correction(
        correction, current, torch.zeros(4, dtype=torch.float64), LENGTHS, staleness_of_tokens, proximal
    )


def test_without_a_correction_weights_are_one_and_old_log_probs_are_the_behaviours() -> None:
    result = corrected(Correction())
    assert result.old_logprobs.tolist() == [0.0] * 4
    assert result.weights.tolist() == [1.0] * 4
    assert not (result.is_masked | result.is_truncated).any()


def test_tis_caps_the_weight_and_takes_the_proximal_log_probs_as_old() -> None:
    result = corrected(Correction(proximal="recomputed", token="tis", tis_cap=2.0))
    assert result.weights.tolist() == pytest.approx([1.0, 2.0, 0.25, 1.5])
    assert result.is_truncated.tolist() == [False, True, False, False]
    torch.testing.assert_close(result.old_logprobs, log_ratios(*RATIOS))
    assert not result.old_logprobs.requires_grad
    assert not result.weights.requires_grad


def test_given_proximal_log_probs_are_the_old_log_probs() -> None:
    proximal = log_ratios(1.0, 3.0, 1.0, 1.0)
    result = corrected(Correction(proximal="recomputed", token="tis"), proximal=proximal)
    assert result.old_logprobs is proximal
    assert result.weights.tolist() == pytest.approx([1.0, 2.0, 1.0, 1.0])


def test_icepop_masks_ratios_outside_the_range_and_weights_those_inside() -> None:
    result = corrected(Correction(proximal="recomputed", token="icepop", icepop_low=0.5, icepop_high=2.0))
    assert result.weights.tolist() == pytest.approx([1.0, 0.0, 0.0, 1.5])
    assert result.is_masked.tolist() == [False, True, True, False]


def test_icepop_only_masks_if_the_loss_has_the_ratio_to_the_behaviour() -> None:
    result = corrected(Correction(token="icepop", icepop_low=0.5, icepop_high=2.0))
    assert result.weights.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_mis_masks_whole_responses_by_their_geometric_mean() -> None:
    # The three ratios 1, 4, 1/4 have the geometric mean 1; the single 1.5 is outside 0.9 to 1.1.
    result = corrected(Correction(sequence="mis"))
    assert result.weights.tolist() == [1.0, 1.0, 1.0, 0.0]


def test_corrections_compose() -> None:
    correction = Correction(
        proximal="recomputed", token="tis", tis_cap=3.0, sequence="mis", mis_high=1.5001, staleness_decay=0.5
    )
    assert corrected(correction, staleness=2).weights.tolist() == pytest.approx([0.25, 0.75, 0.0625, 0.375])


def test_a_token_is_masked_if_either_rule_masks_it() -> None:
    result = corrected(Correction(token="icepop", icepop_high=2.0, sequence="mis", mis_high=1.2))
    assert result.is_masked.tolist() == [False, True, True, True]


def test_staleness_decay_halves_the_weight_with_every_version() -> None:
    staleness = torch.tensor([0, 1, 2, 3])
    result = apply_correction(
        Correction(staleness_decay=0.5), torch.zeros(4), torch.zeros(4), [1] * 4, staleness
    )
    assert result.weights.tolist() == [1.0, 0.5, 0.25, 0.125]


def test_the_interpolated_policy_moves_from_behaviour_to_current_with_staleness() -> None:
    behaviour, current = torch.full((4,), -2.0), torch.full((4,), -1.0)
    result = interpolated_logprobs(behaviour, current, torch.tensor([0, 1, 2, 4]))
    assert result.tolist() == [-1.0, -2.0, -1.5, -1.25]


def test_interpolation_divides_the_ratio_between_weight_and_loss() -> None:
    result = corrected(Correction(proximal="interpolated", token="tis", tis_cap=100.0), staleness=2)
    assert result.weights.tolist() == pytest.approx([math.sqrt(ratio) for ratio in RATIOS])
    loss_ratio = (log_ratios(*RATIOS) - result.old_logprobs).exp()
    assert (result.weights * loss_ratio).tolist() == pytest.approx(list(RATIOS))
