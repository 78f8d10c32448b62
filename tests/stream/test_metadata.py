"""The metadata controller serves every row to each consumer once, in order, and expires leases."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.stream.sample_rows import group, row

from dora.core.types import GroupId, RequestId
from dora.errors import StreamError
from dora.stream.metadata import (
    BatchRequest,
    Block,
    BlockLocation,
    MetadataController,
    SampleMeta,
    StreamLease,
    StreamRow,
)

NAMES = ("ids", "reward")


def block(names: Sequence[str], num_rows: int) -> Block:
    return Block(tuple(names), num_rows, BlockLocation("", 0, 10 * num_rows))


def add(metadata: MetadataController, rows: Sequence[SampleMeta], names: Sequence[str] = ("ids",)) -> range:
    metadata.check_new(rows)
    return metadata.add(rows, block(names, len(rows)))


def fill(metadata: MetadataController, indices: Sequence[int], names: Sequence[str] = ("reward",)) -> None:
    metadata.check_fill(indices, names)
    metadata.fill(indices, block(names, len(indices)))


def lease_rows(
    metadata: MetadataController,
    name: str,
    request: BatchRequest | None = None,
    client: str = "me",
    now_s: float = 0.0,
) -> list[int]:
    lease = metadata.lease(name, client, request or BatchRequest(), now_s)
    return [r.index for r in lease.rows] if lease else []


@pytest.fixture
def metadata() -> MetadataController:
    return MetadataController(NAMES)


def test_a_row_is_ready_for_each_consumer_once_it_has_the_needed_fields(metadata: MetadataController) -> None:
    metadata.register_consumer("reward", ["ids"])
    metadata.register_consumer("actor", ["ids", "reward"])
    add(metadata, [row(0)])
    assert lease_rows(metadata, "actor") == []
    assert lease_rows(metadata, "reward") == [0]
    assert lease_rows(metadata, "reward") == []
    fill(metadata, [0])
    assert lease_rows(metadata, "actor") == [0]


def test_a_late_consumer_is_served_the_existing_rows(metadata: MetadataController) -> None:
    add(metadata, [row(0), row(1)])
    metadata.register_consumer("reward", ["ids"])
    assert lease_rows(metadata, "reward", BatchRequest(max_rows=9)) == [0, 1]


def test_a_row_is_removed_after_its_last_consumer_and_a_block_after_its_last_row(
    metadata: MetadataController,
) -> None:
    for name in ("one", "two"):
        metadata.register_consumer(name, ["ids"])
    add(metadata, [row(0), row(1)])
    leases = [metadata.lease(name, "me", BatchRequest(), 0.0) for name in ("one", "two", "one", "two")]
    for lease in leases[:3]:
        assert lease is not None
        metadata.commit(lease.lease_id, "me", 0.0)
    assert [*metadata.rows] == [1]
    assert not metadata.freed_blocks
    assert leases[3] is not None
    metadata.commit(leases[3].lease_id, "me", 0.0)
    assert not metadata.rows
    assert len(metadata.freed_blocks) == 1
    assert metadata.num_bytes == 0


def test_rows_are_served_first_in_first_out_or_oldest_version_first(metadata: MetadataController) -> None:
    metadata.register_consumer("reward", ["ids"], by_version=True)
    metadata.register_consumer("other", ["ids"])
    add(metadata, [row(0, version=2), row(2, version=1), row(4, version=2), row(6, version=1)])
    assert lease_rows(metadata, "reward", BatchRequest(max_rows=3)) == [1, 3, 0]
    assert lease_rows(metadata, "other", BatchRequest(max_rows=3)) == [0, 1, 2]


def test_released_rows_go_to_the_front_of_the_queue(metadata: MetadataController) -> None:
    metadata.register_consumer("reward", ["ids"])
    add(metadata, [row(n) for n in range(4)])
    lease = metadata.lease("reward", "me", BatchRequest(max_rows=2), 0.0)
    assert lease is not None
    metadata.release(lease.lease_id, "me", 0.0)
    assert lease_rows(metadata, "reward", BatchRequest(max_rows=3)) == [0, 1, 2]


def test_a_group_is_served_whole_whatever_the_order_of_its_rows(metadata: MetadataController) -> None:
    """Neighbouring rows of different groups are not a group."""
    metadata.register_consumer("actor", ["ids"], group_size=2)
    add(metadata, [row(1), row(2), row(5), row(3)])
    lease = metadata.lease("actor", "me", BatchRequest(max_rows=2), 0.0)
    assert lease is not None
    assert [r.request for r in lease.rows] == [row(2).request, row(3).request]
    assert lease_rows(metadata, "actor") == []


def test_consecutive_ready_rows_are_not_a_group(metadata: MetadataController) -> None:
    """Of groups {0, 1, 2} and {3, 4, 5}, rows 1 to 5 are ready: rows 1, 2 and 3 are not served as a group."""
    metadata.register_consumer("actor", ["ids", "reward"], group_size=3)
    add(metadata, [row(n, group_size=3) for n in range(6)])
    fill(metadata, [1, 2, 3, 4, 5])
    assert lease_rows(metadata, "actor", BatchRequest(max_rows=3)) == [3, 4, 5]
    assert lease_rows(metadata, "actor", BatchRequest(max_rows=3)) == []


@given(group_size=st.integers(1, 4), data=st.data())
def test_groups_are_complete_in_every_order_of_arrival(group_size: int, data: st.DataObject) -> None:
    """Rows are put and become ready in any order, and are released when their client crashes."""
    metadata = MetadataController(NAMES)
    metadata.register_consumer(
        "actor", ["ids", "reward"], group_size=group_size, by_version=data.draw(st.booleans())
    )
    numbers = data.draw(st.permutations(range(3 * group_size)))
    indices = add(metadata, [row(n, version=n % 2, group_size=group_size) for n in numbers])
    num_left = len(indices)
    for index in data.draw(st.permutations(indices)):
        fill(metadata, [index])
        while (
            lease := metadata.lease("actor", "me", BatchRequest(data.draw(st.integers(1, 9))), 0.0)
        ) is not None:
            by_group = [r.request.group for r in lease.rows]
            siblings = [r.request.sibling for r in lease.rows]
            num_groups = len({*by_group})
            assert siblings == [*range(group_size)] * num_groups
            assert by_group == [g for g in dict.fromkeys(by_group) for _ in range(group_size)]
            if data.draw(st.booleans()):
                metadata.release_client("me")
                break
            metadata.commit(lease.lease_id, "me", 0.0)
            num_left -= len(lease.rows)
    while (lease := metadata.lease("actor", "me", BatchRequest(99), 0.0)) is not None:
        metadata.commit(lease.lease_id, "me", 0.0)
        num_left -= len(lease.rows)
    assert num_left == len(metadata.rows) == 0


def test_only_leased_rows_can_be_read_without_a_lease(metadata: MetadataController) -> None:
    metadata.register_consumer("actor", ["ids"])
    metadata.register_consumer("reward", ["ids"])
    add(metadata, [row(n) for n in range(3)])
    assert lease_rows(metadata, "actor", BatchRequest(2)) == [0, 1]
    assert [r.index for r in metadata.leased_rows("actor", [1, 0]).rows] == [1, 0]
    metadata.commit(1, "me", 0.0)
    for name, indices, missing in (
        ("actor", [2], 2),
        ("actor", [0], 0),
        ("reward", [0], 0),
        ("actor", [7], 7),
        ("actor", [], "none"),
    ):
        with pytest.raises(StreamError, match=f"row {missing} is not on lease to '{name}'"):
            metadata.leased_rows(name, indices)


def test_held_out_groups_have_their_own_size_and_only_go_to_consumers_that_declare_it(
    metadata: MetadataController,
) -> None:
    metadata.register_consumer("actor", ["ids"], group_size=2)
    metadata.register_consumer("reward", ["ids"], group_size=2, held_out_size=3)
    add(metadata, [SampleMeta(RequestId(-5, 7, sibling), 4) for sibling in range(2)])
    assert lease_rows(metadata, "reward") == []
    add(metadata, [SampleMeta(RequestId(-5, 7, 2), 4), row(0), row(1)])
    assert lease_rows(metadata, "actor", BatchRequest(max_rows=9)) == [3, 4]
    assert lease_rows(metadata, "reward", BatchRequest(groups=(GroupId(-5, 7),))) == [0, 1, 2]
    assert lease_rows(metadata, "reward") == [3, 4]


def test_requested_groups_are_leased_together_or_not_at_all(metadata: MetadataController) -> None:
    metadata.register_consumer("actor", ["ids", "reward"], group_size=2)
    add(metadata, [row(n) for n in range(6)])
    request = BatchRequest(groups=(group(2), group(0)))
    assert lease_rows(metadata, "actor", request) == []
    fill(metadata, [0, 1, 2, 3, 4])
    assert lease_rows(metadata, "actor", request) == []
    assert "group 0/2: has 2 of 2 rows, without reward" in metadata.describe_missing("actor", request)
    fill(metadata, [5])
    assert lease_rows(metadata, "actor", request) == [4, 5, 0, 1]
    assert "2 on lease or consumed" in metadata.describe_missing("actor", request)
    assert lease_rows(metadata, "actor", BatchRequest(max_rows=9)) == [2, 3]
    metadata.release_client("me")
    assert lease_rows(metadata, "actor", BatchRequest(groups=(group(0),))) == [0, 1]


def test_a_batch_has_at_most_max_tokens_but_at_least_one_row(metadata: MetadataController) -> None:
    metadata.register_consumer("critic", ["ids"])
    add(metadata, [row(n)._replace(num_tokens=num) for n, num in enumerate((50, 4, 5, 3))])
    assert lease_rows(metadata, "critic", BatchRequest(9, max_tokens=10)) == [0]
    assert lease_rows(metadata, "critic", BatchRequest(9, max_tokens=10)) == [1, 2]
    assert lease_rows(metadata, "critic", BatchRequest(9, min_rows=2)) == []
    assert lease_rows(metadata, "critic", BatchRequest(9)) == [3]


def test_the_rows_of_an_expired_lease_go_to_another_client(metadata: MetadataController) -> None:
    metadata.register_consumer("reward", ["ids"], lease_s=5.0)
    add(metadata, [row(0)])
    lease = metadata.lease("reward", "slow", BatchRequest(), 0.0)
    assert lease is not None
    metadata.renew(lease.lease_id, "slow", 4.0)
    metadata.expire(8.9)
    assert lease_rows(metadata, "reward") == []
    assert metadata.next_expiry_s == 9.0
    metadata.expire(9.0)
    assert lease_rows(metadata, "reward", client="quick", now_s=9.0) == [0]
    with pytest.raises(StreamError, match=r"lease 1 has ended.*get new rows"):
        metadata.commit(lease.lease_id, "slow", 9.0)
    metadata.commit(2, "quick", 9.5)
    assert not metadata.rows


def test_only_the_holder_of_a_lease_can_commit_it(metadata: MetadataController) -> None:
    metadata.register_consumer("reward", ["ids"])
    add(metadata, [row(0)])
    with pytest.raises(StreamError, match="this client has no lease 1: get rows first"):
        metadata.commit(1, "me", 0.0)
    lease_rows(metadata, "reward")
    with pytest.raises(StreamError, match="this client has no lease 1"):
        metadata.commit(1, "you", 0.0)
    metadata.commit(1, "me", 0.0)
    with pytest.raises(StreamError, match="lease 1 has ended"):
        metadata.commit(1, "me", 0.0)


@pytest.mark.parametrize(
    ("rows", "fragment"),
    [([row(0)], "row 0/0/0 exists already"), ([row(3), row(3)], "row 0/1/1 exists already")],
)
def test_a_row_can_be_put_only_once(
    metadata: MetadataController, rows: list[SampleMeta], fragment: str
) -> None:
    add(metadata, [row(0)])
    with pytest.raises(StreamError, match=fragment):
        add(metadata, rows)
    assert [*metadata.rows] == [0]


def test_a_column_is_written_once_and_only_to_existing_rows(metadata: MetadataController) -> None:
    add(metadata, [row(0)])
    fill(metadata, [0])
    for indices, names, fragment in (
        ([0], ["reward"], "row 0 has reward already"),
        ([7], ["reward"], "row 7 does not exist"),
        ([0, 0], ["reward"], "an index is repeated"),
        ([0], ["value"], "field 'value' is not declared; declared are ids, reward"),
    ):
        with pytest.raises(StreamError, match=fragment):
            fill(metadata, indices, names)


def test_consumers_are_registered_once_with_declared_fields(metadata: MetadataController) -> None:
    metadata.register_consumer("actor", ["ids"], group_size=2)
    metadata.register_consumer("actor", ["ids"], group_size=2)
    for name, fields, fragment in (
        ("actor", ["ids"], "consumer 'actor' is registered with other rules"),
        ("critic", ["values"], "field 'values' is not declared"),
    ):
        with pytest.raises(StreamError, match=fragment):
            metadata.register_consumer(name, fields)
    with pytest.raises(StreamError, match="consumer 'critic' is not registered; registered are: actor"):
        lease_rows(metadata, "critic")
    metadata.register_consumer("reward", ["ids"])
    with pytest.raises(StreamError, match="has no group_size and requested groups"):
        lease_rows(metadata, "reward", BatchRequest(groups=(group(0),)))


def test_cleared_groups_are_neither_queued_nor_released_again(metadata: MetadataController) -> None:
    metadata.register_consumer("actor", ["ids"], group_size=2)
    metadata.register_consumer("reward", ["ids"])
    add(metadata, [row(n) for n in range(4)])
    lease = metadata.lease("reward", "me", BatchRequest(max_rows=3), 0.0)
    metadata.clear([group(0), group(7)])
    assert [*metadata.rows] == [2, 3]
    assert not metadata.freed_blocks  # a lease still references the block
    assert lease_rows(metadata, "actor", BatchRequest(9)) == [2, 3]
    assert lease is not None
    metadata.release(lease.lease_id, "me", 0.0)
    assert lease_rows(metadata, "reward", BatchRequest(9)) == [2, 3]
    metadata.clear([group(1), group(1)])
    assert not metadata.rows


def test_consumed_rows_are_not_kept_by_consumers_that_request_groups(metadata: MetadataController) -> None:
    """Otherwise a run would keep every row."""
    for name, size in (("actor", 2), ("reward", 0)):
        metadata.register_consumer(name, ["ids"], group_size=size)
    for number in range(0, 2000, 2):
        add(metadata, [row(number), row(number + 1)])
        if number % 4:
            lease = metadata.lease("actor", "me", BatchRequest(groups=(group(number // 2),)), 0.0)
            assert lease is not None
            metadata.commit(lease.lease_id, "me", 0.0)
        metadata.clear([group(number // 2)])
    assert sum(type(kept) is StreamRow for kept in gc.get_objects()) < 500


class Traffic(RuleBasedStateMachine):
    """Two consumers, one of groups; clients crash and leases expire; a model counts what is consumed."""

    def __init__(self) -> None:
        super().__init__()
        self.metadata = MetadataController(NAMES)
        self.metadata.register_consumer("reward", ["ids"], lease_s=10.0)
        self.metadata.register_consumer(
            "actor", ["ids", "reward"], group_size=2, lease_s=30.0, by_version=True
        )
        self.now_s, self.num_put = 0.0, 0
        self.leases: list[StreamLease] = []
        self.incomplete: list[int] = []
        self.consumed: dict[str, list[int]] = {"reward": [], "actor": []}

    @rule(num=st.integers(1, 5), version=st.integers(0, 2))
    def put(self, num: int, version: int) -> None:
        rows = [row(n, version) for n in range(self.num_put, self.num_put + num)]
        self.incomplete += add(self.metadata, rows)
        self.num_put += num

    @precondition(lambda self: self.incomplete)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(self.incomplete))
        self.incomplete.remove(index)
        if index in self.metadata.rows:
            fill(self.metadata, [index])

    @rule(name=st.sampled_from(["reward", "actor"]), num=st.integers(1, 4), client=st.sampled_from("ab"))
    def lease(self, name: str, num: int, client: str) -> None:
        if (lease := self.metadata.lease(name, client, BatchRequest(num), self.now_s)) is not None:
            self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        try:
            self.metadata.commit(lease.lease_id, lease.client, self.now_s)
        except StreamError:
            return
        self.consumed[lease.consumer.name] += [r.index for r in lease.rows]

    @rule(client=st.sampled_from("ab"))
    def crash(self, client: str) -> None:
        self.metadata.release_client(client)

    @rule(wait_s=st.sampled_from([1.0, 9.0, 31.0]))
    def wait(self, wait_s: float) -> None:
        self.now_s += wait_s
        self.metadata.expire(self.now_s)

    @invariant()
    def nothing_is_consumed_twice(self) -> None:
        for indices in self.consumed.values():
            assert len(indices) == len({*indices})

    @invariant()
    def rows_not_consumed_by_all_exist(self) -> None:
        removed = {*self.consumed["reward"]} & {*self.consumed["actor"]}
        assert {*self.metadata.rows} == {*range(self.num_put)} - removed

    def teardown(self) -> None:
        """Without leases and with all fields, every row can be consumed, in whole groups."""
        if self.num_put % 2:
            self.put(1, 0)
        for index in self.incomplete:
            fill(self.metadata, [index])
        self.metadata.expire(self.now_s + 100.0)
        for name in ("reward", "actor"):
            while (lease := self.metadata.lease(name, "c", BatchRequest(3), self.now_s)) is not None:
                if name == "actor":
                    assert [r.request.sibling for r in lease.rows] == [0, 1]
                    assert len({r.request.group for r in lease.rows}) == 1
                self.metadata.commit(lease.lease_id, "c", self.now_s)
                self.consumed[name] += [r.index for r in lease.rows]
            assert sorted(self.consumed[name]) == [*range(self.num_put)]
        assert not self.metadata.rows
        assert self.metadata.num_bytes == 0


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=40)
