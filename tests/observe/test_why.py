"""The life of a request is told in the order in which it happened, to its end or to where it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.observe.recording import record_run
from tests.observe.story import DIGEST, FIRST, GIVEN_UP, REFUSED, SECOND, TRAINED, TURNS, write_story

from dora.core.actions import Admit, BeginEvaluation
from dora.core.events import RequestFinished
from dora.core.records import Chunk, RequestId
from dora.errors import InputError
from dora.observe import why
from dora.observe.journal import Line, read_journal
from dora.sim.models import draw_config

LIFE_OF_FIRST = """
admitted at version 0, position 1 of the data, to be trained by step 1; step 1 was being filled
placed on engine 1
begins to move from engine 1 to engine 0 (level running)
the move to engine 0 failed (no free block); it stays on engine 1
begins to move from engine 1 to engine 0 (level running)
moved from engine 1 to engine 0 (level running) with 5 tokens: 2.000 MB of KV copied in 4.0 ms, it stood still for 3.0 ms
decodes alone, for the trainer waits
all rows of its engine decode again
begins to move from engine 0 to engine 2 (drain)
moved from engine 0 to engine 2 (drain) with 7 tokens: 2.000 MB of KV copied in 4.0 ms, it stood still for 3.0 ms
step 1 waits for it
stands still: engine 2 gives way to the trainer
decodes again on engine 2
finished on engine 2: 9 tokens, stop
scored: reward 1
committed to step 1, staleness 0
training of step 1 begins, on it with staleness 0
step 1 failed (out of memory) and changed nothing; it is repeated
training of step 1 begins, on it with staleness 0
trained in step 1
"""  # noqa: E501


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_story(tmp_path_factory.mktemp("why") / "run")


def sentences(run: Path, request: RequestId) -> list[str]:
    return [sentence for _, sentence in why.life(read_journal(run), request)]


def test_a_request_that_moved_tells_all_its_moves(story: Path) -> None:
    assert sentences(story, FIRST) == LIFE_OF_FIRST.strip().splitlines()


def test_times_are_those_of_the_journal(story: Path) -> None:
    times = [t_s for t_s, _ in why.life(read_journal(story), FIRST)]
    assert times == sorted(times)
    assert times[0] == 0.8


def test_a_lost_engine_is_named_as_why_it_began_again(story: Path) -> None:
    told = sentences(story, SECOND)
    lost = told.index("engine 1 was lost (killed); it begins again")
    assert told[lost + 1] == "placed on engine 2"
    assert told[-1] == "trained in step 1"


def test_the_end_of_a_failed_group_is_told_by_each_sibling(story: Path) -> None:
    assert sentences(story, REFUSED)[-2:] == ["refused by engine 0: too long", "its group failed: too long"]
    assert sentences(story, GIVEN_UP)[-3:] == [
        "to be given up on engine 0, for its group has failed",
        "its group failed: too long",
        "given up on engine 0",
    ]


def finish(request: RequestId, *segments: tuple[int, int]) -> RequestFinished:
    """Its tokens are drawn in segments of (version, tokens)."""
    chunks = tuple(Chunk(version, DIGEST, num_tokens) for version, num_tokens in segments)
    return RequestFinished(1, request, chunks[0].version, sum(c.num_tokens for c in chunks), chunks, "stop")


@pytest.mark.parametrize(
    ("segments", "told"),
    [
        ([(3, 9)], "9 tokens, stop"),
        ([(3, 1)], "1 token, stop"),
        ([(3, 4), (5, 1)], "5 tokens, stop; drawn by version 3 (4 tokens), then version 5 (1 token)"),
        ([(4, 2)], "2 tokens, stop; drawn by version 4 (2 tokens)"),
    ],
)
def test_segments_of_other_versions_are_told(segments: list[tuple[int, int]], told: str) -> None:
    lines = [Line(0, 0.0, Admit(TRAINED, 0, 3, 5)), Line(1, 0.1, finish(FIRST, *segments))]
    assert why.lives(lines, 1, [FIRST])[FIRST][1] == (0.1, f"finished on engine 1: {told}")


def test_a_held_out_answer_is_of_the_version_that_is_evaluated() -> None:
    request = RequestId(-4, 0, 0)
    lines = [Line(0, 0.0, BeginEvaluation(3)), Line(1, 0.1, finish(request, (3, 9)))]
    assert why.lives(lines, 1, [request])[request][1] == (0.1, "finished on engine 1: 9 tokens, stop")


@pytest.mark.parametrize(
    ("num_turns", "standing"),
    [
        (9, "pending: it is on engine 1"),
        (13, "pending: it is on engine 0"),
        (19, "pending: its group is not scored"),
        (21, "pending: step 1 is not trained"),
    ],
)
def test_where_the_record_ends_it_says_how_the_request_stands(
    tmp_path: Path, num_turns: int, standing: str
) -> None:
    assert sentences(write_story(tmp_path / "run", num_turns), FIRST)[-1] == standing


def test_a_group_is_told_sibling_by_sibling(story: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert why.main(story, str(TRAINED)) == 0
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("request")] == [
        "request 0/4/0",
        "request 0/4/1",
    ]
    assert "     0.800 s  admitted at version 0" in printed


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("0/9/1", "group 0/9 was not admitted in .*; 2 groups were, the last one was 0/4"),
        ("0/4/2", "the siblings of a group are 0 to 1"),
        ("0/4/-1", "the siblings of a group are 0 to 1"),
        ("four", "must read epoch/row/sibling"),
        ("4", "must read epoch/row/sibling"),
        ("0/4/1/1", "must read epoch/row/sibling"),
    ],
)
def test_an_unknown_request_is_refused(story: Path, name: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        why.main(story, name)


@pytest.mark.parametrize("num_turns", range(9, len(TURNS)))
def test_a_life_may_be_asked_for_at_any_fact(tmp_path: Path, num_turns: int) -> None:
    told = sentences(write_story(tmp_path / "run", num_turns), FIRST)
    assert told[0].startswith("admitted")
    assert told[-1].startswith("pending") == (num_turns < len(TURNS) - 1)


@pytest.mark.parametrize("seed", range(8))
def test_every_request_of_a_simulated_run_has_a_life(tmp_path: Path, seed: int) -> None:
    journal = read_journal(record_run(tmp_path / "run", draw_config(seed), seed, max_facts=400))
    finished = {line.record.request for line in journal.lines if isinstance(line.record, RequestFinished)}
    for request in sorted(finished)[:50]:
        told = [sentence for _, sentence in why.life(journal, request)]
        assert told[0].startswith("admitted at version ")
        assert told[1].startswith("placed on engine ")
        assert any(s.startswith(("finished on engine", "pending", "its group failed")) for s in told)
