"""The trace of a run: every slice has a lane and an end, and every arrow connects two slices."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.journal.recorded_runs import edited, record_run, world_config
from tests.journal.story import FIRST, SECOND

from dora.core.events import EngineJoined, RequestFinished
from dora.core.types import Chunk, Limits
from dora.errors import InputError
from dora.journal.reader import read_journal
from dora.trace.chrome_trace import OPEN_AT_END, main

Event = dict[str, Any]


def trace_of(run: Path, out: Path) -> list[Event]:
    """The trace events of a run, as a viewer reads them."""
    main(run, out)
    events: list[Event] = json.loads(out.read_text())["traceEvents"]
    return events


@pytest.fixture(scope="module")
def story(story_run: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    return trace_of(story_run, tmp_path_factory.mktemp("trace") / "trace.json")


def processes(events: list[Event]) -> dict[int, str]:
    return {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}


def slices(events: list[Event], process: str, track: str) -> list[Event]:
    """The slices of one track by their start."""
    names = processes(events)
    found = [e for e in events if e["ph"] == "X" and (names[e["pid"]], e["cat"]) == (process, track)]
    return sorted(found, key=lambda e: (e["ts"], e["tid"]))


def marks(events: list[Event], process: str) -> list[str]:
    names = processes(events)
    return [e["name"] for e in events if e["ph"] == "i" and names[e["pid"]] == process]


def counted(events: list[Event], what: str, series: str) -> list[float]:
    return [e["args"][series] for e in events if e["ph"] == "C" and e["name"] == what and series in e["args"]]


def test_slices_of_one_lane_do_not_overlap(finished_run: Path, tmp_path: Path) -> None:
    lanes = defaultdict(list)
    for event in trace_of(finished_run, tmp_path / "trace.json"):
        if event["ph"] == "X":
            lanes[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert lanes
    for spans in lanes.values():
        spans.sort()
        assert all(end >= begin for begin, end in spans)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_a_replacement_names_the_engine_that_it_replaces(finished_run: Path, tmp_path: Path) -> None:
    events = trace_of(finished_run, tmp_path / "trace.json")
    records = [line.record for line in read_journal(finished_run).lines]
    joined = [event for event in records if isinstance(event, EngineJoined) and event.replaces is not None]
    assert joined
    for event in joined:
        assert f"joined, replaces engine {event.replaces}" in marks(events, f"engine {event.engine}")


def test_every_finished_request_is_a_slice_that_ends_with_it(finished_run: Path, tmp_path: Path) -> None:
    events = trace_of(finished_run, tmp_path / "trace.json")
    lines = read_journal(finished_run).lines
    finished = [(line.t_s, line.record) for line in lines if isinstance(line.record, RequestFinished)]
    ends = {
        (e["args"]["request"], e["ts"] + e["dur"], e["args"]["tokens"])
        for e in events
        if "tokens" in e.get("args", {}) and e["cat"] == "requests"
    }
    assert ends == {(str(f.request), round(1e6 * t_s), f.num_tokens) for t_s, f in finished}


def test_an_arrow_connects_the_slices_of_a_migrated_request(story: list[Event]) -> None:
    slice_at = {(e["tid"], e["ts"]): e for e in story if e["ph"] == "X" and e["cat"] == "requests"}
    begins = {e["id"]: e for e in story if e["ph"] == "s"}
    ends = {e["id"]: e for e in story if e["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(ends) == 2
    for number, end in ends.items():
        target = slice_at[end["tid"], end["ts"]]
        sources = [s for s in slice_at.values() if s["tid"] == begins[number]["tid"]]
        held = [s for s in sources if s["ts"] <= begins[number]["ts"] <= s["ts"] + s["dur"]]
        assert {s["args"]["request"] for s in held} == {target["args"]["request"]} == {str(FIRST)}
        assert held[-1]["args"]["end"].startswith("migrated to engine")


def test_a_request_has_a_slice_on_each_of_its_engines(story: list[Event]) -> None:
    ends = {
        engine: [(s["args"]["request"], s["args"]["end"]) for s in slices(story, engine, "requests")]
        for engine in ("engine 1", "engine 2")
    }
    assert ends["engine 1"] == [(str(FIRST), "migrated to engine 0"), (str(SECOND), "engine lost: killed")]
    assert sorted(ends["engine 2"]) == [(str(FIRST), "stop"), (str(SECOND), "stop")]


def test_failures_are_marked_where_they_happen(story: list[Event]) -> None:
    assert marks(story, "engine 1") == ["joined", "LOST: killed"]
    assert marks(story, "engine 0") == ["joined", "drain requested", "removed"]
    assert marks(story, "trainer") == ["STALL: step 1 waits for group 0/4", "step 1 FAILED: out of memory"]
    assert marks(story, "run") == ["group 0/2 failed: too long"]
    [failed, _] = slices(story, "engine 1", "migrations")
    assert failed["args"]["end"] == "failed: no free block"


def test_the_trainer_waits_trains_and_publishes_without_a_gap(story: list[Event]) -> None:
    phases = slices(story, "trainer", "phases")
    assert [phase["name"] for phase in phases] == [
        "publish 0",
        "wait for the batch of step 1",
        "train step 1",
        "train step 1",
        "publish 1",
    ]
    assert all(a["ts"] + a["dur"] == b["ts"] for a, b in pairwise(phases))


def test_counters_show_what_was_trained(story: list[Event]) -> None:
    assert counted(story, "tokens", "trained") == [18]
    assert counted(story, "reward", "mean of the step") == [0.75]
    assert counted(story, "staleness", "maximum of the step") == [0]
    assert counted(story, "groups", "not scored")[-1] == 0


def test_neighbouring_versions_differ_by_more_than_digits(finished_run: Path, tmp_path: Path) -> None:
    events = trace_of(finished_run, tmp_path / "trace.json")
    requests = [e for e in events if e["ph"] == "X" and e["cat"] == "requests"]
    named = {e["args"]["version"]: e["name"].split()[0] for e in requests}
    assert len(named) > 3
    letters = ["".join(c for c in named[version] if not c.isdigit()) for version in sorted(named)]
    assert len({*letters}) == len(letters)


def test_a_response_of_several_versions_lists_its_segments(finished_run: Path, tmp_path: Path) -> None:
    def mix(records: list[Event]) -> None:
        record = next(r for r in records if r["kind"] == "request_finished")
        record["chunks"] = [Chunk(0, "a", 2), Chunk(1, "b", 3)]

    mixed = edited(finished_run, tmp_path / "run", mix)
    events = trace_of(mixed, tmp_path / "trace.json")
    found = [e["args"]["segments"] for e in events if "segments" in e.get("args", {})]
    assert found == [[[0, 2], [1, 3]]]


def test_an_inflight_update_starts_a_new_slice(tmp_path: Path) -> None:
    limits = Limits(num_steps=12, batch_size=3, group_size=2, max_staleness=2, breaks_c1=True, is_static=True)
    run = record_run(tmp_path / "run", world_config(limits=limits, equal_reward_rate=0.0), seed=2)
    events = trace_of(run, tmp_path / "trace.json")
    requests = [e for e in events if e["ph"] == "X" and e["cat"] == "requests"]
    last = {e["args"]["request"]: e["args"] for e in requests if "tokens" in e["args"]}
    finished = [r for _, _, r in read_journal(run).lines if isinstance(r, RequestFinished)]
    assert {str(r.request): r.version for r in finished} == {name: a["version"] for name, a in last.items()}
    mixed = {str(r.request) for r in finished if len(r.chunks) > 1}
    assert mixed
    assert {name for name, args in last.items() if "segments" in args} == mixed
    updated = {
        e["args"]["request"] for e in requests if e["args"]["end"].startswith("continues with version")
    }
    assert mixed <= updated


def test_open_slices_of_a_running_run_end_with_the_journal(stopped_run: Path, tmp_path: Path) -> None:
    events = trace_of(stopped_run, tmp_path / "trace.json")
    still = [e for e in events if e.get("args", {}).get("end") == OPEN_AT_END]
    assert {e["cat"] for e in still} >= {"requests", "versions"}
    assert {e["ts"] + e["dur"] for e in still} == {max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")}


def test_a_torn_journal_is_reported(stopped_run: Path, tmp_path: Path) -> None:
    torn = edited(stopped_run, tmp_path / "run", lambda records: None)
    with (torn / "journal.jsonl").open("a") as file:
        file.write('{"seq": 99')
    assert "cut off" in main(torn, tmp_path / "trace.json")


def test_every_migration_has_an_arrow(tmp_path: Path) -> None:
    run = record_run(
        tmp_path / "run", world_config(tail=0.6, max_length=400, engine_loss_interval_s=None), seed=3
    )
    num_migrations = sum(type(line.record).__name__ == "Migrated" for line in read_journal(run).lines)
    events = trace_of(run, tmp_path / "trace.json")
    assert num_migrations > 0
    assert sum(e["ph"] == "f" for e in events) == num_migrations


def test_a_name_that_ends_in_gz_is_compressed(stopped_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json.gz"
    main(stopped_run, out)
    assert json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]


def test_an_output_that_cannot_be_written_is_named(stopped_run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give another --out"):
        main(stopped_run, tmp_path / "nowhere" / "trace.json")


def test_a_journal_that_lost_its_engines_is_drawn_without_them(finished_run: Path, tmp_path: Path) -> None:
    def forget_engines(records: list[Event]) -> None:
        records[:] = [record for record in records if record["kind"] != "engine_joined"]

    events = trace_of(edited(finished_run, tmp_path / "run", forget_engines), tmp_path / "trace.json")
    assert not any(name.startswith("engine") for name in processes(events).values())
