"""The audit passes what is right and names the guarantee that a changed record breaks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.observe.recording import Record, record_run, tampered, tampered_samples

from dora.observe import audit
from dora.sim.models import draw_config

Change = Callable[[list[Record]], object]


def of(records: list[Record], kind: str, nth: int = 0) -> Record:
    """The nth record of a kind; -1 is the last."""
    return [record for record in records if record["kind"] == kind][nth]


def batch(records: list[Record], step: int) -> list[list[int]]:
    groups: list[list[int]] = of(records, "train", step)["groups"]
    return groups


def finish(records: list[Record], group: list[int]) -> Record:
    """The fact that a group's first sibling finished."""
    return next(r for r in records if r["kind"] == "request_finished" and r["request"] == [*group, 0])


# Each changes the list of records of a good journal in one way.


def mix_versions(records: list[Record]) -> None:
    fact = next(
        r for r in records if r["kind"] == "request_finished" and r["version"] > 0 and r["num_tokens"] > 1
    )
    (version, digest, num_tokens), *_ = fact["chunks"]
    fact["chunks"] = [[version - 1, of(records, "published", version - 1)["digest"], 1]]
    fact["chunks"] += [[version, digest, num_tokens - 1]]


def finish_on_another_version(records: list[Record]) -> None:
    """Version, digest and tokens fit together, but it is not the version of the group."""
    fact = next(r for r in records if r["kind"] == "request_finished" and r["version"] > 0)
    fact["version"] -= 1
    fact["chunks"] = [
        [fact["version"], of(records, "published", fact["version"])["digest"], fact["num_tokens"]]
    ]


def move_to_another_engine(records: list[Record]) -> None:
    fact = of(records, "request_finished")
    fact["engine"] = (fact["engine"] + 1) % 3


def forget_a_load(records: list[Record]) -> None:
    """The last one before a request finishes on that engine and version."""
    fact = of(records, "request_finished")
    place = (fact["engine"], fact["version"])
    before = records[: records.index(fact)]
    loads = [r for r in before if r["kind"] == "loaded" and (r["engine"], r["version"]) == place]
    records.remove(loads[-1])


def drop_under_a_request(records: list[Record]) -> None:
    fact = of(records, "request_finished", -1)
    drop = {"t_s": 0.0, "kind": "drop", "engine": fact["engine"], "version": fact["version"]}
    records.insert(records.index(fact), drop)


def replace_an_engine_that_is_there(records: list[Record]) -> None:
    of(records, "engine_joined", -1)["replaces"] = 99


def load_other_bytes(records: list[Record]) -> None:
    of(records, "loaded")["digest"] = "sim-ffffffff"


def sample_from_other_bytes(records: list[Record]) -> None:
    of(records, "request_finished")["chunks"][0][1] = "sim-ffffffff"


def publish_twice(records: list[Record]) -> None:
    records.append(of(records, "published") | {"digest": "sim-ffffffff"})


def count_a_token_twice(records: list[Record]) -> None:
    of(records, "request_finished")["num_tokens"] += 1


def lose_a_group(records: list[Record]) -> None:
    """The group of the last place of the last batch is never trained; another is, again."""
    batch(records, -1)[-1] = batch(records, 0)[0]


def shorten_a_batch(records: list[Record]) -> None:
    batch(records, 2).pop()


def train_in_two_batches(records: list[Record]) -> None:
    batch(records, 1)[0] = batch(records, 0)[0]


def repeat_a_group_in_its_batch(records: list[Record]) -> None:
    batch(records, 1)[0] = batch(records, 1)[1]


def train_a_filtered_group(records: list[Record]) -> None:
    batch(records, -1)[0] = of(records, "filter")["group"]


def fail_a_trained_group(records: list[Record]) -> None:
    records.append({"t_s": 0.0, "kind": "fail", "group": batch(records, 0)[0], "reason": "late"})


def skip_a_prompt(records: list[Record]) -> None:
    """The dataset's third prompt is never admitted; all later ones are."""
    admitted = [record for record in records if record["kind"] == "admit"]
    records.remove(admitted[2])


def leave_a_gap_in_the_cursor(records: list[Record]) -> None:
    for fact in [record for record in records if record["kind"] == "prompts_fetched"][1:]:
        fact["first_index"] += 1


def fetch_a_row_twice(records: list[Record]) -> None:
    groups = of(records, "prompts_fetched")["groups"]
    groups[1] = groups[0]


