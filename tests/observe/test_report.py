"""What the report says of a run is what its files say, whole or while they are being written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.observe.recording import record_run, world_config
from tests.observe.story import FIRST, write_story

from dora.core.actions import Generate
from dora.core.events import EngineJoined, Loaded, RequestFinished
from dora.core.records import Limits, RequestId
from dora.errors import InputError
from dora.observe import audit, why
from dora.observe.journal import FILE_NAME, read_journal
from dora.observe.report import browsing, curves, engines
from dora.observe.report.page import main, page, payload
from dora.observe.report.reading import RunReader, run_data
from dora.runtime.journal import Journal
from dora.stream.samples import SampleStore, Trajectory

Data = dict[str, Any]


@pytest.fixture(scope="module")
def good(good_run: Path) -> Data:
    return run_data(good_run)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return run_data(write_story(tmp_path_factory.mktemp("report") / "run"))


def test_the_trainer_s_time_adds_up_to_the_run(good: Data) -> None:
    journal_s = good["to_s"] - good["from_s"]
    assert sum(good["trainer"]["sums"].values()) == pytest.approx(journal_s, abs=0.01)


def test_the_time_of_the_rows_adds_up_to_their_life(good: Data) -> None:
    for track, rows in zip(good["engines"]["tracks"], good["rows"], strict=True):
        life_s = (track["to"] - track["from"]) / 1000
        assert sum(rows["spent"].values()) == pytest.approx(track["rows"] * life_s, abs=0.05)


def test_a_row_decodes_as_long_as_there_are_spans_in_it(good: Data) -> None:
    for track, rows in zip(good["engines"]["tracks"], good["rows"], strict=True):
        busy_s = rows["spent"]["decoding"] + rows["spent"].get("held", 0) + rows["spent"].get("loading", 0)
        assert sum(track["spans"]["d"]) / 1000 == pytest.approx(busy_s, abs=0.05)


def test_never_more_requests_are_drawn_than_an_engine_has_rows(good: Data) -> None:
    for track in good["engines"]["tracks"]:
        spans = [*zip(track["spans"]["t"], track["spans"]["d"], strict=True)]
        changes = sorted(change for t, d in spans if d for change in ((t, 1), (t + d, -1)))
        at_once = most = 0
        for _, change in changes:
            at_once += change
            most = max(most, at_once)
        assert most <= track["rows"]


def test_groups_and_staleness_are_those_of_the_audit(good: Data, good_run: Path) -> None:
    counts = audit.check(good_run).counts
    ends = good["groups"]["ends"]
    assert ends == {end: getattr(counts, end) for end in ("trained", "filtered", "failed", "pending")}
    ages = [int(age) for age in good["groups"]["staleness"]]
    assert (min(ages), max(ages)) == counts.staleness
    assert all(verdict["is_kept"] for verdict in good["audit"].values())


def test_every_finished_answer_has_its_length_counted_once(good: Data, good_run: Path) -> None:
    counted = sum(map(sum, good["groups"]["lengths"]["counts"].values()))
    assert counted == audit.check(good_run).counts.trajectories


def test_moves_losses_and_leaving_are_told(story: Data) -> None:
    ends = {track["engine"]: track["end"] for track in story["engines"]["tracks"]}
    assert ends == {0: "left", 1: "lost", 2: None}
    assert [(m["from"], m["to"], m["tokens"]) for m in story["engines"]["moves"]] == [(1, 0, 5), (0, 2, 7)]
    assert [m["why"] for m in story["engines"]["failed_moves"]] == ["no free block"]


def test_a_wait_names_the_answer_that_came_last(story: Data) -> None:
    (wait,) = [wait for wait in story["trainer"]["waits"] if wait["group"]]
    assert (wait["step"], wait["request"], wait["engine"]) == (0, "0/4/1", 2)
    assert wait["answers_s"] + wait["rewards_s"] == pytest.approx(wait["s"])


def test_a_life_is_that_of_dora_why(story: Data, tmp_path: Path) -> None:
    journal = read_journal(write_story(tmp_path / "run"))
    (group,) = story["samples"]["groups"]
    told = [(t, sentence) for t, sentence in group["answers"][0]["life"]]
    assert told == [(round(t, 3), sentence) for t, sentence in why.life(journal, FIRST)]


def test_a_run_that_is_followed_ends_as_one_that_is_read_at_once(good_run: Path, tmp_path: Path) -> None:
    whole = (good_run / FILE_NAME).read_bytes()
    run = tmp_path / good_run.name
    run.mkdir()
    (run / "samples.sqlite").write_bytes((good_run / "samples.sqlite").read_bytes())
    reader, path = RunReader(run), run / FILE_NAME
    for share in (0.2, 0.5, 0.51, 1.0):  # cut anywhere, so mostly in the middle of a line
        path.write_bytes(whole[: int(share * len(whole))])
        assert reader.refresh()
        assert reader.data()["is_torn"] == (share < 1)
    assert not reader.refresh()
    told, expected = reader.data(), run_data(good_run)
    for data in (told, expected):
        data.pop("folder"), data.pop("audit")
    assert told == expected


def test_a_journal_that_was_cut_shorter_is_read_from_its_beginning(good_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    whole = (good_run / FILE_NAME).read_bytes()
    (run / FILE_NAME).write_bytes(whole)
    reader = RunReader(run)
    reader.refresh()
    num_lines = len(whole.splitlines()) // 2
    (run / FILE_NAME).write_bytes(b"".join(whole.splitlines(keepends=True)[:num_lines]))
    assert reader.refresh()
    fresh = RunReader(run)
    fresh.refresh()
    assert reader.data() == fresh.data()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not the folder of a run"):
        run_data(tmp_path)


def test_where_c1_is_given_up_a_span_ends_with_each_load_of_a_newer_version() -> None:
    told, held_out = engines.Engines(breaks_c1=True), RequestId(-2, 0, 0)
    told.hear(0.0, EngineJoined(0, 2, 1))
    for now, fact in (
        (0.0, Generate(0, 1, (FIRST, held_out))),
        (1.0, Loaded(0, 2, "")),
        (2.0, Loaded(0, 1, "")),
        (3.0, RequestFinished(0, FIRST, 2, 9, (), "stop")),
        (4.0, RequestFinished(0, held_out, 1, 9, (), "stop")),
    ):
        told.hear(now, fact)
    spans = [(span.request, span.to_s - span.from_s, span.version) for span in told.tracks[0].spans]
    assert spans == [(FIRST, 1.0, 1), (FIRST, 2.0, 2), (held_out, 4.0, 1)]


def test_a_run_with_too_many_requests_is_drawn_as_sums(
    good_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = run_data(good_run)["engines"]
    monkeypatch.setattr(engines, "MAX_SPANS", 10)
    summed = run_data(good_run)["engines"]
    for one, other in zip(exact["tracks"], summed["tracks"], strict=True):
        busy_ms = sum(rows for _, _, rows in other["bins"]) * summed["bin_ms"]
        assert busy_ms == pytest.approx(sum(one["spans"]["d"]), rel=0.02, abs=20)


def test_whole_groups_are_picked_the_notable_ones_first(good_run: Path) -> None:
    stored = browsing.stored_groups(good_run)
    longest = max(stored, key=lambda group: group.num_tokens).id
    picked = browsing.pick(stored, 8, moved=[], waited_for=[stored[3].id])
    assert len(picked) == 8
    assert picked[stored[3].id] == ["the trainer waited for it"]
    assert picked[longest] == ["longest answers"]
    assert len(browsing.pick(stored, 10_000, [], [])) == len(stored)


def test_few_samples_are_taken_if_few_are_asked_for(good_run: Path) -> None:
    samples = run_data(good_run, num_samples=4)["samples"]
    assert len(samples["groups"]) == 2
    assert samples["num"] > 4


def test_an_answer_that_is_too_long_is_cut_and_says_so(
    good_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browsing, "MAX_CHARACTERS", 10)
    texts = payload([run_data(good_run)])
    assert re.search(r"\.\.\. and \d+ characters more", texts)


def test_long_curves_are_thinned_to_means() -> None:
    told = curves.Curves()
    for step in range(curves.MAX_POINTS * 2):
        told.read(json.dumps({"step": step, "tokens": step, "actor/entropy": float("nan") if step else 1.0}))
    thinned = told.to_json()
    assert thinned["every"] == 2
    assert thinned["columns"]["tokens"][:2] == [0.5, 2.5]
    assert thinned["columns"]["actor/entropy"][:2] == [1.0, None]


def test_a_curve_comes_with_what_its_name_means() -> None:
    told = curves.Curves()
    told.read(json.dumps({"step": 0, "staleness/num_2": 3, "of/another": 1}))
    meanings = told.to_json()["meanings"]
    assert meanings["staleness/num_2"].startswith("samples: of staleness S")
    assert "of/another" not in meanings


def test_a_redone_step_replaces_what_it_told_before() -> None:
    told = curves.Curves()
    for tokens in (1, 2):
        told.read(json.dumps({"step": 0, "tokens": tokens}))
    assert told.to_json()["columns"]["tokens"] == [2]


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    journal = Journal(tmp_path / FILE_NAME, Limits(1, 1, 1, 0), "digest of no file", 7)
    journal.close()
    (told,) = json.loads(payload([run_data(tmp_path)]))
    assert told["engines"]["tracks"] == []
    assert (told["has_begun"], told["is_over"]) == (False, False)


def test_groups_that_several_versions_have_drawn_are_a_kind_of_their_own(tmp_path: Path) -> None:
    run, mixed = write_story(tmp_path / "run"), RequestId(0, 7, 0)
    store = SampleStore(run / "samples.sqlite")
    store.put(Trajectory(mixed, 0, "d+e", [1], [2, 3], [-0.5, -0.5], segments=[(0, 1), (1, 1)]))
    store.close()
    picked = browsing.pick(browsing.stored_groups(run), 10, [], [])
    assert [group for group, kinds in picked.items() if "several versions" in kinds] == [mixed.group]


def test_the_page_asks_nobody_for_anything(good: Data) -> None:
    text = page([good])
    assert "connect-src 'none'" in text
    assert "connect-src 'self'" in page([good], live=True)
    addresses = set(re.findall(r"https?://[\w./-]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, which nobody asks
    assert not re.search(r"(?:src|href)=[\"'](?!data:|#)", text)


def test_no_text_of_a_run_can_end_the_script(good: Data) -> None:
    evil = "</script><script>alert(1)</script> @SCRIPT@ \u2028"
    text = page([good | {"name": evil}])
    assert "<script>alert" not in text
    assert "@SCRIPT@" in re.findall(r"<title>(.*?)</title>", text)[0]
    (held,) = re.findall(r'<script id="data"[^>]*>(.*?)</script>', text, flags=re.DOTALL)
    assert json.loads(held)[0]["name"] == evil


def test_what_is_not_finite_is_null() -> None:
    assert payload([{"a": float("inf"), "b": [float("nan"), 1]}]) == '[{"a":null,"b":[null,1]}]'


def test_the_command_writes_one_file_for_several_runs(
    good_run: Path, early_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "both.html"
    assert main([good_run, early_run], out) == 0
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert str(out) in capsys.readouterr().out
    assert [path.name for path in out.parent.iterdir()] == ["both.html"]


def test_a_place_that_cannot_be_written_is_named(good_run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="name a file with --out"):
        main([good_run], tmp_path / "file" / "report.html")


def test_a_run_of_many_mishaps_can_be_told(tmp_path: Path) -> None:
    run = record_run(tmp_path / "run", world_config(loss_interval_s=0.3), seed=3)
    told = run_data(run)
    assert sum(track["end"] == "lost" for track in told["engines"]["tracks"]) > 1
    assert payload([told])
