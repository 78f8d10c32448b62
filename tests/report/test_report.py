"""The report agrees with the files of a run, complete or while they are being written."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.journal.recorded_runs import (
    FROM_STEP,
    NUM_REDONE,
    Record,
    edited,
    nth_of,
    record_run,
    world_config,
)
from tests.journal.story import FIRST, SECOND, write_story

from dora.audit import audit
from dora.cli.main import app
from dora.core.actions import (
    Action,
    Admit,
    DecodeOnly,
    Generate,
    Load,
    PauseEngine,
    Publish,
    ResumeEngine,
    Score,
    Train,
)
from dora.core.events import (
    EngineJoined,
    EngineLost,
    EnginePaused,
    Event,
    GroupScored,
    Loaded,
    LoadFailed,
    Published,
    RequestFinished,
    Trained,
)
from dora.core.types import EvaluationRule, GroupId, Limits, RequestId
from dora.errors import InputError
from dora.journal import why
from dora.journal.reader import JOURNAL_FILE, SUMMARY_FILE, JournalLine, read_journal
from dora.journal.timeline import Span, fold
from dora.journal.writer import JournalWriter
from dora.report import samples, timeline
from dora.report.data import MAX_POINTS, RunReader, metric_columns, run_data
from dora.report.page import render_page, render_payload, write_report
from dora.stream.sample_db import SampleStore, Trajectory

JsonObject = dict[str, Any]


@pytest.fixture(scope="module")
def good(finished_run: Path) -> JsonObject:
    return run_data(finished_run)


@pytest.fixture(scope="module")
def story(story_run: Path) -> JsonObject:
    return run_data(story_run)


def test_the_time_of_the_trainer_adds_up_to_the_run(good: JsonObject) -> None:
    journal_s = good["to_s"] - good["from_s"]
    assert sum(good["trainer"]["sums"].values()) == pytest.approx(journal_s, abs=0.01)


def test_the_time_of_the_rows_adds_up_to_the_time_of_their_engine(good: JsonObject) -> None:
    for track, rows in zip(good["engines"]["tracks"], good["rows"], strict=True):
        lifetime_s = (track["to"] - track["from"]) / 1000
        assert sum(rows["row_s"].values()) == pytest.approx(track["rows"] * lifetime_s, abs=0.05)


def test_a_row_is_occupied_as_long_as_it_has_spans(good: JsonObject) -> None:
    for track, rows in zip(good["engines"]["tracks"], good["rows"], strict=True):
        occupied_s = sum(rows["row_s"].get(cause, 0) for cause in ("decoding", "paused", "loading"))
        assert sum(track["spans"]["d"]) / 1000 == pytest.approx(occupied_s, abs=0.05)


def test_an_engine_never_has_more_spans_than_rows_at_once(good: JsonObject) -> None:
    for track in good["engines"]["tracks"]:
        spans = [*zip(track["spans"]["t"], track["spans"]["d"], strict=True)]
        changes = sorted(change for t, d in spans if d for change in ((t, 1), (t + d, -1)))
        at_once = highest = 0
        for _, change in changes:
            at_once += change
            highest = max(highest, at_once)
        assert highest <= track["rows"]


def test_groups_and_staleness_are_those_of_the_audit(good: JsonObject, finished_run: Path) -> None:
    groups = audit.check(finished_run).guarantees.groups
    kinds = ("trained", "filtered", "failed", "pending")
    assert good["groups"]["outcomes"] == {kind: groups.outcomes[kind] for kind in kinds}
    num_samples = {str(staleness): 2 * num for staleness, num in sorted(groups.staleness.items())}
    assert [*good["groups"]["staleness"].items()] == [*num_samples.items()]
    num_untrained = Counter[str]()
    for outcome, reason, num in good["groups"]["reasons"]:
        assert reason
        num_untrained[outcome] += num
    assert num_untrained == {kind: groups.outcomes[kind] for kind in ("filtered", "failed")}
    assert all(verdict["is_kept"] for verdict in good["audit"].values())


def test_every_finished_response_is_counted_once_by_length(good: JsonObject, finished_run: Path) -> None:
    counted = sum(map(sum, good["groups"]["lengths"]["counts"].values()))
    assert counted == audit.check(finished_run).guarantees.versions.num_trajectories


def test_groups_of_voided_steps_are_pending_until_they_are_trained_again(
    resumed_run: Path, tmp_path: Path
) -> None:
    lines = (resumed_run / JOURNAL_FILE).read_text().splitlines(keepends=True)
    (at,) = (number for number, line in enumerate(lines) if '"kind": "resumed"' in line)
    reader, num_pending = RunReader(tmp_path), []
    for end, num_steps in ((at, FROM_STEP + NUM_REDONE), (at + 1, FROM_STEP), (len(lines), 8)):
        (tmp_path / JOURNAL_FILE).write_text("".join(lines[:end]))
        reader.refresh()
        found = reader.data()["groups"]
        assert found["outcomes"]["trained"] == 3 * num_steps
        assert sum(found["staleness"].values()) == 2 * 3 * num_steps
        assert sum(found["lengths"]["counts"]["trained"]) == 2 * 3 * num_steps
        num_pending.append(found["outcomes"]["pending"])
    assert (num_pending[1] - num_pending[0], num_pending[2]) == (3 * NUM_REDONE, 0)


def test_a_redone_version_keeps_the_time_of_its_first_publication(resumed_run: Path) -> None:
    published: dict[int, int] = {}
    for line in read_journal(resumed_run).lines:
        if isinstance(line.record, Published):
            published.setdefault(line.record.version, round(1e3 * line.t_s))
    data = run_data(resumed_run)
    assert data["published"] == [published[version] for version in range(9)]
    assert {track["attempt"] for track in data["engines"]["tracks"]} == {0, 1}


def test_steps_that_a_resume_adds_are_those_of_the_run(resumed_run: Path, tmp_path: Path) -> None:
    def add_steps(records: list[Record]) -> None:
        nth_of(records, "resumed").update(num_steps=12, lr_decay="linear")

    data = run_data(edited(resumed_run, tmp_path / "run", add_steps))
    assert data["limits"]["num_steps"] == 12
    assert (data["config"]["run"]["steps"], data["config"]["trainer"]["lr_decay"]) == (12, "linear")


def test_evaluations_are_those_of_the_journal_until_there_is_a_summary(tmp_path: Path) -> None:
    config = world_config()
    config = replace(config, limits=replace(config.limits, evaluation=EvaluationRule(4, 2, 2)))
    run = record_run(tmp_path / "run", config, seed=0)
    data = run_data(run)
    evaluations = {one["version"]: one for one in data["evaluations"]}
    assert evaluations.keys() == {0, 4, 8}
    for version, one in evaluations.items():
        assert 1e3 * one["t_s"] == pytest.approx(data["published"][version], abs=1)
    assert sum(data["groups"]["lengths"]["counts"]["pending"]) == 0  # held-out responses are not counted
    final = [{"version": 4, "reward_mean": 0.5}]
    (run / SUMMARY_FILE).write_text(json.dumps({"evaluations": final}))
    assert run_data(run)["evaluations"] == [final[0] | {"t_s": evaluations[4]["t_s"]}]


def test_migrations_losses_and_removals_are_listed(story: JsonObject) -> None:
    ends = {track["engine"]: track["end"] for track in story["engines"]["tracks"]}
    assert ends == {0: "removed", 1: "lost", 2: None}
    assert [(m["from"], m["to"]) for m in story["engines"]["migrations"]] == [(1, 0), (0, 2)]
    assert story["engines"]["num_failed_migrations"] == 1


def test_a_wait_names_the_last_response(story: JsonObject) -> None:
    (wait,) = [wait for wait in story["trainer"]["waits"] if wait["group"]]
    assert (wait["step"], wait["request"], wait["engine"]) == (0, "0/4/1", 2)
    assert wait["generation_s"] + wait["scoring_s"] == pytest.approx(wait["s"])


def test_a_history_is_that_of_dora_why(story: JsonObject, story_run: Path) -> None:
    journal = read_journal(story_run)
    (group,) = story["samples"]["groups"]
    found = [(t, sentence) for t, sentence in group["responses"][0]["history"]]
    history = why.request_histories(journal.lines, 1, [FIRST])[FIRST]
    assert found == [(round(t, 3), sentence) for t, sentence in history]


def test_a_run_read_in_parts_equals_one_read_at_once(finished_run: Path, tmp_path: Path) -> None:
    whole = (finished_run / JOURNAL_FILE).read_bytes()
    run = tmp_path / finished_run.name
    run.mkdir()
    (run / "samples.sqlite").write_bytes((finished_run / "samples.sqlite").read_bytes())
    reader, path = RunReader(run), run / JOURNAL_FILE
    for share in (0.2, 0.5, 0.51, 1.0):  # most cuts are within a line
        path.write_bytes(whole[: int(share * len(whole))])
        assert reader.refresh()
        assert reader.data()["is_torn"] == (share < 1)
    assert not reader.refresh()
    found, expected = reader.data(), run_data(finished_run)
    for data in (found, expected):
        data.pop("folder"), data.pop("audit")
    assert found == expected


def test_a_truncated_journal_is_read_from_its_start(finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    whole = (finished_run / JOURNAL_FILE).read_bytes()
    (run / JOURNAL_FILE).write_bytes(whole)
    reader = RunReader(run)
    reader.refresh()
    num_lines = len(whole.splitlines()) // 2
    (run / JOURNAL_FILE).write_bytes(b"".join(whole.splitlines(keepends=True)[:num_lines]))
    assert reader.refresh()
    fresh = RunReader(run)
    fresh.refresh()
    assert reader.data() == fresh.data()


def test_an_error_names_the_line_also_behind_lines_with_digests(finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    header, *lines = (finished_run / JOURNAL_FILE).read_bytes().splitlines(keepends=True)
    digests = b'{"kind": "files", "files": {}}\n'
    (run / JOURNAL_FILE).write_bytes(b"".join((header, lines[0], digests, lines[1], digests, b"damage\n")))
    for read in (RunReader(run).refresh, partial(read_journal, run)):
        with pytest.raises(InputError, match="line 6: not JSON"):
            read()


def test_a_journal_that_lost_its_responses_has_waits_without_a_request(
    finished_run: Path, tmp_path: Path
) -> None:
    def forget_responses(records: list[JsonObject]) -> None:
        records[:] = [record for record in records if record["kind"] != "generate"]

    trainer = run_data(edited(finished_run, tmp_path / "run", forget_responses))["trainer"]
    assert trainer["num_waits"] > 0
    assert {wait["request"] for wait in trainer["waits"]} == {None}


def spans_of(records: Sequence[tuple[float, Event | Action]], breaks_c1: bool = False) -> list[Span]:
    lines = (JournalLine(seq, t_s, record) for seq, (t_s, record) in enumerate(records))
    return fold(lines, breaks_c1=breaks_c1)


A, B, C, D = (GroupId(0, row) for row in range(4))
THREE_STEPS: list[tuple[float, Event | Action]] = [
    (0.0, EngineJoined(0, 2, 1)),
    *[(0.0, record) for record in (Published(0, "d"), Load(0, 1), Load(0, 0))],
    (0.125, LoadFailed(0, 1, "out of memory")),
    *[(0.25, record) for record in (Loaded(0, 0, "d"), Admit(A, 0, 0, 0), Admit(B, 1, 0, 0))],
    *[(0.25, Admit(group, 2, 0, 0)) for group in (C, D)],
    (0.25, Generate(0, 0, (RequestId(*A, 0), RequestId(*B, 0)))),
    *[(1.0, record) for record in (RequestFinished(0, RequestId(*B, 0), 0, 9, (), "stop"), Score(B))],
    (1.5, GroupScored(B, (1.0,))),
    *[(3.0, record) for record in (RequestFinished(0, RequestId(*A, 0), 0, 9, (), "stop"), Score(A))],
    *[(3.5, record) for record in (GroupScored(A, (0.0,)), Train(0, (A, B)))],
    *[(5.0, record) for record in (Trained(0), Publish(1))],
    (5.5, GroupScored(C, (1.0,))),  # before the wait
    (6.0, Published(1, "e")),
    (7.0, Train(1, (C,))),
    *[(8.0, record) for record in (Trained(1), Publish(2), GroupScored(D, (1.0,)))],
    *[(8.5, record) for record in (Published(2, "f"), Train(2, (D,)))],  # without a wait
]


def test_a_wait_is_explained_by_the_last_group_that_was_scored_during_it() -> None:
    spans = spans_of(THREE_STEPS)
    assert timeline.trainer_waits(spans) == [
        (0.0, 3.5, 0, A, RequestId(*A, 0), 0, 3.0, 0.5),
        (6.0, 7.0, 1, None, None, None, 1.0, 0.0),
    ]
    found = timeline.trainer_to_json(spans, now=9.0)
    assert found["sums"] == {"train": 3.0, "publish": 1.5, "generation": 3.0, "scoring": 0.5, "other": 1.0}
    assert found["intervals"] == [
        ["train", 3500, 5000, 0],
        ["publish", 5000, 6000, 1],
        ["train", 7000, 8000, 1],
        ["publish", 8000, 8500, 2],
    ]
    assert [wait["step"] for wait in found["waits"]] == [0, 1]  # the longest first


def test_a_wait_for_a_response_that_finished_before_it_is_one_for_scoring() -> None:
    request = RequestId(*A, 0)
    records: list[tuple[float, Event | Action]] = [
        (0.0, EngineJoined(0, 2, 1)),
        *[(0.0, record) for record in (Publish(0), Admit(A, 0, 0, 0), Generate(0, 0, (request,)))],
        (1.0, RequestFinished(0, request, 0, 9, (), "stop")),
        (2.0, Published(0, "d")),
        (3.0, GroupScored(A, (1.0,))),
        (4.0, Train(0, (A,))),
    ]
    assert timeline.trainer_waits(spans_of(records)) == [(2.0, 4.0, 0, A, request, 0, 0.0, 2.0)]


def test_a_free_row_waits_for_what_delays_the_next_group() -> None:
    (rows,) = timeline.rows_to_json(spans_of(THREE_STEPS), Limits(3, 2, 1, 0), now=9.0)
    assert rows["row_s"] == {
        "decoding": 3.5,
        "paused": 0.0,
        "loading": 0.0,
        "weights": 0.5,
        "train": 6.0,
        "publish": 3.0,
        "scoring": 1.5,
        "generation": 1.5,
        "other": 2.0,
        "end": 0.0,
    }
    (rows,) = timeline.rows_to_json(spans_of(THREE_STEPS), Limits(2, 2, 1, 0), now=9.0)
    assert (rows["row_s"]["decoding"], rows["row_s"]["end"]) == (3.5, 14.0)  # all groups are admitted


def test_a_row_is_paused_while_its_engine_decodes_others_or_nothing() -> None:
    records: list[tuple[float, Event | Action]] = [
        (0.0, EngineJoined(0, 2, 1)),
        *[(0.0, record) for record in (Load(0, 0), Loaded(0, 0, "d"), Load(0, 1))],
        (0.0, Generate(0, 0, (FIRST, SECOND))),
        (1.0, DecodeOnly(0, (FIRST,))),
        (2.0, PauseEngine(0)),
        (4.0, EnginePaused(0)),
        (5.0, ResumeEngine(0)),
        (6.0, DecodeOnly(0, ())),
        (7.0, Loaded(0, 1, "e", 0.25)),
    ]
    (rows,) = timeline.rows_to_json(spans_of(records), Limits(2, 2, 1, 0), now=8.0)
    times_s = {cause: seconds for cause, seconds in rows["row_s"].items() if seconds}
    assert times_s == {"decoding": 7.5, "paused": 3.0 + 5.0, "loading": 0.5}


def test_loads_have_their_pause_or_the_reason_of_their_failure() -> None:
    records: list[tuple[float, Event | Action]] = [
        (0.0, EngineJoined(0, 2, 2)),
        (0.0, Load(0, 0)),
        (0.5, Loaded(0, 0, "", 0.0625)),
        (1.0, Load(0, 1)),
        (1.25, LoadFailed(0, 1, "out of memory")),
        (2.0, Load(0, 2)),
        (3.0, EngineLost(0, "killed")),
    ]
    (track,) = timeline.engines_to_json(spans_of(records), now=4.0)["tracks"]
    assert track["loads"] == [[0, 500, 0, 62.5, ""], [1000, 1250, 1, 0.0, "out of memory"]]
    assert (track["from"], track["to"], track["end"], track["reason"]) == (0, 3000, "lost", "killed")


def test_without_c1_a_span_ends_with_each_load_of_a_newer_version() -> None:
    held_out = RequestId(-2, 0, 0)
    records: list[tuple[float, Event | Action]] = [
        (0.0, EngineJoined(0, 2, 1)),
        (0.0, Generate(0, 1, (FIRST, held_out))),
        (1.0, Loaded(0, 2, "")),
        (2.0, Loaded(0, 1, "")),
        (3.0, RequestFinished(0, FIRST, 2, 9, (), "stop")),
        (4.0, RequestFinished(0, held_out, 1, 9, (), "stop")),
    ]
    (track,) = timeline.engines_to_json(spans_of(records, breaks_c1=True), now=4.0)["tracks"]
    assert track["spans"] == {
        "t": [0, 0, 1000],
        "d": [1000, 4000, 2000],
        "v": [1, 1, 2],
        "r": [str(FIRST), str(held_out), str(FIRST)],
    }


def test_a_run_with_too_many_spans_is_drawn_as_sums(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = run_data(finished_run)["engines"]
    monkeypatch.setattr(timeline, "MAX_SPANS", 10)
    summed = run_data(finished_run)["engines"]
    for one, other in zip(exact["tracks"], summed["tracks"], strict=True):
        occupied_ms = sum(rows for _, _, rows in other["bins"]) * summed["bin_ms"]
        assert occupied_ms == pytest.approx(sum(one["spans"]["d"]), rel=0.02, abs=20)


def test_a_bin_has_the_mean_number_of_occupied_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MAX_SPANS", 1)
    monkeypatch.setattr(timeline, "MAX_BINS", 60)
    records: list[tuple[float, Event | Action]] = [
        (0.0, EngineJoined(0, 2, 1)),
        (0.0, Generate(0, 0, (FIRST,))),
        (0.05, Generate(0, 0, (SECOND,))),
        (0.25, RequestFinished(0, FIRST, 0, 9, (), "stop")),
        (0.3, RequestFinished(0, SECOND, 0, 9, (), "stop")),
    ]
    found = timeline.engines_to_json(spans_of(records), now=6.0)
    assert (found["bin_ms"], found["num_spans"]) == (100, 2)
    assert found["tracks"][0]["bins"] == [(0, 0, 1.5), (1, 0, 2.0), (2, 0, 1.5)]


def test_whole_groups_are_picked_notable_ones_first(finished_run: Path) -> None:
    stored = samples.read_groups(finished_run)
    longest = max(stored, key=lambda group: group.num_tokens).id
    picked = samples.pick_groups(stored, 8, migrated=[], waited_for=[stored[3].id])
    assert len(picked) == 8
    assert picked[stored[3].id] == ["trainer waited"]
    assert picked[longest] == ["longest"]
    assert len(samples.pick_groups(stored, 10_000, [], [])) == len(stored)


def test_the_number_of_samples_is_limited(finished_run: Path) -> None:
    found = run_data(finished_run, num_samples=4)["samples"]
    assert len(found["groups"]) == 2
    assert found["num"] > 4


def test_a_long_text_is_cut_with_a_remark(finished_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MAX_CHARACTERS", 10)
    texts = render_payload([run_data(finished_run)])
    assert re.search(r"\.\.\. and \d+ characters more", texts)


def test_long_curves_are_thinned_to_means() -> None:
    thinned = metric_columns(
        {"step": step, "num_response_tokens": step, "actor/entropy": float("nan") if step else 1.0}
        for step in range(MAX_POINTS * 2)
    )
    assert thinned["every"] == 2
    assert thinned["columns"]["num_response_tokens"][:2] == [0.5, 2.5]
    assert thinned["columns"]["actor/entropy"][:2] == [1.0, None]


def test_a_curve_has_the_meaning_of_its_name() -> None:
    meanings = metric_columns([{"step": 0, "staleness/num_2": 3, "of/another": 1}])["meanings"]
    assert meanings["staleness/num_2"].startswith("samples: samples of the batch with staleness S")
    assert "of/another" not in meanings


def test_a_redone_step_replaces_its_earlier_line() -> None:
    found = metric_columns({"step": 0, "num_response_tokens": tokens} for tokens in (1, 2))
    assert found["columns"]["num_response_tokens"] == [2]


def test_a_run_that_has_just_started_has_a_page(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / JOURNAL_FILE, Limits(1, 1, 1, 0), "", 7)
    journal.close()
    (found,) = json.loads(render_payload([run_data(tmp_path)]))
    assert found["engines"]["tracks"] == []
    assert (found["is_started"], found["is_finished"]) == (False, False)


def test_groups_of_several_versions_have_a_tag(tmp_path: Path) -> None:
    run, mixed = write_story(tmp_path / "run"), RequestId(0, 7, 0)
    store = SampleStore(run / "samples.sqlite")
    store.put(Trajectory(mixed, 0, "d+e", [1], [2, 3], [-0.5, -0.5], segments=[(0, 1), (1, 1)]))
    store.close()
    picked = samples.pick_groups(samples.read_groups(run), 10, [], [])
    assert [group for group, tags in picked.items() if "several versions" in tags] == [mixed.group]


def test_the_page_loads_nothing(good: JsonObject) -> None:
    text = render_page([good])
    assert "connect-src 'none'" in text
    assert "connect-src 'self'" in render_page([good], live=True)
    addresses = set(re.findall(r"https?://[\w./-]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a namespace, which is not loaded
    assert not re.search(r"(?:src|href)=[\"'](?!data:|#)", text)


def test_no_text_of_a_run_can_end_the_script_element(good: JsonObject) -> None:
    evil = "</script><script>alert(1)</script> @SCRIPT@ \u2028"
    text = render_page([good | {"name": evil}])
    assert "<script>alert" not in text
    assert "@SCRIPT@" in re.findall(r"<title>(.*?)</title>", text)[0]
    (held,) = re.findall(r'<script id="data"[^>]*>(.*?)</script>', text, flags=re.DOTALL)
    assert json.loads(held)[0]["name"] == evil


def test_values_that_are_not_finite_become_null() -> None:
    assert render_payload([{"a": float("inf"), "b": [float("nan"), 1]}]) == '[{"a":null,"b":[null,1]}]'


def test_the_command_writes_one_file_for_several_runs(
    finished_run: Path, stopped_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "both.html"
    app(["report", f"{finished_run}", f"{stopped_run}", "--out", f"{out}"], standalone_mode=False)
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert str(out) in capsys.readouterr().out
    assert [path.name for path in out.parent.iterdir()] == ["both.html"]


def test_an_output_that_cannot_be_written_is_named(finished_run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="name a file with --out"):
        write_report([finished_run], tmp_path / "file" / "report.html")


def test_a_run_with_many_failures_has_a_page(tmp_path: Path) -> None:
    run = record_run(tmp_path / "run", world_config(engine_loss_interval_s=0.3), seed=3)
    found = run_data(run)
    assert sum(track["end"] == "lost" for track in found["engines"]["tracks"]) > 1
    assert render_payload([found])
