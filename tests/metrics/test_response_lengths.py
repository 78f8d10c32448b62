"""ResponseLengths of generated, trained and filtered responses, counted from events and actions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dora.core.actions import Fail, Filter
from dora.core.events import RequestFinished
from dora.core.types import Chunk, GroupId, RequestId
from dora.metrics.rollout import ResponseLengths, percentile


def always(group: GroupId) -> bool:
    return True


def never(group: GroupId) -> bool:
    return False


def finish(
    lengths: ResponseLengths,
    row: int,
    *num_tokens: int,
    reason: str = "stop",
    is_open: Callable[[GroupId], bool] = always,
) -> GroupId:
    for sibling, num in enumerate(num_tokens):
        request = RequestId(0, row, sibling)
        event = RequestFinished(0, request, 0, num, (Chunk(0, "", num),), reason)
        lengths.update(event, [], is_open)
    return GroupId(0, row)


def test_a_step_has_mean_extremes_and_clip_ratio() -> None:
    lengths = ResponseLengths()
    groups = [finish(lengths, 0, 10, 20), finish(lengths, 1, 30, 40, reason="length")]
    assert lengths.train(groups) == {
        "response_length/mean": 25,
        "response_length/min": 10,
        "response_length/max": 40,
        "response_length/clip_ratio": 0.5,
    }


def test_filtering_short_groups_is_a_drift_to_longer_responses() -> None:
    lengths = ResponseLengths()
    lengths.update(None, [Filter(finish(lengths, 0, 10, 10), "zero_variance")], never)
    lengths.train([finish(lengths, 1, 40, 40)])
    assert lengths.drift() == pytest.approx(40 / 25 - 1)
    summary = lengths.to_json()
    assert summary["filtered_samples_by_length"] == {"9-16": 2}
    assert summary["response_length_generated"] == {"mean": 25, "p50": 40, "p99": 40, "max": 40}
    assert summary["response_length_trained"]["mean"] == 40


def test_a_run_that_trains_all_it_generates_has_no_drift() -> None:
    lengths = ResponseLengths()
    lengths.train([finish(lengths, 0, 3, 500)])
    assert lengths.drift() == 0


def test_a_run_without_training_has_no_drift() -> None:
    lengths = ResponseLengths()
    lengths.update(None, [Fail(finish(lengths, 0, 10), "refused"), Fail(GroupId(0, 1), "lost")], never)
    assert lengths.drift() is None
    assert lengths.to_json()["response_length_trained"] is None


@pytest.mark.parametrize(
    ("length", "bucket"), [(0, "0-1"), (1, "0-1"), (2, "2-2"), (3, "3-4"), (65, "65-128")]
)
def test_filtered_responses_are_counted_by_powers_of_two(length: int, bucket: str) -> None:
    lengths = ResponseLengths()
    lengths.update(None, [Filter(finish(lengths, 0, length), "zero_variance")], never)
    assert lengths.to_json()["filtered_samples_by_length"] == {bucket: 1}


def test_a_response_of_a_failed_group_counts_as_generated_only() -> None:
    lengths = ResponseLengths()
    finish(lengths, 0, 3, is_open=never)
    assert lengths.generated.total() == 1
    with pytest.raises(KeyError):
        lengths.train([GroupId(0, 0)])


def test_a_percentile_is_one_of_the_values() -> None:
    assert [percentile([5, 1, 4, 2, 3], share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 3, 5, 5]
