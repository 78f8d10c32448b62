import pytest

from dora.trainer.advantage import group_advantages


def test_advantages_of_a_group_are_its_standardised_rewards() -> None:
    # mean 0.25, sample variance (0.75**2 + 3 * 0.25**2) / 3 = 0.25, std 0.5
    assert group_advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_a_group_of_equal_rewards_has_advantages_of_exactly_zero() -> None:
    assert group_advantages([0.1] * 7) == [0.0] * 7
    assert group_advantages([0.3]) == [0.0]
