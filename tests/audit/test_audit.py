"""The audit passes a correct run and names the guarantee that an edited record breaks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.journal.recorded_runs import (
    Edit,
    Record,
    changed,
    edited,
    edited_samples,
    nth_of,
    record_run,
    removed,
    repeated,
    with_edits,
)

from dora.audit import audit
from dora.audit.audit import FILES
from dora.audit.versions import VersionAudit
from dora.core.actions import Action, Generate
from dora.core.events import EngineLost, Event, OutputsLost, ProgressReported
from dora.core.types import RequestId
from dora.errors import DamagedRunError
from dora.report.samples import read_groups
from dora.sim.random_config import draw_world_config


def batch(records: list[Record], step: int) -> list[list[int]]:
    groups: list[list[int]] = nth_of(records, "train", step)["groups"]
    return groups


def finish(records: list[Record], group: list[int]) -> Record:
    """The event that a group's first sibling finished."""
    return next(r for r in records if r["kind"] == "request_finished" and r["request"] == [*group, 0])


# Each edits the records of a correct journal in one way.


def mix_versions(records: list[Record]) -> None:
    event = next(
        r for r in records if r["kind"] == "request_finished" and r["version"] > 0 and r["num_tokens"] > 1
    )
    (version, digest, num_tokens), *_ = event["chunks"]
    event["chunks"] = [[version - 1, nth_of(records, "published", version - 1)["digest"], 1]]
    event["chunks"] += [[version, digest, num_tokens - 1]]


def finish_on_another_version(records: list[Record]) -> None:
    """Version, digest and tokens fit together, but it is not the version of the group."""
    event = next(r for r in records if r["kind"] == "request_finished" and r["version"] > 0)
    event["version"] -= 1
    event["chunks"] = [
        [event["version"], nth_of(records, "published", event["version"])["digest"], event["num_tokens"]]
    ]


def finish_on_another_engine(records: list[Record]) -> None:
    event = nth_of(records, "request_finished")
    event["engine"] = (event["engine"] + 1) % 3


def remove_a_load(records: list[Record]) -> None:
    """The last one before a request finishes on that engine and version."""
    event = nth_of(records, "request_finished")
    place = (event["engine"], event["version"])
    before = records[: records.index(event)]
    loads = [r for r in before if r["kind"] == "loaded" and (r["engine"], r["version"]) == place]
    records.remove(loads[-1])


def drop_under_a_request(records: list[Record]) -> None:
    event = nth_of(records, "request_finished", -1)
    drop = {"t_s": 0.0, "kind": "drop", "engine": event["engine"], "version": event["version"]}
    records.insert(records.index(event), drop)


def sample_from_other_bytes(records: list[Record]) -> None:
    nth_of(records, "request_finished")["chunks"][0][1] = "sim-ffffffff"


def drop_a_version_that_is_not_held(records: list[Record]) -> None:
    event = nth_of(records, "loaded")
    drop = {"t_s": 0.0, "kind": "drop", "engine": event["engine"], "version": event["version"]}
    records.insert(records.index(event), drop)


def publish_twice(records: list[Record]) -> None:
    records.append(nth_of(records, "published") | {"digest": "sim-ffffffff"})


def lose_a_group(records: list[Record]) -> None:
    """The last group of the last batch is never trained; another one is trained twice."""
    batch(records, -1)[-1] = batch(records, 0)[0]


def shorten_a_batch(records: list[Record]) -> None:
    batch(records, 2).pop()


def train_in_two_batches(records: list[Record]) -> None:
    batch(records, 1)[0] = batch(records, 0)[0]


def repeat_a_group_in_its_batch(records: list[Record]) -> None:
    batch(records, 1)[0] = batch(records, 1)[1]


def train_a_filtered_group(records: list[Record]) -> None:
    batch(records, -1)[0] = nth_of(records, "filter")["group"]


def fail_a_trained_group(records: list[Record]) -> None:
    records.append({"t_s": 0.0, "kind": "fail", "group": batch(records, 0)[0], "reason": "late"})


def skip_a_prompt(records: list[Record]) -> None:
    """The dataset's third prompt is never admitted; all later ones are."""
    admitted = [record for record in records if record["kind"] == "admit"]
    records.remove(admitted[2])


def skip_a_position_of_the_cursor(records: list[Record]) -> None:
    for event in [record for record in records if record["kind"] == "prompts_fetched"][1:]:
        event["first_index"] += 1


