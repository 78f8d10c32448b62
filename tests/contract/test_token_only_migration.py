"""Requests migrate without KV between servers and DORA's own engines, and one engine owns them at any time.

The servers are fakes. `real_servers.py` checks the tokens that real ones generate.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.contract.fleet import MAX_POLLS, NUM_PROMPT, REQUEST, Fleet

from dora.core.types import Chunk
from dora.data.tokenizer import save_character_tokenizer
from dora.engine.engine import Engine
from dora.engine.messages import ExportFailed, ExportFinished, ImportFailed, ImportFinished, MigrationReply
from dora.engine.request import EngineError
from dora.model.weights import weight_digest
from dora.testing import CONFIG, make_request, version_weights
from dora.testing.engine_contract import CHARACTERS, MAX_CONTEXT, MAX_ROWS, POLL_S


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with closing(Fleet(tmp_path)) as fleet:
        yield fleet


def native_engine(folder: Path) -> Engine:
    engine = Engine(
        CONFIG,
        kernels="eager",
        pool=folder / "pool",
        max_rows=MAX_ROWS,
        max_context=MAX_CONTEXT,
        version_slots=1,
    )
    engine.load(0, version_weights(0))
    return engine


def test_a_request_migrates_from_one_server_to_another(fleet: Fleet) -> None:
    """The second server continues it, with max_tokens reduced by the tokens that it has."""
    source, destination = fleet.source(), fleet.engine()
    replies = fleet.driver.migrate(REQUEST, source, destination)
    (imported,) = (reply for reply in replies if isinstance(reply, ImportFinished))
    assert (imported.num_tokens, imported.num_bytes, imported.num_prefilled) == (1, 0, NUM_PROMPT)
    assert ExportFinished(imported.migration_id) in replies
    assert source.progress() == {}
    answer = fleet.driver.finish(destination, REQUEST)
    (call,) = fleet.servers[1].generate_calls
    assert call["token_ids"] == [*REQUEST.prompt_ids, *answer.token_ids[:1].tolist()]
    assert call["sampling_params"]["max_tokens"] == 29
    assert len(answer.token_ids) == len(answer.logprobs) == len(answer.raw_logprobs) == 30
    assert answer.chunks == (Chunk(0, weight_digest(version_weights(0)), 30),)
    source.drop(0)


def test_a_request_migrates_from_a_server_to_doras_own_engine_and_on(fleet: Fleet) -> None:
    source, native, last = fleet.source(), native_engine(fleet.folder), fleet.engine()
    fleet.driver.migrate(REQUEST, source, native)
    begun = native.progress()
    for _ in range(5):
        fleet.driver.step(native)
    native.check()
    replies = fleet.driver.migrate(REQUEST, native, last)
    assert begun == {REQUEST.id: 1}
    (imported,) = (reply for reply in replies if isinstance(reply, ImportFinished))
    assert imported.num_tokens > 5
    assert native.is_idle
    native.check()
    answer = fleet.driver.finish(last, REQUEST)
    assert len(answer.token_ids) == len(answer.logprobs) == 30
    assert answer.chunks == (Chunk(0, weight_digest(version_weights(0)), 30),)


def test_a_prompt_that_siblings_have_cached_is_not_prefilled_again(fleet: Fleet) -> None:
    prompt_ids = tuple(i % CONFIG.vocab_size for i in range(33))
    sibling, migrating = (make_request(n, prompt_ids=prompt_ids, max_tokens=20) for n in (1, 0))
    source, native = fleet.engine(holds=True), native_engine(fleet.folder)
    native.submit([sibling])
    fleet.driver.step(native)
    source.submit([migrating])
    fleet.driver.step_until_first_token(source, migrating)
    replies = fleet.driver.migrate(migrating, source, native)
    assert [reply.num_prefilled for reply in replies if isinstance(reply, ImportFinished)] == [33 - 32]
    native.check()
    assert len(fleet.driver.finish(native, migrating).token_ids) == 20


def test_a_cancelled_migration_leaves_the_request_at_its_source(fleet: Fleet) -> None:
    """The source has halted the request: it prefills it again and counts the tokens."""
    source, destination = fleet.source(), fleet.engine()
    fleet.export(source, destination)
    assert source.progress() == {}, "another engine may own it"
    source.cancel_migration(1)
    destination.cancel_migration(1)
    assert fleet.driver.poll(source) == [ExportFailed(1, "the migration was cancelled")]
    assert fleet.driver.poll(destination) == [ImportFailed(1, "the migration was cancelled")]
    assert source.progress() == {REQUEST.id: 1}
    assert source.num_recomputed == NUM_PROMPT + 1
    fleet.servers[0].clear_faults()
    assert len(fleet.driver.finish(source, REQUEST).token_ids) == 30
    destination.drop(0)


def test_a_request_that_finishes_while_it_is_halted_is_answered_by_its_source(fleet: Fleet) -> None:
    """The abort reaches the server too late."""
    source, destination = fleet.source(), fleet.engine()
    assert fleet.driver.start(REQUEST, source, destination) == []
    fleet.servers[0].faults["ignored_aborts"] = 1
    assert fleet.driver.poll(source) == []
    fleet.servers[0].clear_faults()
    replies: list[MigrationReply] = []
    while not replies:
        replies += fleet.driver.poll(source)
    assert replies == [ExportFailed(1, "the request finished before it was exported")]
    assert len(fleet.driver.finish(source, REQUEST).token_ids) == 30
    assert not source.can_step


def test_a_halted_request_whose_text_has_ended_is_not_continued(fleet: Fleet) -> None:
    """A stop string is complete before the server obeys the abort; then the migration is cancelled."""
    save_character_tokenizer(fleet.folder / "model", CHARACTERS)
    request = make_request(0, max_tokens=30, stop_strings=("l",))  # of the text "jklm..."
    source = fleet.engine(event_interval_s=0.1, holds_after=2, ignored_aborts=9)
    destination = fleet.engine()
    source.submit([request])
    fleet.driver.step_until_first_token(source, request)
    assert fleet.driver.start(request, source, destination) == []
    for _ in range(MAX_POLLS):
        assert fleet.driver.poll(source) == []
        if source.progress()[request.id] > 1:
            break
        threading.Event().wait(POLL_S)
    source.cancel_migration(1)
    assert fleet.driver.poll(source) == [ExportFailed(1, "the migration was cancelled")]
    fleet.servers[0].clear_faults()
    answer = fleet.driver.finish(source, request)
    assert "".join(CHARACTERS[token] for token in answer.token_ids) == "jkl"
    assert (answer.finish_reason, len(fleet.servers[0].generate_calls)) == ("stop", 1)


def test_the_end_of_an_episode_ends_its_migration(fleet: Fleet) -> None:
    episode = make_request(0, max_tokens=30, max_turn_tokens=1)
    source, destination = fleet.engine(), fleet.engine()
    source.submit([episode])
    for _ in range(MAX_POLLS):
        fleet.driver.step(source)
        if source.pop_finished_turns():
            break
    assert fleet.driver.start(episode, source, destination) == []
    assert fleet.driver.poll(source) == [], "it migrates when it continues"
    source.end_episode(episode.id)
    failed = ExportFailed(1, "the request finished before it was exported")
    assert fleet.driver.poll(source) == [failed]
    assert len(fleet.driver.finish(source, episode).token_ids) == 1


def test_an_engine_with_other_weights_rejects_the_import(fleet: Fleet) -> None:
    """C1: a version number with other bytes is another version."""
    source, destination = fleet.source(), fleet.engine(version=1)
    assert fleet.driver.start(REQUEST, source, destination) == []
    replies: list[MigrationReply] = []
    while not replies:
        replies = fleet.driver.poll(source) + fleet.driver.poll(destination)
    (reply,) = replies
    assert isinstance(reply, ImportFailed)
    assert "weight_digest" in reply.reason


def test_a_request_that_is_aborted_during_its_export_is_gone(fleet: Fleet) -> None:
    source, destination = fleet.source(), fleet.engine()
    fleet.export(source, destination)
    assert source.abort([REQUEST.id]) == {REQUEST.id: 1}
    assert fleet.driver.poll(source) == [ExportFailed(1, "the request was aborted")]
    assert not source.can_step
    destination.cancel_migration(1)
    assert fleet.driver.poll(destination) == [ImportFailed(1, "the migration was cancelled")]


def test_a_source_cannot_abort_a_request_that_was_imported(fleet: Fleet) -> None:
    source, destination = fleet.source(), fleet.engine()
    assert fleet.driver.start(REQUEST, source, destination) == []
    while not destination.progress():
        fleet.driver.poll(source)
        fleet.driver.poll(destination)
    assert source.abort([REQUEST.id]) == {}
    assert fleet.driver.poll(source) == [ExportFinished(1)]
    assert destination.abort([REQUEST.id]) == {REQUEST.id: 1}


def test_an_engine_without_a_free_row_rejects_an_import(fleet: Fleet) -> None:
    source, destination = fleet.engine(holds=True), fleet.engine(holds=True)
    destination.submit([make_request(number) for number in range(1, 1 + MAX_ROWS)])
    source.submit([REQUEST])
    assert fleet.driver.start(REQUEST, source, destination) == [
        ImportFailed(1, f"all {MAX_ROWS} rows are in use")
    ]


def test_a_version_with_a_reserved_import_cannot_be_dropped(fleet: Fleet) -> None:
    source, destination = fleet.engine(holds=True), fleet.engine(holds=True)
    source.submit([REQUEST])
    assert fleet.driver.start(REQUEST, source, destination) == []
    with pytest.raises(EngineError, match="unfinished"):
        destination.drop(0)
