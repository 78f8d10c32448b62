"""Faults at each step of a migration leave one owner, no leaked block and the same tokens."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.engine.engine_cluster import LEASE_S, EngineCluster
from tests.engine.tiny import TINY, make_engine, make_request, output_tokens, run, weights

from dora.core.types import RequestId
from dora.engine.kv_transfer import transfer
from dora.engine.kv_transfer.handoff import HandoffState, RequestSnapshot
from dora.engine.messages import ExportFailed, ExportFinished, ImportFailed, ImportFinished
from dora.engine.request import Request
from dora.model.weights import initial_weights

MIGRATING, NEIGHBOUR, HOST = (
    make_request(i, prompt_length=20 + i, max_tokens=30, group_size=1) for i in range(3)
)
EXPECTED = output_tokens(run(make_engine(), [MIGRATING, NEIGHBOUR, HOST]))
STEPS = ("reserve", "start export", "publish", "copy", "export", "import", "release")


def advance(cluster: EngineCluster, num_steps: int) -> int:
    """Migrate MIGRATING from a to b for the first `num_steps` of STEPS. Returns the migration's id."""
    cluster.add_engine("a").submit([MIGRATING, NEIGHBOUR])
    cluster.add_engine("b").submit([HOST])
    cluster.step("a", 16)
    cluster.step("b", 3)
    migration_id = cluster.reserve(MIGRATING, "a", "b")
    if num_steps > 1:
        assert cluster.start_export(MIGRATING, "a", migration_id) is None
    for name in "ababa"[: max(0, num_steps - 2)]:
        cluster.poll(name)
    reached = {5: HandoffState.EXPORTED, 6: HandoffState.IMPORTED, 7: HandoffState.IMPORTED}
    assert cluster.handoff(migration_id).state is reached.get(num_steps, HandoffState.RESERVED)
    return migration_id


def check_end(cluster: EngineCluster, migration_id: int, is_answered: bool = True) -> None:
    """Run all engines to the end: they agree about the migration and give the expected answers."""
    answers = output_tokens(cluster.run_to_end())
    is_imported = cluster.is_imported(migration_id)
    crashed = {name for name in "ab" if name not in cluster.engines}
    expected = {MIGRATING.id} if is_answered else set()
    expected |= {own.id for own, name in ((NEIGHBOUR, "a"), (HOST, "b")) if name not in crashed}
    assert answers == {request_id: EXPECTED[request_id] for request_id in expected}
    replies = [cluster.reply_of(name, migration_id) for name in "ab" if name not in crashed]
    kinds = {type(reply) for reply in replies if reply is not None}
    assert kinds <= ({ExportFinished, ImportFinished} if is_imported else {ExportFailed, ImportFailed})


def export_has_started(num_steps: int) -> bool:
    return num_steps > STEPS.index("start export")


def import_is_committed(num_steps: int) -> bool:
    return num_steps > STEPS.index("import")


@pytest.mark.parametrize("first", "ab")
@pytest.mark.parametrize("num_steps", range(1, len(STEPS) + 1))
def test_a_cancelled_migration_leaves_one_owner(cluster: EngineCluster, num_steps: int, first: str) -> None:
    migration_id = advance(cluster, num_steps)
    for name in (first, "ab".replace(first, "")):
        cluster.engines[name].cancel_migration(migration_id)
        cluster.poll(name)
    check_end(cluster, migration_id)
    expected = (
        (ExportFinished, ImportFinished) if import_is_committed(num_steps) else (ExportFailed, ImportFailed)
    )
    found = [type(cluster.reply_of(name, migration_id)) for name in "ab"]
    assert found == [expected[0] if export_has_started(num_steps) else type(None), expected[1]]


@pytest.mark.parametrize("first", "ab")
@pytest.mark.parametrize("num_steps", range(1, len(STEPS) + 1))
def test_an_expired_lease_leaves_one_owner(cluster: EngineCluster, num_steps: int, first: str) -> None:
    migration_id = advance(cluster, num_steps)
    for _ in range(2):  # the first poll may find the last copied block and renew the lease
        cluster.now_s += LEASE_S + 1
        for name in (first, "ab".replace(first, "")):
            cluster.poll(name)
    assert all(engine_.num_migrations == 0 for engine_ in cluster.engines.values())
    check_end(cluster, migration_id)


@pytest.mark.parametrize("num_steps", range(1, len(STEPS) + 1))
def test_an_abort_ends_the_request_once_at_any_step(cluster: EngineCluster, num_steps: int) -> None:
    migration_id = advance(cluster, num_steps)
    aborted = cluster.engines["a"].abort([MIGRATING.id])
    assert aborted == ({} if import_is_committed(num_steps) else {MIGRATING.id: 16})
    if export_has_started(num_steps) and not import_is_committed(num_steps):
        cluster.poll("a")
        assert cluster.reply_of("a", migration_id) == ExportFailed(migration_id, "the request was aborted")
    check_end(cluster, migration_id, is_answered=import_is_committed(num_steps))