def fetch_a_row_twice(records: list[Record]) -> None:
    groups = nth_of(records, "prompts_fetched")["groups"]
    groups[1] = groups[0]


def fetch_from_the_wrong_epoch(records: list[Record]) -> None:
    nth_of(records, "prompts_fetched")["groups"][0][0] += 1


def fetch_a_row_that_does_not_exist(records: list[Record]) -> None:
    nth_of(records, "prompts_fetched")["groups"][0][1] = 7


def admit_twice(records: list[Record]) -> None:
    admit = nth_of(records, "admit", -1)
    records.append(admit | {"index": admit["index"] + 1})


def remove_a_sibling(records: list[Record]) -> None:
    records.remove(finish(records, batch(records, 3)[0]))


def finish_after_the_batch(records: list[Record]) -> None:
    event = finish(records, batch(records, 3)[0])
    records.remove(event)
    records.append(event)


def lose_a_reward(records: list[Record]) -> None:
    group = batch(records, 3)[0]
    next(r for r in records if r["kind"] == "group_scored" and r["group"] == group)["rewards"].pop()


def score_too_early(records: list[Record]) -> None:
    score = next(r for r in records if r["kind"] == "score" and r["group"] == batch(records, 3)[0])
    records.remove(score)
    records.insert(records.index(finish(records, batch(records, 3)[0])), score)


def start_a_step_during_another(records: list[Record]) -> None:
    action = nth_of(records, "train", 1)
    records.remove(action)
    records.insert(records.index(nth_of(records, "trained")), action)


def publish_too_early(records: list[Record]) -> None:
    action = nth_of(records, "publish", 1)
    records.remove(action)
    records.insert(records.index(nth_of(records, "trained")), action)


def train_without_action(records: list[Record]) -> None:
    records.append({"t_s": 0.0, "kind": "trained", "step": 8})


def train_too_late(records: list[Record]) -> None:
    """Groups of the first and of the last batch change places."""
    first, last = batch(records, 0), batch(records, -1)
    first[0], last[0] = last[0], first[0]


def lower_a_deadline(records: list[Record]) -> None:
    """The bound is lower when the group is admitted, and it is trained at the same step."""
    group = batch(records, 1)[0]
    admit = next(r for r in records if r["kind"] == "admit" and r["group"] == group)
    admit["deadline"] = 0


OTHER_BYTES = changed("loaded", digest="sim-ffffffff")
EDITS: list[tuple[Edit, str, str]] = [
    (mix_versions, "C1", "was sampled from"),
    (finish_on_another_version, "C1", "its group has"),
    (finish_on_another_engine, "C1", "its owner was engine"),
    (remove_a_load, "C1", "holds"),
    (drop_under_a_request, "C1", "holds"),
    (changed("engine_joined", -1, replaces=99), "C1", "replaces engine 99, which was not lost"),
    (OTHER_BYTES, "C1", "expected the published"),
    (sample_from_other_bytes, "C1", "was sampled from"),
    (drop_a_version_that_is_not_held, "C1", "drops version 0, it holds []"),
    (changed("generate", version=1), "C1", "generates on version 1, it holds [0]"),
    (changed("generate", version=1), "C1", "is generated on version 1, its group has 0"),
    (publish_twice, "C1", "published twice"),
    (changed("request_finished", num_tokens=99), "C1", "its chunks have"),
    (lose_a_group, "C2", "has no outcome"),
    (shorten_a_batch, "C2", "has 2 groups, not 3"),
    (train_in_two_batches, "C2", "was already in a batch"),
    (repeat_a_group_in_its_batch, "C2", "was already in a batch"),
    (train_a_filtered_group, "C2", "was already filtered"),
    (fail_a_trained_group, "C2", "was already in a batch"),
    (skip_a_prompt, "C2", "expected 2"),
    (skip_a_position_of_the_cursor, "C2", "were fetched from position"),
    (fetch_a_row_twice, "C2", "expected a new row"),
    (fetch_from_the_wrong_epoch, "C2", "expected a new row"),
    (fetch_a_row_that_does_not_exist, "C2", "expected a new row"),
    (admit_twice, "C2", "was admitted twice"),
    (repeated("request_finished"), "C2", "finished twice"),
    (remove_a_sibling, "C2", "is in a batch and has not finished"),
    (finish_after_the_batch, "C2", "is in a batch and has not finished"),
    (lose_a_reward, "C2", "is in a batch with 1 of 2 rewards"),
    (score_too_early, "C2", "is scored and has not finished"),
    (start_a_step_during_another, "C2", "step 2 starts during another step"),
    (publish_too_early, "C2", "version 1 is published after 0 steps"),
    (removed("trained", -1), "C2", "the run stopped after 7 of 8 steps"),
    (train_without_action, "C2", "expected step"),
    (changed("admit", deadline=99), "C3", "has the deadline"),
    (lower_a_deadline, "C3", "after its deadline 1"),
    (train_too_late, "C3", "staleness 7, bound 2"),
    (train_too_late, "C2", "is in a batch without being admitted"),
]
# Each edits one sample of a trained group.
ONE = "where trained_step = 3 and sibling = 0"
SAMPLE_EDITS = [
    (f"delete from samples {ONE}", "C2", "is not in the sample store"),
    ("delete from samples where state = 'failed'", "C2", "finished and is not in the sample store"),
    (f"update samples set token_ids = substr(token_ids, 5) {ONE}", "C1", "its sample stores"),
    (f"update samples set logprobs = substr(logprobs, 2) {ONE}", "C1", "log-probs"),
    (f"update samples set loss_mask = x'0100' {ONE}", "C1", "its sample stores a loss mask of 2"),
    (f"update samples set version = version + 1 {ONE}", "C1", "is stored as sampled from"),
    (f"update samples set weight_digest = 'sim-ffffffff' {ONE}", "C1", "is stored as sampled from"),
    (f"update samples set reward = null {ONE}", "C2", "its sample stores None"),
    (f"update samples set reward = 0.5 {ONE}", "C2", "its sample stores 0.5"),
    (
        f"update samples set finish_reason = 'length' {ONE}",
        FILES,
        "with the finish reason 'length', the journal",
    ),
    (f"update samples set trained_step = 4 {ONE}", "C2", "was trained in step 4"),
    (f"update samples set state = 'scored' {ONE}", "C2", "was trained in step 4"),
    (
        "update samples set trained_step = 4, state = 'trained' where state = 'failed'",
        "C2",
        "no such training",
    ),
    ("update samples set sibling = 2 where trained_step = 3 and sibling = 1", "C2", "no such training"),
]


