"""Recorded journals replay to the same actions, whatever is renamed or moved.

Recorded once from real runs and kept: 48 steps of the demo; 24 steps on four engines, in which
requests migrate and engine 1 is killed; 20 steps of the calculator's episodes with an evaluation every five.
A change that alters the actions on purpose records them again, and its commit says so.
"""

from __future__ import annotations

import lzma
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from dora.core.actions import Admit
from dora.core.codec import to_json
from dora.journal.reader import read_journal
from dora.journal.replay import first_difference

GOLDEN = Path(__file__).parent
CONTENT = {
    "demo": {"trained": 48, "request_finished": 3072, "stop": 1},
    "migrations_and_a_killed_engine": {"trained": 24, "migrated": 28, "engine_lost": 1},
    "episodes_with_evaluation": {"trained": 20, "start_evaluation": 3, "finish_evaluation": 3},
}


@pytest.mark.parametrize("name", CONTENT)
def test_a_recorded_journal_replays_to_the_same_actions(name: str, tmp_path: Path) -> None:
    recorded = lzma.decompress((GOLDEN / f"{name}.jsonl.xz").read_bytes())
    (tmp_path / "journal.jsonl").write_bytes(recorded)
    journal = read_journal(tmp_path)
    kinds = Counter(str(to_json(line.record)["kind"]) for line in journal.lines)
    assert {kind: kinds[kind] for kind in CONTENT[name]} == CONTENT[name]
    assert first_difference(journal) is None


def test_one_other_action_is_a_difference(tmp_path: Path) -> None:
    recorded = lzma.decompress((GOLDEN / "demo.jsonl.xz").read_bytes())
    (tmp_path / "journal.jsonl").write_bytes(recorded.replace(b'"deadline": 7', b'"deadline": 8', 1))
    difference = first_difference(read_journal(tmp_path))
    assert difference is not None
    assert isinstance(difference.recorded, Admit)
    assert difference.recorded.deadline == 8
    assert difference.replayed == replace(difference.recorded, deadline=7)
