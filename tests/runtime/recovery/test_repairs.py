"""What the sample store knows of groups whose scores the journal does not have."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from dora.core.events import RequestFinished
from dora.core.types import GroupId, RequestId
from dora.runtime.recovery.journal_replay import _find_repairs
from dora.stream.sample_db import SampleStore, Trajectory


@pytest.mark.parametrize(
    ("group", "state", "has_lost_lines"),
    [
        (GroupId(0, 1), "scored", False),
        (GroupId(0, 1), "committed", True),
        (GroupId(-2, 1), "evaluated", False),
        (GroupId(-2, 1), "failed: a reason", False),
    ],
)
def test_what_precedes_its_event_is_no_sign_of_lost_lines(
    tmp_path: Path, group: GroupId, state: str, has_lost_lines: bool
) -> None:
    """The run may have been killed between the two."""
    request = RequestId(*group, 0)
    finished = RequestFinished(0, request, 1, 1, (), "stop", "a digest")
    with contextlib.closing(SampleStore(tmp_path / "samples.sqlite")) as store:
        store.put(Trajectory(request, 1, "a digest", [1], [2], [-1.0], reward=1.0))
        store.score(group, [1.0], [None])
        store.set_state([group], state)
        store.commit()
        repairs = _find_repairs(store, [(5, finished)], set())
    assert (repairs.unscored, repairs.num_ahead) == (({group}, 1) if has_lost_lines else (set(), 0))
