"""ResponseLengths of generated, trained and filtered responses, counted from the spans of a run."""

from __future__ import annotations

import pytest

from dora.core.actions import Admit, Fail, Filter, Generate
from dora.core.events import EngineJoined, RequestFinished
from dora.core.types import Chunk, GroupId, RequestId
from dora.journal.timeline import GroupSpan, Timeline
from dora.metrics.rollout import ResponseLengths, percentile


class Run:
    """Groups that finish on one engine."""

    def __init__(self) -> None:
        self.lengths, self.timeline = ResponseLengths(), Timeline()
        self.observe(EngineJoined(0, 8, 1))

    def observe(self, record: EngineJoined | Admit | Generate | RequestFinished | Filter | Fail) -> None:
        for span in self.timeline.observe(0.0, record):
            self.lengths.add(span)

    def start(self, row: int, num: int) -> GroupSpan:
        self.observe(Admit(GroupId(0, row), row, 0, 0))
        self.observe(Generate(0, 0, tuple(RequestId(0, row, sibling) for sibling in range(num))))
        return self.timeline.groups[GroupId(0, row)]

    def finish(self, row: int, *num_tokens: int, reason: str = "stop") -> GroupSpan:
        group = self.start(row, len(num_tokens))
        for sibling, num in enumerate(num_tokens):
            request = RequestId(0, row, sibling)
            self.observe(RequestFinished(0, request, 0, num, (Chunk(0, "", num),), reason))
        return group


def test_a_step_has_mean_extremes_and_clip_ratio() -> None:
    run = Run()
    groups = [run.finish(0, 10, 20), run.finish(1, 30, 40, reason="length")]
    assert run.lengths.train(groups) == {
        "response_length/mean": 25,
        "response_length/min": 10,
        "response_length/max": 40,
        "response_length/clip_ratio": 0.5,
    }


def test_filtering_short_groups_is_a_drift_to_longer_responses() -> None:
    run = Run()
    run.observe(Filter(run.finish(0, 10, 10).group, "zero_variance"))
    run.lengths.train([run.finish(1, 40, 40)])
    assert run.lengths.drift() == pytest.approx(40 / 25 - 1)
    summary = run.lengths.to_json()
    assert summary["filtered_samples_by_length"] == {"9-16": 2}
    assert summary["response_length_generated"] == {"mean": 25, "p50": 40, "p99": 40, "max": 40}
    assert summary["response_length_trained"]["mean"] == 40


def test_a_run_that_trains_all_it_generates_has_no_drift() -> None:
    run = Run()
    run.lengths.train([run.finish(0, 3, 500)])
    assert run.lengths.drift() == 0


def test_a_run_without_training_has_no_drift() -> None:
    run = Run()
    run.observe(Fail(run.finish(0, 10).group, "refused"))
    assert run.lengths.drift() is None
    assert run.lengths.to_json()["response_length_trained"] is None


@pytest.mark.parametrize(
    ("length", "bucket"), [(0, "0-1"), (1, "0-1"), (2, "2-2"), (3, "3-4"), (65, "65-128")]
)
def test_filtered_responses_are_counted_by_powers_of_two(length: int, bucket: str) -> None:
    run = Run()
    run.observe(Filter(run.finish(0, length).group, "zero_variance"))
    assert run.lengths.to_json()["filtered_samples_by_length"] == {bucket: 1}


def test_a_response_of_a_failed_group_counts_as_generated_only() -> None:
    run = Run()
    group = run.start(0, 1)
    run.observe(Fail(group.group, "refused"))
    run.observe(RequestFinished(0, RequestId(0, 0, 0), 0, 3, (Chunk(0, "", 3),), "stop"))
    assert run.lengths.generated.total() == 1
    assert not group.responses


def test_a_percentile_is_one_of_the_values() -> None:
    assert [percentile([5, 1, 4, 2, 3], share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 3, 5, 5]