@pytest.mark.parametrize("num_steps", range(1, len(STEPS) + 1))
def test_a_crashed_source_loses_only_requests_that_it_owns(cluster: EngineCluster, num_steps: int) -> None:
    migration_id = advance(cluster, num_steps)
    del cluster.engines["a"]
    cluster.pool_path("a").unlink()
    is_exported = num_steps > STEPS.index("export")
    check_end(cluster, migration_id, is_answered=is_exported)
    assert cluster.is_imported(migration_id) == is_exported


@pytest.mark.parametrize("num_steps", range(1, len(STEPS) + 1))
def test_a_crashed_destination_loses_only_requests_that_it_owns(
    cluster: EngineCluster, num_steps: int
) -> None:
    migration_id = advance(cluster, num_steps)
    del cluster.engines["b"]
    check_end(cluster, migration_id, is_answered=not import_is_committed(num_steps))


def test_a_source_does_not_wait_for_an_unresponsive_destination(cluster: EngineCluster) -> None:
    migration_id = advance(cluster, STEPS.index("export") + 1)
    cluster.now_s += LEASE_S + 1
    cluster.poll("a")
    assert cluster.reply_of("a", migration_id) == ExportFailed(migration_id, "the lease has expired")
    cluster.now_s -= LEASE_S + 1  # a destination with a slow clock cannot import it either
    cluster.poll("b")
    assert cluster.reply_of("b", migration_id) is None
    check_end(cluster, migration_id)


@pytest.mark.parametrize("first", ["commit", "withdraw"])
def test_the_first_change_of_the_state_decides(cluster: EngineCluster, first: str) -> None:
    handoff = cluster.handoff(advance(cluster, STEPS.index("export") + 1))
    changes = {"commit": handoff.commit_import, "withdraw": handoff.withdraw_export}
    assert changes[first]()
    assert not any(change() for change in changes.values())
    assert handoff.is_imported == (first == "commit")


def rejection(
    cluster: EngineCluster, migration_id: int, others: tuple[Request, ...] = (NEIGHBOUR, HOST)
) -> str:
    """The reason why b rejects the import. MIGRATING continues on a, and finishes like the others."""
    cluster.poll("b")
    reply = cluster.reply_of("b", migration_id)
    assert isinstance(reply, ImportFailed), reply
    assert not cluster.is_imported(migration_id)
    cluster.engines["a"].cancel_migration(migration_id)
    answers = output_tokens(cluster.run_to_end())
    assert answers == {request.id: EXPECTED[request.id] for request in (MIGRATING, *others)}
    assert isinstance(cluster.reply_of("a", migration_id), ExportFailed)
    return reply.reason


def poll_with_damaged_pool(cluster: EngineCluster) -> None:
    """Poll b while every byte of a's pool differs."""
    pool = np.memmap(cluster.pool_path("a"), np.uint8, "r+")
    intact = pool.copy()
    pool ^= 1
    cluster.poll("b")
    pool[:] = intact


@pytest.mark.parametrize("at", [0, 16, 200, -1])
def test_a_damaged_snapshot_is_rejected(cluster: EngineCluster, at: int) -> None:
    migration_id = advance(cluster, STEPS.index("export") + 1)
    handoff = cluster.handoff(migration_id)
    content = bytearray(handoff.read_export() or b"")
    content[at] ^= 0x10
    handoff.write_export(bytes(content))
    assert "checksum" in rejection(cluster, migration_id)


@pytest.mark.parametrize("num_bytes", [0, 10, 16, 300])
def test_a_truncated_snapshot_is_rejected(cluster: EngineCluster, num_bytes: int) -> None:
    migration_id = advance(cluster, STEPS.index("export") + 1)
    handoff = cluster.handoff(migration_id)
    handoff.write_export((handoff.read_export() or b"")[:num_bytes])
    assert "checksum" in rejection(cluster, migration_id)


@pytest.mark.parametrize("num_steps", [STEPS.index("publish") + 1, STEPS.index("export") + 1])
def test_a_block_that_arrives_damaged_is_rejected(cluster: EngineCluster, num_steps: int) -> None:
    """Either the first block is damaged, or the last one, which is partly filled."""
    migration_id = advance(cluster, num_steps)
    poll_with_damaged_pool(cluster)
    if num_steps == STEPS.index("publish") + 1:
        cluster.poll("a")
    assert "KV blocks arrived damaged" in rejection(cluster, migration_id)