def test_a_correct_run_passes(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = audit.check(finished_run)
    assert result.findings == ()
    assert min(result.guarantees.groups.outcomes[end] for end in ("trained", "filtered", "failed")) > 0
    assert audit.main(finished_run) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:5] for line in lines[:3]] == ["C1 ok", "C2 ok", "C3 ok"]
    assert lines[3].startswith("files ok")


def test_a_stopped_run_passes_and_its_open_groups_are_pending(stopped_run: Path) -> None:
    groups = audit.check(stopped_run).guarantees.groups
    assert audit.main(stopped_run) == 0
    assert groups.outcomes["pending"] > 0
    assert groups.num_admitted == groups.outcomes.total()


@pytest.mark.parametrize("max_events", [0, 1, 5, 20, 60])
def test_a_run_may_stop_after_any_event(tmp_path: Path, max_events: int) -> None:
    assert audit.main(record_run(tmp_path / "run", draw_world_config(7), 7, max_events)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_many_kinds_pass(tmp_path: Path, seed: int) -> None:
    assert audit.check(record_run(tmp_path / "run", draw_world_config(seed), seed)).findings == ()


@with_edits(EDITS)
def test_an_edited_journal_breaks_its_guarantee(
    finished_run: Path, tmp_path: Path, edit: Edit, guarantee: str, words: str
) -> None:
    run = edited(finished_run, tmp_path / "run", edit)
    assert any(words in finding for finding in audit.check(run).findings_against(guarantee))
    assert audit.main(run) == 1


@pytest.mark.parametrize(("sql", "guarantee", "words"), SAMPLE_EDITS)
def test_an_edited_sample_breaks_its_guarantee(
    finished_run: Path, tmp_path: Path, sql: str, guarantee: str, words: str
) -> None:
    result = audit.check(edited_samples(finished_run, tmp_path / "run", sql))
    assert any(words in finding for finding in result.findings_against(guarantee))
    assert {finding[:2] for finding in result.findings} <= {guarantee, FILES[:2]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("reward = 'high'", "reward is text, must be real or null"),
        ("sibling = 'first'", "sibling is text, must be integer"),
        ("loss_mask = 'ab'", "loss_mask is text, must be blob or null"),
        ("turn_rewards = x'00'", "turn_rewards is blob, must be text or null"),
        ("token_ids = 5", "token_ids is integer, must be blob"),
        ("group_id = 'x' || group_id", "its group is not EPOCH/ROW"),
        ("segments = '[['", "segments '[[' cannot be read"),
        ("segments = '[[1]]'", "segments '[[1]]' cannot be read"),
    ],
)
def test_a_sample_store_with_unreadable_values_is_damaged(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, words: str
) -> None:
    run = edited_samples(finished_run, tmp_path / "run", f"update samples set {change} {ONE}")
    assert audit.main(run) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("files VIOLATED")
    assert words in line
    with pytest.raises(DamagedRunError):
        read_groups(run)


