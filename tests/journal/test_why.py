"""A request's history lists what happened to it in order, up to its end or its current status."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.journal.recorded_runs import record_run
from tests.journal.story import ABORTED, DIGEST, EVENTS, FIRST, REJECTED, SECOND, TRAINED, write_story

from dora.core.actions import Action, Admit, Generate, StartEvaluation
from dora.core.events import EngineJoined, EngineLost, Event, OutputsLost, RequestFinished, Resumed
from dora.core.types import Chunk, RequestId
from dora.errors import InputError
from dora.journal import why
from dora.journal.reader import Journal, JournalLine, read_journal
from dora.sim.random_config import draw_world_config

HISTORY_OF_FIRST = """
admitted at version 0, dataset position 1, deadline step 1; the batch of step 1 was being filled
placed on engine 1
migration from engine 1 to engine 0 started (level running)
migration to engine 0 failed (no free block): stays on engine 1
migration from engine 1 to engine 0 started (level running)
migrated from engine 1 to engine 0 (level running) with 5 tokens: 2.000 MB of KV copied in 4.0 ms, paused for 3.0 ms
prioritised on engine 0: the trainer waits for its group
engine 0 decodes all its rows again
migration from engine 0 to engine 2 started (drain)
migrated from engine 0 to engine 2 (drain) with 7 tokens: 2.000 MB of KV copied in 4.0 ms, paused for 3.0 ms
step 1 waits for this request
paused: engine 2 yields its device to the trainer
resumed on engine 2
finished on engine 2: 9 tokens, stop
scored: reward 1
committed to the batch of step 1, staleness 0
training of step 1 started, staleness 0
step 1 failed (out of memory) and changed no weights: it is repeated
training of step 1 started, staleness 0
trained in step 1
"""  # noqa: E501


def history_in(journal: Journal, request: RequestId) -> why.History:
    return why.request_histories(journal.lines, journal.limits.batch_size, [request])[request]


def sentences(run: Path, request: RequestId) -> list[str]:
    return [sentence for _, sentence in history_in(read_journal(run), request)]


def test_a_request_that_migrated_lists_all_its_migrations(story_run: Path) -> None:
    assert sentences(story_run, FIRST) == HISTORY_OF_FIRST.strip().splitlines()


def test_times_are_those_of_the_journal(story_run: Path) -> None:
    times = [t_s for t_s, _ in history_in(read_journal(story_run), FIRST)]
    assert times == sorted(times)
    assert times[0] == 0.8


def test_a_lost_engine_is_named_as_the_reason_of_a_restart(story_run: Path) -> None:
    history = sentences(story_run, SECOND)
    lost = history.index("engine 1 was lost (killed): the request restarts")
    assert history[lost + 1] == "placed on engine 2"
    assert history[-1] == "trained in step 1"


def test_a_request_with_kept_tokens_continues_unless_these_are_lost() -> None:
    kept = ((FIRST, 7),)
    records: list[Event | Action] = [
        *(EngineJoined(engine, 2, 1) for engine in (1, 2)),
        Admit(TRAINED, 0, 0, 0),
        Generate(1, 0, (FIRST, SECOND)),
        EngineLost(1, "killed", kept),
        Generate(2, 0, (FIRST, SECOND)),
        OutputsLost((FIRST,)),
        Resumed(0, (), (), kept_tokens=kept),
    ]
    lines = [JournalLine(number, 0.0, record) for number, record in enumerate(records)]
    histories = why.request_histories(lines, 1, [FIRST, SECOND])
    assert [sentence for _, sentence in histories[FIRST][2:-1]] == [
        "engine 1 was lost (killed): the request continues after 7 tokens",
        "placed on engine 2",
        "its kept tokens are lost: the request restarts from its prompt",
        "the run was resumed: the request continues after 7 tokens",
    ]
    assert [sentence for _, sentence in histories[SECOND][2:-1]] == [
        "engine 1 was lost (killed): the request restarts",
        "placed on engine 2",
        "the run was resumed: the request restarts",
    ]


def test_each_sibling_lists_the_end_of_its_failed_group(story_run: Path) -> None:
    assert sentences(story_run, REJECTED)[-2:] == [
        "rejected by engine 0: too long",
        "its group failed: too long",
    ]
    assert sentences(story_run, ABORTED)[-3:] == [
        "abort requested on engine 0: its group has failed",
        "its group failed: too long",
        "aborted on engine 0",
    ]


def finish(request: RequestId, *segments: tuple[int, int]) -> RequestFinished:
    """Its tokens are sampled in segments of (version, tokens)."""
    chunks = tuple(Chunk(version, DIGEST, num_tokens) for version, num_tokens in segments)
    return RequestFinished(1, request, chunks[0].version, sum(c.num_tokens for c in chunks), chunks, "stop")


@pytest.mark.parametrize(
    ("segments", "description"),
    [
        ([(3, 9)], "9 tokens, stop"),
        ([(3, 1)], "1 token, stop"),
        ([(3, 4), (5, 1)], "5 tokens, stop; sampled by version 3 (4 tokens), then version 5 (1 token)"),
        ([(4, 2)], "2 tokens, stop; sampled by version 4 (2 tokens)"),
    ],
)
def test_segments_of_other_versions_are_listed(segments: list[tuple[int, int]], description: str) -> None:
    lines = [JournalLine(0, 0.0, Admit(TRAINED, 0, 3, 5)), JournalLine(1, 0.1, finish(FIRST, *segments))]
    history = why.request_histories(lines, 1, [FIRST])[FIRST]
    assert history[1] == (0.1, f"finished on engine 1: {description}")


def test_a_held_out_response_is_of_the_version_that_is_evaluated() -> None:
    request = RequestId(-4, 0, 0)
    lines = [JournalLine(0, 0.0, StartEvaluation(3)), JournalLine(1, 0.1, finish(request, (3, 9)))]
    history = why.request_histories(lines, 1, [request])[request]
    assert history[1] == (0.1, "finished on engine 1: 9 tokens, stop")


@pytest.mark.parametrize(
    ("num_events", "status"),
    [
        (9, "pending: on engine 1"),
        (13, "pending: on engine 0"),
        (19, "pending: its group is not scored yet"),
        (21, "pending: step 1 is not trained yet"),
    ],
)
def test_the_last_sentence_of_an_unfinished_request_is_its_status(
    tmp_path: Path, num_events: int, status: str
) -> None:
    assert sentences(write_story(tmp_path / "run", num_events), FIRST)[-1] == status


def test_a_group_is_printed_sibling_by_sibling(story_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    why.main(story_run, str(TRAINED))
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("request")] == [
        "request 0/4/0",
        "request 0/4/1",
    ]
    assert "     0.800 s  admitted at version 0" in printed


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("0/9/1", "group 0/9 was not admitted in .*, which has 2 groups, the last one is 0/4"),
        ("0/4/2", "the siblings of a group are 0 to 1"),
        ("0/4/-1", "the siblings of a group are 0 to 1"),
        ("four", "must read epoch/row/sibling"),
        ("4", "must read epoch/row/sibling"),
        ("0/4/1/1", "must read epoch/row/sibling"),
    ],
)
def test_an_unknown_request_is_rejected(story_run: Path, name: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        why.main(story_run, name)


@pytest.mark.parametrize("num_events", range(9, len(EVENTS)))
def test_a_history_can_be_read_after_any_event(tmp_path: Path, num_events: int) -> None:
    history = sentences(write_story(tmp_path / "run", num_events), FIRST)
    assert history[0].startswith("admitted")
    assert history[-1].startswith("pending") == (num_events < len(EVENTS) - 1)


@pytest.mark.parametrize("seed", range(8))
def test_every_request_of_a_simulated_run_has_a_history(tmp_path: Path, seed: int) -> None:
    journal = read_journal(record_run(tmp_path / "run", draw_world_config(seed), seed, max_events=400))
    finished = {line.record.request for line in journal.lines if isinstance(line.record, RequestFinished)}
    for request in sorted(finished)[:50]:
        history = [sentence for _, sentence in history_in(journal, request)]
        assert history[0].startswith("admitted at version ")
        assert history[1].startswith("placed on engine ")
        assert any(s.startswith(("finished on engine", "pending", "its group failed")) for s in history)