def fetch_from_the_wrong_epoch(records: list[Record]) -> None:
    of(records, "prompts_fetched")["groups"][0][0] += 1


def fetch_a_row_that_is_not_there(records: list[Record]) -> None:
    of(records, "prompts_fetched")["groups"][0][1] = 7


def admit_twice(records: list[Record]) -> None:
    admit = of(records, "admit", -1)
    records.append(admit | {"index": admit["index"] + 1})


def finish_twice(records: list[Record]) -> None:
    fact = of(records, "request_finished")
    records.insert(records.index(fact) + 1, dict(fact))


def forget_a_sibling(records: list[Record]) -> None:
    records.remove(finish(records, batch(records, 3)[0]))


def finish_after_the_batch(records: list[Record]) -> None:
    fact = finish(records, batch(records, 3)[0])
    records.remove(fact)
    records.append(fact)


def lose_a_reward(records: list[Record]) -> None:
    group = batch(records, 3)[0]
    next(r for r in records if r["kind"] == "group_scored" and r["group"] == group)["rewards"].pop()


def forget_a_step(records: list[Record]) -> None:
    records.remove(of(records, "trained", -1))


def train_without_order(records: list[Record]) -> None:
    records.append({"t_s": 0.0, "kind": "trained", "step": 8})


def train_too_late(records: list[Record]) -> None:
    """Groups of the first and of the last batch change their places."""
    first, last = batch(records, 0), batch(records, -1)
    first[0], last[0] = last[0], first[0]


def promise_more_than_the_bound(records: list[Record]) -> None:
    of(records, "admit")["deadline"] += 1


def promise_less_than_was_kept(records: list[Record]) -> None:
    """The bound was lower when the group was admitted, and it is trained as late as ever."""
    group = batch(records, 1)[0]
    admit = next(r for r in records if r["kind"] == "admit" and r["group"] == group)
    admit["deadline"] = 0


CHANGES: list[tuple[Change, str, str]] = [
    (mix_versions, "C1", "was sampled from"),
    (finish_on_another_version, "C1", "its group has"),
    (move_to_another_engine, "C1", "it was given to engine"),
    (forget_a_load, "C1", "holds"),
    (drop_under_a_request, "C1", "holds"),
    (replace_an_engine_that_is_there, "C1", "replaces engine 99, which was not lost"),
    (load_other_bytes, "C1", "published is"),
    (sample_from_other_bytes, "C1", "was sampled from"),
    (publish_twice, "C1", "published twice"),
    (count_a_token_twice, "C1", "its chunks have"),
    (lose_a_group, "C2", "has no end"),
    (shorten_a_batch, "C2", "has 2 groups, not 3"),
    (train_in_two_batches, "C2", "was already in a batch"),
    (repeat_a_group_in_its_batch, "C2", "was already in a batch"),
    (train_a_filtered_group, "C2", "was already filtered"),
    (fail_a_trained_group, "C2", "was already in a batch"),
    (skip_a_prompt, "C2", "the next was 2"),
    (leave_a_gap_in_the_cursor, "C2", "were fetched, the next was"),
    (fetch_a_row_twice, "C2", "expected a new row"),
    (fetch_from_the_wrong_epoch, "C2", "expected a new row"),
    (fetch_a_row_that_is_not_there, "C2", "expected a new row"),
    (admit_twice, "C2", "was admitted twice"),
    (finish_twice, "C2", "finished twice"),
    (forget_a_sibling, "C2", "is in a batch and has not finished"),
    (finish_after_the_batch, "C2", "is in a batch and has not finished"),
    (lose_a_reward, "C2", "is in a batch with 1 of 2 rewards"),
    (forget_a_step, "C2", "the run stopped after 7 of 8 steps"),
    (train_without_order, "C2", "the step ordered and due was"),
    (promise_more_than_the_bound, "C3", "got the deadline"),
    (promise_less_than_was_kept, "C3", "after its deadline 1"),
    (train_too_late, "C3", "staleness 7, bound 2"),
    (train_too_late, "C3", "staleness -"),
]
# Each changes one sample of a trained group.
ONE = "where trained_step = 3 and sibling = 0"
SAMPLE_CHANGES = [
    (f"delete from samples {ONE}", "C2", "is not in the sample store"),
    ("delete from samples where state = 'failed'", "C2", "finished and is not in the sample store"),
    (f"update samples set token_ids = substr(token_ids, 5) {ONE}", "C1", "its sample stores"),
    (f"update samples set logprobs = substr(logprobs, 2) {ONE}", "C1", "log-probs"),
    (f"update samples set loss_mask = x'0100' {ONE}", "C1", "its sample says of 2 whether they were drawn"),
    (f"update samples set version = version + 1 {ONE}", "C1", "is stored as sampled from"),
    (f"update samples set weight_digest = 'sim-ffffffff' {ONE}", "C1", "is stored as sampled from"),
    (f"update samples set reward = null {ONE}", "C2", "its sample says None"),
    (f"update samples set reward = 0.5 {ONE}", "C2", "its sample says 0.5"),
    (f"update samples set trained_step = 4 {ONE}", "C2", "was trained in step 4"),
    (f"update samples set state = 'scored' {ONE}", "C2", "was trained in step 4"),
    ("update samples set trained_step = 4, state = 'trained' where state = 'failed'", "C2", "does not know"),
    ("update samples set sibling = 2 where trained_step = 3 and sibling = 1", "C2", "does not know"),
]