@pytest.mark.parametrize("text", ["{", "[1]", '{"task": "high"}'])
def test_rewards_by_task_that_cannot_be_read_are_found(finished_run: Path, tmp_path: Path, text: str) -> None:
    change = f"update samples set task_rewards = '{text}' {ONE}"
    result = audit.check(edited_samples(finished_run, tmp_path / "run", change))
    assert any("has rewards by task that cannot be read" in finding for finding in result.findings)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "has the rewards { by turn, which do not give its reward"),
        ("5", "which do not give its reward"),
        ('{"1": 2}', "which do not give its reward"),
        ("[0.25, 9.0]", "which do not give its reward"),
        ("[Infinity, -Infinity]", "which do not give its reward"),
        ("[1e308, 1e308]", "which do not give its reward"),
    ],
)
def test_wrong_rewards_by_turn_are_found(finished_run: Path, tmp_path: Path, text: str, words: str) -> None:
    change = f"update samples set turn_rewards = '{text}' {ONE}"
    result = audit.check(edited_samples(finished_run, tmp_path / "run", change))
    assert any(words in finding for finding in result.findings)


def test_rewards_of_turns_cannot_be_exchanged(finished_run: Path, tmp_path: Path) -> None:
    change = f"update samples set turn_rewards = format('[%!.17g]', reward) {ONE}"
    result = audit.check(edited_samples(finished_run, tmp_path / "run", change))
    assert any("has changed since it finished" in finding for finding in result.findings)


def test_a_reward_for_a_turn_that_does_not_exist_is_found(finished_run: Path, tmp_path: Path) -> None:
    change = f"update samples set turn_rewards = format('[%!.17g, 0.0]', reward) {ONE}"
    result = audit.check(edited_samples(finished_run, tmp_path / "run", change))
    assert any("has 2 rewards by turn for 1 turn" in finding for finding in result.findings)


def test_the_guarantees_have_separate_verdicts(finished_run: Path, tmp_path: Path) -> None:
    result = audit.check(edited(finished_run, tmp_path / "run", OTHER_BYTES))
    assert (result.c1, result.c2, result.c3) == (False, True, True)


def test_a_group_without_outcome_is_pending_in_a_stopped_run(stopped_run: Path, tmp_path: Path) -> None:
    def remove_the_last_outcome(records: list[Record]) -> None:
        records.remove(nth_of(records, "fail", -1))

    result = audit.check(edited(stopped_run, tmp_path / "run", remove_the_last_outcome))
    assert result.c2
    before = audit.check(stopped_run)
    num_pending = [found.guarantees.groups.outcomes["pending"] for found in (before, result)]
    assert num_pending[1] == num_pending[0] + 1


def test_only_the_first_findings_are_printed(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit.main(edited_samples(finished_run, tmp_path / "run", "update samples set weight_digest = 'other'"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("C1 VIOLATED")
    assert lines[6].startswith("   and ")
    assert lines[6].endswith(" more")
    assert [line[:5] for line in lines[7:9]] == ["C2 ok", "C3 ok"]


def test_tokens_of_a_request_that_restarts_after_all_are_lost() -> None:
    first, second = RequestId(0, 0, 0), RequestId(0, 0, 1)
    versions = VersionAudit([], {})
    records: list[Event | Action] = [
        Generate(0, 0, (first, second)),
        ProgressReported(0, ((first, 9), (second, 4))),
        EngineLost(0, "killed", ((first, 7), (second, 4))),
    ]
    for record in records:
        versions.observe(record)
    assert (versions.num_kept_tokens, versions.num_lost_tokens, versions.num_restarted) == (11, 2, 0)
    for _ in range(2):
        versions.observe(OutputsLost((second,)))
        assert (versions.num_kept_tokens, versions.num_lost_tokens, versions.num_restarted) == (7, 6, 1)
    for record in (Generate(1, 0, (first,)), ProgressReported(1, ((first, 8),)), OutputsLost((first,))):
        versions.observe(record)
    assert versions.num_kept_tokens == 7, "it has continued"
