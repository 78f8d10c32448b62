"""A migrated request generates the same answer as one that stays."""

from itertools import count
from pathlib import Path

import pytest
from tests.engine.engine_cluster import EngineCluster
from tests.engine.tiny import TINY, make_engine, make_request, output_tokens, run

from dora.engine import block_manager
from dora.engine.kv_transfer import handoff, transfer
from dora.engine.kv_transfer.handoff import Handoff
from dora.engine.messages import ExportFailed, ExportFinished, ImportFailed, ImportFinished
from dora.engine.request import EngineError

BLOCK_BYTES = TINY.kv_bytes_per_token * 16


@pytest.mark.parametrize("num_steps", range(1, 18))
def test_a_request_migrates_at_any_offset_in_a_block_with_bitwise_equal_answers(
    cluster: EngineCluster, num_steps: int
) -> None:
    migrating = make_request(1, max_tokens=40)
    source, destination = cluster.begin(migrating, num_steps)
    imported = cluster.migrate(migrating, "a", "b")
    num_computed = len(migrating.prompt_ids) + num_steps - 1
    assert imported.num_tokens == num_steps
    assert imported.num_bytes == -(-num_computed // 16) * BLOCK_BYTES
    assert source.is_idle
    assert destination.num_prefilled == 0
    cluster.check_bits(migrating)  # alone on both engines
    assert len(cluster.finished[migrating.id].chunks) == 1


@pytest.mark.parametrize("prompt_length", [1, 15, 16, 17, 18, 32, 33])
def test_prompts_on_either_side_of_a_block_boundary_migrate(
    cluster: EngineCluster, prompt_length: int
) -> None:
    migrating = make_request(1, prompt_length=prompt_length)
    cluster.begin(migrating)
    cluster.migrate(migrating, "a", "b")
    cluster.check_bits(migrating)


def test_migrated_siblings_share_their_prompt_again(cluster: EngineCluster) -> None:
    siblings = [make_request(i, prompt_length=37) for i in range(4)]
    cluster.add_engine("a").submit(siblings)
    destination = cluster.add_engine("b")
    cluster.step("a", 6)
    first = cluster.migrate(siblings[1], "a", "b")
    second = cluster.migrate(siblings[3], "a", "b")
    assert (first.num_bytes, second.num_bytes) == (3 * BLOCK_BYTES, 1 * BLOCK_BYTES)
    cluster.check_answers(siblings)
    assert destination.num_prefilled == 0


def test_blocks_that_the_destination_has_cached_are_not_copied(cluster: EngineCluster) -> None:
    siblings = [make_request(i, prompt_length=37) for i in range(2)]
    for name, sibling in zip("ab", siblings, strict=True):
        cluster.add_engine(name).submit([sibling])
        cluster.step(name, 3)
    assert cluster.migrate(siblings[0], "a", "b").num_bytes == BLOCK_BYTES
    cluster.check_answers(siblings)


def test_requests_that_migrate_at_once_share_a_small_staging_area(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each needs most of the 8 blocks of the area. One that finds no room is decoded meanwhile."""
    monkeypatch.setattr(block_manager, "_STAGING_BYTES", 0)
    stage = EngineCluster(tmp_path, kv_transfer="staged")
    requests = [make_request(4 * i, prompt_length=60, max_tokens=36) for i in range(3)]
    stage.add_engine("a").submit(requests)
    destination = stage.add_engine("b")
    stage.step("a", 6)
    migrations = [stage.start_migration(request, "a", "b") for request in requests]
    for name in "baba":
        stage.poll(name)
    assert [stage.is_imported(migration) for migration in migrations].count(True) in (1, 2)
    stage.check_answers(requests)
    assert all(isinstance(stage.reply_of("b", each), ImportFinished) for each in migrations)
    assert destination.num_prefilled == 0


@pytest.mark.parametrize("period", range(1, 6))
def test_staged_blocks_that_are_copied_while_the_source_polls_are_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, period: int
) -> None:
    """The destination, another process, may copy a block after any read of their number by the source."""
    for name in ("_MAX_STOPPED_BYTES", "_BYTES_PER_POLL"):
        monkeypatch.setattr(transfer, name, 0)
    cluster, migrating = EngineCluster(tmp_path, kv_transfer="staged"), make_request(1, max_tokens=90)
    cluster.begin(migrating, 70)
    reads = count()

    class ConcurrentHandoff(Handoff):
        @property
        def num_copied(self) -> int:
            num_copied = super().num_copied
            if next(reads) % period == 1 % period:
                cluster.poll("b")
            return num_copied

    monkeypatch.setattr(handoff, "Handoff", ConcurrentHandoff)
    migration_id = cluster.start_migration(migrating, "a", "b")
    for _ in range(50):
        cluster.poll("a")
    assert cluster.reply_of("a", migration_id) == ExportFinished(migration_id)
    cluster.check_bits(migrating)


def test_a_request_may_migrate_several_times_and_return(cluster: EngineCluster) -> None:
    migrating = make_request(1, max_tokens=40)
    for name in "abc":
        cluster.add_engine(name)
    cluster.engines["a"].submit([migrating])
    cluster.step("a", 4)
    for source, destination, num_steps in (("a", "b", 7), ("b", "c", 1), ("c", "b", 9), ("b", "a", 0)):
        cluster.migrate(migrating, source, destination)
        cluster.step(destination, num_steps)
    cluster.migrate(migrating, "a", "c")
    cluster.check_bits(migrating)


def test_a_request_may_return_before_its_source_has_polled_the_import(cluster: EngineCluster) -> None:
    migrating = make_request(1)
    cluster.begin(migrating, 4)
    outward = cluster.start_migration(migrating, "a", "b")
    for name in "abab":
        cluster.poll(name)
    inward = cluster.start_migration(migrating, "b", "a")
    cluster.check_bits(migrating)
    assert (cluster.reply_of("a", outward), cluster.reply_of("b", inward)) == (
        ExportFinished(outward),
        ExportFinished(inward),
    )


def test_a_request_migrates_with_one_token_left_to_generate(cluster: EngineCluster) -> None:
    migrating = make_request(1, max_tokens=20)
    cluster.begin(migrating, 19)
    cluster.migrate(migrating, "a", "b")
    assert migrating.id not in cluster.finished
    cluster.step("b")
    cluster.check_bits(migrating)


@pytest.mark.parametrize(("prompt_length", "num_steps"), [(14, 19), (16, 17), (20, 13)])
@pytest.mark.parametrize("is_busy", [False, True])
def test_a_request_whose_blocks_are_full_gets_another_one_before_it_decodes(
    cluster: EngineCluster, prompt_length: int, num_steps: int, is_busy: bool
) -> None:
    """It has one token left or more, and may join the batch together with another request."""
    migrating = make_request(1, prompt_length=prompt_length, max_tokens=20)
    _, destination = cluster.begin(migrating, num_steps)
    others = [make_request(i, prompt_length=17, max_tokens=40) for i in (4, 8)] if is_busy else []
    destination.submit(others[:1])
    cluster.step("b", 5)
    cluster.migrate(migrating, "a", "b")
    destination.submit(others[1:])
    cluster.check_answers([migrating, *others])


def test_a_request_that_finishes_before_its_export_stays(cluster: EngineCluster) -> None:
    migrating = make_request(1, max_tokens=20)
    cluster.begin(migrating, 19)
    migration_id = cluster.start_migration(migrating, "a", "b")
    cluster.poll("a")
    cluster.step("a")
    cluster.poll("a")
    assert cluster.reply_of("a", migration_id) == ExportFailed(
        migration_id, "the request finished before it was exported"
    )
    cluster.engines["b"].cancel_migration(migration_id)
    cluster.check_bits(migrating)
    assert cluster.reply_of("b", migration_id) == ImportFailed(migration_id, "the migration was cancelled")


def test_requests_of_two_versions_migrate_in_both_directions_between_busy_engines(
    cluster: EngineCluster,
) -> None:
    requests = [make_request(i, version=i % 2, max_tokens=30) for i in range(12)]
    for name, own in (("a", requests[:6]), ("b", requests[6:])):
        cluster.add_engine(name, versions=(0, 1) if name == "a" else (1, 0), max_rows=12).submit(own)
    for number in range(6):
        cluster.step("a", 1 + number % 3)
        cluster.step("b")
        cluster.start_migration(requests[number], "a", "b")
        cluster.start_migration(requests[11 - number], "b", "a")
        for name in "ab":
            cluster.poll(name)
            cluster.step(name)
    cluster.check_answers(requests)
    assert sum(isinstance(reply, ImportFinished) for _, reply in cluster.replies) == 12


def test_the_source_decodes_on_while_full_blocks_are_copied(cluster: EngineCluster) -> None:
    migrating = make_request(1, max_tokens=60)
    cluster.begin(migrating, 40)
    cluster.start_migration(migrating, "a", "b")
    cluster.poll("a")
    cluster.step("a", 3)
    cluster.poll("b")
    assert cluster.engines["a"].progress() == {migrating.id: 43}
    cluster.poll("a")
    assert cluster.engines["a"].progress() == {}  # another engine may have imported it
    cluster.step("a", 3)
    cluster.poll("b")
    assert cluster.engines["b"].progress() == {migrating.id: 43}
    cluster.check_bits(migrating)


@pytest.mark.parametrize("num_steps", [1, 16, 17, 39])
def test_a_request_with_little_kv_stops_at_once_and_is_copied_by_one_poll(
    tmp_path: Path, num_steps: int
) -> None:
    cluster = EngineCluster(tmp_path)
    migrating = make_request(1, max_tokens=60)
    cluster.begin(migrating, num_steps)
    migration_id = cluster.start_migration(migrating, "a", "b")
    cluster.poll("a")
    cluster.poll("b")
    assert cluster.engines["b"].progress() == {migrating.id: num_steps}
    cluster.poll("a")
    assert cluster.reply_of("a", migration_id) == ExportFinished(migration_id)
    cluster.check_bits(migrating)


def test_a_waiting_request_migrates_as_soon_as_it_has_a_row(cluster: EngineCluster) -> None:
    requests = [make_request(i, max_tokens=5 + 10 * i) for i in range(2)]
    cluster.add_engine("a", max_rows=1).submit(requests)
    cluster.add_engine("b")
    migration_id = cluster.start_migration(requests[1], "a", "b")
    cluster.check_answers(requests)
    assert cluster.reply_of("a", migration_id) == ExportFinished(migration_id)


def test_stop_time_is_from_the_last_step_at_the_source_to_the_row_at_the_destination(
    cluster: EngineCluster,
) -> None:
    migrating = make_request(1)
    cluster.begin(migrating, 2)
    migration_id = cluster.start_migration(migrating, "a", "b")
    cluster.poll("a")
    cluster.now_s += 0.25
    cluster.poll("b")
    imported = cluster.reply_of("b", migration_id)
    assert isinstance(imported, ImportFinished)
    assert imported.stop_s == pytest.approx(0.25)


def test_a_version_with_a_reserved_import_cannot_be_dropped(cluster: EngineCluster) -> None:
    migrating = make_request(1)
    _, destination = cluster.begin(migrating)
    migration_id = cluster.reserve(migrating, "a", "b")
    with pytest.raises(EngineError, match="version 0 has 1 unfinished requests"):
        destination.drop(0)
    destination.cancel_migration(migration_id)
    cluster.poll("b")
    destination.drop(0)
    destination.check()


def test_a_version_may_be_dropped_as_soon_as_its_last_request_is_imported(cluster: EngineCluster) -> None:
    """The driver may get the destination's reply before the source polls."""
    migrating = make_request(1)
    source, _ = cluster.begin(migrating)
    migration_id = cluster.start_migration(migrating, "a", "b")
    cluster.poll("a")
    with pytest.raises(EngineError, match="unfinished"):
        source.drop(0)
    cluster.poll("b")
    source.drop(0)
    assert source.is_idle
    cluster.check_bits(migrating)
    assert cluster.reply_of("a", migration_id) == ExportFinished(migration_id)


def test_an_import_needs_a_free_row_a_loaded_version_and_a_request_that_is_elsewhere(
    cluster: EngineCluster,
) -> None:
    requests = [make_request(i) for i in range(3)]
    cluster.add_engine("a").submit(requests[:2])
    cluster.add_engine("b", max_rows=1).submit([requests[2]])
    cluster.add_engine("c", versions=(1,))
    for name in "ab":
        cluster.step(name)
    replies = [cluster.try_reserve(requests[0], "a", name) for name in "abc"]
    assert [reply.reason for reply in replies if isinstance(reply, ImportFailed)] == [
        "the engine has this request already",
        "no row is free, or too few KV blocks",
        "version 0 is not loaded; loaded: [1]",
    ]
    cluster.pool_path("c").unlink()
    cluster.add_engine("d")
    unreadable = cluster.try_reserve(requests[0], "c", "d")
    assert isinstance(unreadable, ImportFailed)
    assert "cannot be read" in unreadable.reason
    assert output_tokens(cluster.run_to_end()) == output_tokens(run(make_engine(cluster.kernels), requests))


def test_a_request_that_is_elsewhere_cannot_be_exported(cluster: EngineCluster) -> None:
    cluster.add_engine("b")
    migration_id = cluster.reserve(make_request(1), "b", "b")
    assert cluster.start_export(make_request(9), "b", migration_id) == ExportFailed(
        migration_id, "the request is not on this engine"
    )