def test_a_request_with_little_kv_that_arrives_damaged_is_rejected(
    cluster: EngineCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # copy it after it has stopped
    cluster.begin(MIGRATING, 16)
    migration_id = cluster.start_migration(MIGRATING, "a", "b")
    cluster.poll("a")
    poll_with_damaged_pool(cluster)
    assert "KV blocks arrived damaged" in rejection(cluster, migration_id, others=())


def with_format(snapshot: RequestSnapshot, **changes: object) -> RequestSnapshot:
    return snapshot._replace(format=snapshot.format._replace(**changes))  # type: ignore[arg-type]


FORGERIES: dict[str, Callable[[RequestSnapshot], RequestSnapshot]] = {
    "format_version is 0": lambda s: with_format(s, format_version=0),
    "model_digest is x": lambda s: with_format(s, model_digest="x"),
    "weight_digest is x": lambda s: with_format(s, weight_digest="x"),
    "dtype is bfloat16": lambda s: with_format(s, dtype="bfloat16"),
    "block_shape is": lambda s: with_format(s, block_shape=(2, 2, 32, 2, 4)),
    "another request": lambda s: s._replace(request=replace(s.request, seed=1)),
    "another request ": lambda s: s._replace(request=replace(s.request, version=1)),
    "inconsistent": lambda s: s._replace(num_computed=s.num_computed - 1),
    "inconsistent ": lambda s: s._replace(blocks=s.blocks[:-1], checksums=s.checksums[:-1]),
    "inconsistent  ": lambda s: s._replace(output=s.output._replace(logprobs=s.output.logprobs[:-1])),
    "inconsistent   ": lambda s: s._replace(output=s.output._replace(chunks=())),
    "inconsistent    ": lambda s: s._replace(output=s.output._replace(logprobs=s.output.logprobs[:, :2])),
    "outside the source's pool": lambda s: s._replace(blocks=s.blocks + 10_000),
    "KV blocks arrived damaged": lambda s: s._replace(checksums=s.checksums + np.uint64(1)),
}


@pytest.mark.parametrize("reason", FORGERIES)
def test_a_snapshot_that_does_not_match_is_rejected(cluster: EngineCluster, reason: str) -> None:
    migration_id = advance(cluster, STEPS.index("export") + 1)
    handoff = cluster.handoff(migration_id)
    snapshot = handoff.load_snapshot()
    assert snapshot is not None
    handoff.export_snapshot(FORGERIES[reason](snapshot))
    assert reason.strip() in rejection(cluster, migration_id)


def export_from_a(cluster: EngineCluster) -> int:
    cluster.add_engine("a").submit([MIGRATING])
    cluster.step("a", 16)
    migration_id = cluster.start_migration(MIGRATING, "a", "b")
    for name in "aba":
        cluster.poll(name)
    return migration_id


def test_the_same_version_with_other_weights_is_rejected(cluster: EngineCluster) -> None:
    cluster.add_engine("b", versions=()).load(0, weights(5))
    assert "weight_digest is" in rejection(cluster, export_from_a(cluster), others=())


@pytest.mark.parametrize("change", [{"rope_theta": 20_000.0}, {"head_dim": 16}])
def test_another_model_is_rejected(cluster: EngineCluster, change: dict[str, float]) -> None:
    config = replace(TINY, **change)  # type: ignore[arg-type]
    made = cluster.add_engine("b", versions=(), config=config)
    made.load(0, initial_weights(config, seed=0))
    assert "model_digest is" in rejection(cluster, export_from_a(cluster), others=())


def test_the_source_rejects_cached_blocks_with_another_hash(cluster: EngineCluster) -> None:
    """Both engines have cached the prompt for the same version, but their weights differ."""
    sibling = replace(MIGRATING, id=RequestId(0, 0, 1))
    cluster.add_engine("a").submit([MIGRATING])
    cluster.add_engine("b", versions=()).load(0, weights(5))
    cluster.engines["b"].submit([sibling])
    for name in "ab":
        cluster.step(name, 2)
    migration_id = cluster.start_migration(MIGRATING, "a", "b")
    reservation = cluster.handoff(migration_id).reservation()
    assert reservation is not None
    assert reservation.num_cached_blocks == 1
    cluster.poll("a")
    reason = "the destination has another prompt cached, or other weights"
    assert cluster.reply_of("a", migration_id) == ExportFailed(migration_id, reason)
    cluster.engines["b"].cancel_migration(migration_id)
    cluster.engines["b"].abort([sibling.id])
    assert output_tokens(cluster.run_to_end()) == {MIGRATING.id: EXPECTED[MIGRATING.id]}


def test_a_long_copy_renews_its_lease_with_every_block(
    cluster: EngineCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each poll copies one block, and polls are less than a lease apart."""
    for name in ("_BYTES_PER_POLL", "_BYTES_PER_DEVICE_POLL"):
        monkeypatch.setattr(transfer, name, 1)
    migration_id = advance(cluster, STEPS.index("start export") + 1)
    began_s = cluster.now_s
    while (reply := cluster.reply_of("b", migration_id)) is None:
        cluster.now_s += 0.9 * LEASE_S
        cluster.poll("a")
        cluster.poll("b")
    assert isinstance(reply, ImportFinished)
    assert cluster.now_s - began_s > 2 * LEASE_S