def test_a_good_run_passes(good_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = audit.check(good_run)
    assert verdict.findings == ()
    assert min(verdict.counts.trained, verdict.counts.filtered, verdict.counts.failed) > 0
    assert audit.main(good_run) == 0
    assert [line[:5] for line in capsys.readouterr().out.splitlines()] == ["C1 ok", "C2 ok", "C3 ok"]


def test_a_run_stopped_early_passes_and_counts_what_is_pending(early_run: Path) -> None:
    counts = audit.check(early_run).counts
    assert audit.main(early_run) == 0
    assert counts.pending > 0
    assert counts.admitted == counts.trained + counts.filtered + counts.failed + counts.pending


@pytest.mark.parametrize("max_facts", [0, 1, 5, 20, 60])
def test_a_run_may_be_stopped_at_any_fact(tmp_path: Path, max_facts: int) -> None:
    assert audit.main(record_run(tmp_path / "run", draw_config(7), 7, max_facts)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_many_kinds_pass(tmp_path: Path, seed: int) -> None:
    assert audit.check(record_run(tmp_path / "run", draw_config(seed), seed)).findings == ()


@pytest.mark.parametrize(
    ("change", "guarantee", "words"), CHANGES, ids=[f"{c.__name__}: {words}" for c, _, words in CHANGES]
)
def test_a_changed_journal_breaks_its_guarantee(
    good_run: Path, tmp_path: Path, change: Change, guarantee: str, words: str
) -> None:
    run = tampered(good_run, tmp_path / "run", change)
    assert any(words in finding for finding in audit.check(run).against(guarantee))
    assert audit.main(run) == 1


@pytest.mark.parametrize(("sql", "guarantee", "words"), SAMPLE_CHANGES)
def test_a_changed_sample_breaks_its_guarantee(
    good_run: Path, tmp_path: Path, sql: str, guarantee: str, words: str
) -> None:
    verdict = audit.check(tampered_samples(good_run, tmp_path / "run", sql))
    assert any(words in finding for finding in verdict.against(guarantee))
    assert verdict.findings == tuple(verdict.against(guarantee))


def test_the_guarantees_are_judged_apart(good_run: Path, tmp_path: Path) -> None:
    verdict = audit.check(tampered(good_run, tmp_path / "run", load_other_bytes))
    assert (verdict.c1, verdict.c2, verdict.c3) == (False, True, True)


def test_a_group_without_end_is_no_loss_in_a_run_stopped_early(early_run: Path, tmp_path: Path) -> None:
    def forget_the_last_end(records: list[Record]) -> None:
        records.remove(of(records, "fail", -1))

    verdict = audit.check(tampered(early_run, tmp_path / "run", forget_the_last_end))
    assert verdict.c2
    assert verdict.counts.pending == audit.check(early_run).counts.pending + 1


def test_only_the_first_findings_are_printed(
    good_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit.main(tampered_samples(good_run, tmp_path / "run", "update samples set weight_digest = 'other'"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("C1 VIOLATED")
    assert lines[6].startswith("   and ")
    assert lines[6].endswith(" more")
    assert [line[:5] for line in lines[7:]] == ["C2 ok", "C3 ok"]
