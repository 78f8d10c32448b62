"""A run with many migrations: nothing is computed again, and the journal explains each migration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.running import Run, dora, journal, summary

SETTINGS: dict[str, Any] = {
    "run__steps": 12,
    "engine__num_engines": 4,
    "engine__version_slots": 1,
    "sampling__max_response_length": 48,
    "orchestrator__balance_running": "true",
    "orchestrator__rebalance_interval_s": 0.1,
}


@pytest.fixture(scope="module")
def run(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(task, tmp_path_factory.mktemp("migrations") / "run", **SETTINGS)
    ended = run.end()
    assert (ended.code, ended.err) == (0, ""), ended
    return run


def test_many_requests_migrate_and_nothing_is_computed_again(run: Run) -> None:
    s = summary(run.out)
    assert s["migrations"] >= 20
    assert sum(s["migration_reasons"].values()) == s["migrations"]
    assert (s["reprefill_tokens"], s["regenerated_tokens"], s["engine_failures"]) == (0, 0, 0)
    assert s["migrated_kv_bytes"] > 0
    assert 0 < s["migration_downtime_s_p50"] <= s["migration_downtime_s_max"]
    assert (s["trained_groups"], s["pending_groups"]) == (24, 0)
    assert re.search(rf"requests migrated +│ {s['migrations']} \(", run.end().out)


def test_audit_and_replay_accept_the_run(run: Run) -> None:
    run.check_records()


def test_each_migrate_action_has_one_outcome(run: Run) -> None:
    in_progress: dict[tuple[int, ...], int] = {}
    for line in journal(run.out):
        if line["kind"] == "migrate":
            assert in_progress.setdefault(tuple(line["request"]), line["seq"]) == line["seq"]
        elif line["kind"] in ("migrated", "migration_failed"):
            del in_progress[tuple(line["request"])]


def test_stalls_of_the_trainer_name_the_group_they_wait_for(run: Run) -> None:
    s = summary(run.out)
    assert sum(stall["seconds"] for stall in s["stalls"]) <= s["stall_s"] + 0.01
    assert all(stall["group"].count("/") == 1 for stall in s["stalls"])
    assert sorted(map(int, s["rollout_utilization_by_engine"])) == [0, 1, 2, 3]


def test_why_shows_the_timeline_of_a_migrated_request(run: Run) -> None:
    migrated = next(line for line in journal(run.out) if line["kind"] == "migrated")
    why = dora("why", run.out, "/".join(map(str, migrated["request"])))
    assert why.code == 0
    assert f"migrated from engine {migrated['source']} to engine {migrated['destination']} (" in why.out
    entries = (
        "admitted at",
        "placed on",
        "migration from",
        "finished on",
        "scored",
        "committed",
        "trained in",
    )
    places = [why.out.index(entry) for entry in entries]
    assert places == sorted(places)
    unknown = dora("why", run.out, "99/0/0")
    assert (unknown.code, unknown.out) == (2, "")
    assert "group 99/0 was not admitted" in unknown.err
