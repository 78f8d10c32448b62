"""A run of two lives is one record: audit, replay and why read it so, and notice changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.observe.recording import Record, RecordedWorld, tampered, world_config

from dora.core.events import Resumed, Trained
from dora.core.orchestrator import Orchestrator
from dora.core.records import Member
from dora.core.state import State
from dora.observe import audit, replay, why
from dora.observe.journal import read_journal
from dora.runtime.drive import drive
from dora.runtime.journal import Journal
from dora.stream.samples import SampleStore

Change = Callable[[list[Record]], object]
FROM_STEP, NUM_REDONE = 3, 2


@pytest.fixture(scope="module")
def two_lives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything dies after five steps, and goes on after three of them."""
    folder, config = tmp_path_factory.mktemp("lives") / "run", world_config()
    folder.mkdir()
    store = SampleStore(folder / "samples.sqlite")
    journal = Journal(folder / "journal.jsonl", config.limits, "digest of no file", config.num_prompts)
    core, world = Orchestrator(config.limits), RecordedWorld(config, 0, store, None)
    state, batches = core.snapshot(), list[tuple[Member, ...]]()
    orders = core.start(world.now)
    journal.record(world.now, None, orders)
    while state.num_trained < (FROM_STEP + NUM_REDONE) * config.limits.batch_size:
        for order in orders:
            world.perform(order)
        event = world.next_fact(core.next_wakeup())
        assert event is not None
        if isinstance(event, Trained):
            batches.append(batch_of(state, event.step))
        orders = core.handle(event, world.now)
        journal.record(world.now, event, orders)
    world.die(state.next_index, FROM_STEP)
    kept = tuple((v, digest) for v, digest in state.store.items() if v < FROM_STEP)
    drive(core, world, journal.record, Resumed(FROM_STEP, kept, tuple(batches[FROM_STEP:])))
    journal.close()
    store.close()
    return folder


def batch_of(state: State, step: int) -> tuple[Member, ...]:
    groups = [state.groups[group] for group in state.batches[step]]
    return tuple(Member(group.id, group.index, group.version) for group in groups)


def test_two_lives_are_one_run(two_lives: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = audit.check(two_lives)
    assert verdict.findings == ()
    assert (verdict.counts.pending, verdict.counts.trained) == (0, 8 * 3)
    assert replay.first_difference(read_journal(two_lives)) is None
    assert replay.main(two_lives) == 0
    assert "replay agrees" in capsys.readouterr().out


def test_why_tells_that_a_step_was_redone(two_lives: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = read_journal(two_lives)
    (resumed,) = (line.record for line in journal.lines if isinstance(line.record, Resumed))
    why.main(two_lives, f"{resumed.redone[0][0].group}/0")
    told = capsys.readouterr().out
    assert f"the run was resumed after {FROM_STEP} steps; step {FROM_STEP + 1} is redone" in told
    assert told.count(f"trained in step {FROM_STEP + 1}\n") == 2
    begun_again = {request for request in requests_under_way(two_lives)}
    why.main(two_lives, begun_again.pop())
    assert "the run was resumed; it begins again" in capsys.readouterr().out


def requests_under_way(run: Path) -> list[str]:
    """Requests that had an engine when everything died."""
    core, journal = Orchestrator(read_journal(run).limits), read_journal(run)
    for fact, orders in replay.turns(journal.lines):
        if fact is None:
            core.start(orders[0].t_s)
            continue
        if isinstance(fact.record, Resumed):
            break
        core.handle(fact.record, fact.t_s)  # type: ignore[arg-type]
    return [str(request) for request, q in core.snapshot().requests.items() if q.engine is not None]


def after(records: list[Record], kind: str, nth: int = 0) -> Record:
    """The nth record of a kind in the second life."""
    (resumed,) = (number for number, record in enumerate(records) if record["kind"] == "resumed")
    return [record for record in records[resumed:] if record["kind"] == kind][nth]


def redo_other_groups(records: list[Record]) -> None:
    after(records, "train")["groups"] = after(records, "train", 1)["groups"]


def skip_a_step(records: list[Record]) -> None:
    records.remove(after(records, "train"))


def go_on_from_other_weights(records: list[Record]) -> None:
    after(records, "published")["digest"] = "0" * 32


def keep_other_weights(records: list[Record]) -> None:
    after(records, "resumed")["kept"].append([FROM_STEP - 1, "0" * 32])


def go_on_from_later(records: list[Record]) -> None:
    after(records, "resumed")["from_step"] = 7


def generate_on_an_engine_of_the_first_life(records: list[Record]) -> None:
    records.remove(after(records, "loaded"))


CHANGES: list[tuple[Change, str, str]] = [
    (redo_other_groups, "C2", "redoes a void one with another number or other groups"),
    (skip_a_step, "C2", "redoes a void one with another number or other groups"),
    (go_on_from_other_weights, "C1", "version 3 was published as "),
    (keep_other_weights, "C1", "is kept as 00000000"),
    (go_on_from_later, "C2", "the run went on after 7 steps and had trained 5"),
    (generate_on_an_engine_of_the_first_life, "C1", "engine 0 holds"),
]


@pytest.mark.parametrize(
    ("change", "guarantee", "words"), CHANGES, ids=[f"{c.__name__}: {words}" for c, _, words in CHANGES]
)
def test_a_changed_second_life_breaks_its_guarantee(
    two_lives: Path, tmp_path: Path, change: Change, guarantee: str, words: str
) -> None:
    found = audit.check(tampered(two_lives, tmp_path / "run", change)).against(guarantee)
    assert any(words in finding for finding in found), found


def test_weights_that_were_redone_may_round_differently(two_lives: Path, tmp_path: Path) -> None:
    """Both digests are in the record; each answer is from the one that its engine had."""

    def round_differently(records: list[Record]) -> None:
        (start,) = (number for number, record in enumerate(records) if record["kind"] == "resumed")
        old = after(records, "published", 1)["digest"]
        for record in records[start + 1 :]:
            if record.get("digest") == old:
                record["digest"] = "0" * 32
            for chunk in record.get("chunks", ()):
                chunk[1] = "0" * 32 if chunk[1] == old else chunk[1]

    found = audit.check(tampered(two_lives, tmp_path / "run", round_differently))
    assert [finding for finding in found.findings if "stored" not in finding] == []
