import math

import pytest
import torch
from torch import Tensor

from dora.trainer.corrections import Corrected, OffPolicyness, correct, interpolated_logprobs
from dora.trainer.recipe import Correction

RATIOS = (1.0, 4.0, 0.25, 1.5)  # current / behaviour: two responses of three tokens and one
LENGTHS = [3, 1]


def logs(*ratios: float) -> Tensor:
    return torch.tensor([math.log(ratio) for ratio in ratios], dtype=torch.float64)


def corrected(correction: Correction, staleness: int = 0, proximal: Tensor | None = None) -> Corrected:
    current = logs(*RATIOS).requires_grad_()
    ages = torch.full((4,), staleness)
    return correct(correction, current, torch.zeros(4, dtype=torch.float64), LENGTHS, ages, proximal)


def test_without_a_correction_every_token_counts_and_the_ratio_is_to_the_behaviour() -> None:
    found = corrected(Correction())
    assert found.old_logprobs.tolist() == [0.0] * 4
    assert found.weights.tolist() == [1.0] * 4
    assert not (found.is_masked | found.is_truncated).any()


def test_truncation_caps_the_weight_and_moves_the_ratio_to_the_proximal_policy() -> None:
    found = corrected(Correction(proximal="recomputed", token="tis", tis_cap=2.0))
    assert found.weights.tolist() == pytest.approx([1.0, 2.0, 0.25, 1.5])
    assert found.is_truncated.tolist() == [False, True, False, False]
    torch.testing.assert_close(found.old_logprobs, logs(*RATIOS))
    assert not found.old_logprobs.requires_grad
    assert not found.weights.requires_grad


def test_recomputed_log_probs_are_used_where_the_step_has_several_updates() -> None:
    proximal = logs(1.0, 3.0, 1.0, 1.0)
    found = corrected(Correction(proximal="recomputed", token="tis"), proximal=proximal)
    assert found.old_logprobs is proximal
    assert found.weights.tolist() == pytest.approx([1.0, 2.0, 1.0, 1.0])


def test_icepop_masks_what_is_outside_and_keeps_the_weight_of_what_is_inside() -> None:
    found = corrected(Correction(proximal="recomputed", token="icepop", icepop_low=0.5, icepop_high=2.0))
    assert found.weights.tolist() == pytest.approx([1.0, 0.0, 0.0, 1.5])
    assert found.is_masked.tolist() == [False, True, True, False]


def test_around_the_behaviour_icepop_only_masks_since_the_loss_has_the_ratio_already() -> None:
    found = corrected(Correction(token="icepop", icepop_low=0.5, icepop_high=2.0))
    assert found.weights.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_mis_drops_whole_responses_by_their_geometric_mean() -> None:
    # The three ratios 1, 4, 1/4 have the geometric mean 1; the single 1.5 is outside 0.9 to 1.1.
    found = corrected(Correction(sequence="mis"))
    assert found.weights.tolist() == [1.0, 1.0, 1.0, 0.0]


def test_corrections_compose() -> None:
    recipe = Correction(
        proximal="recomputed", token="tis", tis_cap=3.0, sequence="mis", mis_high=1.5001, age_decay=0.5
    )
    assert corrected(recipe, staleness=2).weights.tolist() == pytest.approx([0.25, 0.75, 0.0625, 0.375])


def test_a_token_masked_by_one_rule_stays_masked_by_the_other() -> None:
    found = corrected(Correction(token="icepop", icepop_high=2.0, sequence="mis", mis_high=1.2))
    assert found.is_masked.tolist() == [False, True, True, True]


def test_age_weights_halve_with_every_version() -> None:
    ages = torch.tensor([0, 1, 2, 3])
    found = correct(Correction(age_decay=0.5), torch.zeros(4), torch.zeros(4), [1] * 4, ages)
    assert found.weights.tolist() == [1.0, 0.5, 0.25, 0.125]


def test_the_interpolated_policy_leaves_the_behaviour_as_it_ages() -> None:
    behaviour, current = torch.full((4,), -2.0), torch.full((4,), -1.0)
    found = interpolated_logprobs(behaviour, current, torch.tensor([0, 1, 2, 4]))
    assert found.tolist() == [-1.0, -2.0, -1.5, -1.25]


def test_interpolation_splits_the_ratio_between_weight_and_loss() -> None:
    found = corrected(Correction(proximal="interpolated", token="tis", tis_cap=100.0), staleness=2)
    assert found.weights.tolist() == pytest.approx([math.sqrt(ratio) for ratio in RATIOS])
    rest = (logs(*RATIOS) - found.old_logprobs).exp()
    assert (found.weights * rest).tolist() == pytest.approx(list(RATIOS))


def test_effective_sample_size_and_divergence_of_a_hand_made_batch() -> None:
    far = OffPolicyness()
    far.add(logs(2.0, 0.5), torch.zeros(2, dtype=torch.float64))
    # sum r = 2.5, sum r**2 = 4.25; the log-ratios cancel.
    assert far.ess == pytest.approx(2.5**2 / (2 * 4.25))
    assert far.kl_k1 == pytest.approx(0.0)
    assert far.kl_k3 == pytest.approx(0.25)


def test_off_policyness_of_micro_batches_adds_up() -> None:
    zeros = torch.zeros(4, dtype=torch.float64)
    whole, parts = OffPolicyness(), OffPolicyness()
    whole.add(logs(*RATIOS), zeros)
    parts.add(logs(*RATIOS[:3]), zeros[:3])
    parts.add(logs(*RATIOS[3:]), zeros[3:])
    assert parts.metrics() == pytest.approx(whole.metrics())


def test_on_policy_samples_are_all_effective_and_no_sample_measures_nothing() -> None:
    same = OffPolicyness()
    same.add(torch.tensor([-1.0, -3.0]), torch.tensor([-1.0, -3.0]))
    assert same.metrics("mismatch") == {"mismatch/ess": 1.0, "mismatch/kl_k1": 0.0, "mismatch/kl_k3": 0.0}
    assert OffPolicyness().metrics() == {}
