"""The metadata controller serves every group to each consumer once, in order, and expires leases."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.stream.sample_rows import group, samples

from dora.core.types import GroupId, RequestId
from dora.errors import StreamError
from dora.stream.metadata import (
    BatchRequest,
    Block,
    BlockLocation,
    ConsumerDeclaration,
    MetadataController,
    SampleMeta,
    StreamGroup,
    StreamLease,
)

NAMES = ("ids", "reward")
REWARD, ACTOR = ConsumerDeclaration("reward", ["ids"]), ConsumerDeclaration("actor", ["ids", "reward"])
ONE = BatchRequest()  # group
ALL = BatchRequest(max_rows=99)


def block(names: Sequence[str], num_rows: int) -> Block:
    return Block(tuple(names), num_rows, BlockLocation("", 0, 10 * num_rows))


def add(metadata: MetadataController, rows: Sequence[SampleMeta]) -> None:
    new = metadata.check_new(rows, ["ids"], len(rows))
    metadata.add(new, block(["ids"], len(rows)))


def fill(metadata: MetadataController, *numbers: int) -> None:
    groups = [group(number) for number in numbers]
    found = metadata.check_fill(groups, ["reward"], 2 * len(numbers))
    metadata.fill(found, block(["reward"], 2 * len(numbers)))


def lease(
    metadata: MetadataController,
    name: str,
    request: BatchRequest = ONE,
    client: str = "me",
    now_s: float = 0.0,
) -> list[int]:
    """The numbers of the leased groups."""
    found = metadata.lease(name, client, request, now_s)
    return [leased.group.row for leased in found.groups] if found else []


@pytest.fixture
def metadata() -> MetadataController:
    return MetadataController(NAMES, [REWARD, ACTOR])


def test_a_group_is_ready_for_each_consumer_once_it_has_the_needed_fields(
    metadata: MetadataController,
) -> None:
    add(metadata, samples(0, 1))
    assert lease(metadata, "actor") == []
    assert lease(metadata, "reward", ALL) == [0, 1]
    assert lease(metadata, "reward") == []
    fill(metadata, 1)
    assert lease(metadata, "actor", ALL) == [1]


def test_a_group_is_removed_after_its_last_consumer_and_a_block_after_its_last_group() -> None:
    metadata = MetadataController(NAMES, [REWARD, REWARD._replace(name="other")])
    add(metadata, samples(0, 1))
    leases = [metadata.lease(name, "me", ONE, 0.0) for name in ("reward", "other", "reward", "other")]
    for found in leases[:3]:
        assert found is not None
        metadata.commit(found.lease_id, "me", 0.0)
    assert [*metadata.groups] == [group(1)]
    assert not metadata.freed_blocks
    assert leases[3] is not None
    metadata.commit(leases[3].lease_id, "me", 0.0)
    assert metadata.num_rows == 0
    assert len(metadata.freed_blocks) == 1
    assert metadata.num_bytes == 0


def test_groups_are_served_oldest_version_first_then_first_in_first_out(metadata: MetadataController) -> None:
    for number, version in enumerate((2, 1, 2, 1)):
        add(metadata, samples(number, version=version))
    assert lease(metadata, "reward", BatchRequest(max_rows=6)) == [1, 3, 0]


def test_released_groups_go_to_the_front_of_the_queue(metadata: MetadataController) -> None:
    add(metadata, samples(0, 1, 2, 3))
    found = metadata.lease("reward", "me", BatchRequest(max_rows=4), 0.0)
    assert found is not None
    metadata.release(found.lease_id, "me", 0.0)
    assert lease(metadata, "reward", BatchRequest(max_rows=6)) == [0, 1, 2]


def test_the_rows_of_a_lease_are_whole_groups_in_sibling_order(metadata: MetadataController) -> None:
    add(metadata, [*samples(5), *samples(3, group_size=1), *samples(1, group_size=3)])
    found = metadata.lease("reward", "me", ALL, 0.0)
    assert found is not None
    rows = [(leased.group.row, sibling) for leased, sibling in found.rows]
    assert rows == [(5, 0), (5, 1), (3, 0), (1, 0), (1, 1), (1, 2)]


def test_only_leased_rows_can_be_read_without_a_lease(metadata: MetadataController) -> None:
    add(metadata, samples(0, 1))
    fill(metadata, 0)
    assert lease(metadata, "reward") == [0]
    one, other = RequestId(0, 0, 0), RequestId(0, 0, 1)
    assert [sibling for _, sibling in metadata.leased_rows("reward", [other, one]).rows] == [1, 0]
    for requests in ([], [one, other, one]):
        with pytest.raises(StreamError, match="a row is repeated, or there is none"):
            metadata.leased_rows("reward", requests)
    for sibling in (-1, 2):
        with pytest.raises(StreamError, match=f"row 0/0/{sibling} is not on lease to 'reward'"):
            metadata.leased_rows("reward", [RequestId(0, 0, sibling)])
    metadata.commit(1, "me", 0.0)
    for name, number in (("reward", 1), ("reward", 0), ("actor", 0), ("actor", 1), ("reward", 7)):
        with pytest.raises(StreamError, match=f"row 0/{number}/0 is not on lease to '{name}'"):
            metadata.leased_rows(name, [RequestId(0, number, 0)])


def test_a_group_is_leased_by_name_once_it_is_ready(metadata: MetadataController) -> None:
    request = BatchRequest(group=group(1))

    def missing() -> str:
        assert lease(metadata, "actor", request) == []
        return metadata.describe_missing("actor", request)

    assert missing() == "group 0/1 is not there"
    add(metadata, samples(0, 1, 2))
    assert missing() == "group 0/1 has no reward"
    fill(metadata, 0, 1, 2)
    assert lease(metadata, "actor", request) == [1]
    assert missing() == "group 0/1 is on lease or consumed"
    assert lease(metadata, "actor", ALL) == [0, 2]
    assert metadata.describe_missing("actor", ALL) == "no group is ready for 'actor'"
    metadata.release_client("me")
    assert lease(metadata, "actor", BatchRequest(group=group(0))) == [0]


def test_a_batch_has_at_most_max_tokens_but_at_least_one_group(metadata: MetadataController) -> None:
    for number, num_tokens in enumerate((50, 4, 5, 3)):
        add(metadata, [SampleMeta(RequestId(0, number, 0), 0, num_tokens)])
    for expected in ([0], [1, 2], [3]):
        assert lease(metadata, "reward", BatchRequest(9, max_tokens=10)) == expected


def test_the_groups_of_an_expired_lease_go_to_another_client() -> None:
    metadata = MetadataController(NAMES, [REWARD._replace(lease_s=9.0)])
    add(metadata, samples(0))
    assert lease(metadata, "reward", client="slow") == [0]
    metadata.expire(8.9)
    assert lease(metadata, "reward") == []
    assert metadata.next_expiry_s == 9.0
    metadata.expire(9.0)
    assert lease(metadata, "reward", client="quick", now_s=9.0) == [0]
    with pytest.raises(StreamError, match=r"lease 1 has ended.*get new rows"):
        metadata.commit(1, "slow", 9.0)
    metadata.commit(2, "quick", 9.5)
    assert not metadata.groups


def test_only_the_holder_of_a_lease_can_commit_it(metadata: MetadataController) -> None:
    add(metadata, samples(0))
    with pytest.raises(StreamError, match="this client has no lease 1: get rows first"):
        metadata.commit(1, "me", 0.0)
    lease(metadata, "reward")
    with pytest.raises(StreamError, match="this client has no lease 1"):
        metadata.commit(1, "you", 0.0)
    metadata.commit(1, "me", 0.0)
    with pytest.raises(StreamError, match="lease 1 has ended"):
        metadata.commit(1, "me", 0.0)


@pytest.mark.parametrize(
    ("rows", "fragment"),
    [
        (samples(0), "group 0/0 exists already"),
        (samples(3, 4, 3), "group 0/3 exists already"),
        (samples(3)[1:], "group 0/3 is incomplete"),
        (samples(3)[::-1], "group 0/3 is incomplete"),
        ([], "0 values for 0 rows: pass one value for each row"),
    ],
)
def test_a_group_is_put_once_and_whole(
    metadata: MetadataController, rows: list[SampleMeta], fragment: str
) -> None:
    add(metadata, samples(0))
    with pytest.raises(StreamError, match=fragment):
        add(metadata, rows)
    assert [*metadata.groups] == [group(0)]


def test_a_column_is_written_once_and_only_to_existing_groups(metadata: MetadataController) -> None:
    add(metadata, samples(0, 1))
    fill(metadata, 0)
    for number, name, num_rows, fragment in (
        (0, "reward", 2, "group 0/0 has reward already"),
        (7, "reward", 2, "group 0/7 does not exist"),
        (1, "value", 2, "field 'value' is not declared; declared are ids, reward"),
        (1, "reward", 3, "3 values for 2 rows"),
    ):
        with pytest.raises(StreamError, match=fragment):
            metadata.check_fill([group(number)], [name], num_rows)
    with pytest.raises(StreamError, match="0 values for 0 rows"):
        metadata.check_fill([], ["reward"], 0)


def test_a_group_that_a_fill_names_for_each_of_its_rows_has_one_value_for_each_row(
    metadata: MetadataController,
) -> None:
    add(metadata, samples(0))
    repeated = [group(0)] * 2
    with pytest.raises(StreamError, match="4 values for 2 rows"):
        metadata.check_fill(repeated, ["reward"], 4)
    (found,) = metadata.check_fill(repeated, ["reward"], 2)
    assert found.group == group(0)


def test_consumers_are_declared_with_declared_fields(metadata: MetadataController) -> None:
    with pytest.raises(StreamError, match="consumer 'critic' is not declared; declared are reward, actor"):
        lease(metadata, "critic")
    with pytest.raises(StreamError, match="field 'values' is not declared"):
        MetadataController(NAMES, [ConsumerDeclaration("critic", ["values"])])


def test_cleared_groups_are_neither_queued_nor_released_nor_consumed_again(
    metadata: MetadataController,
) -> None:
    add(metadata, samples(0, 1, 2))
    found = metadata.lease("reward", "me", BatchRequest(max_rows=4), 0.0)
    fill(metadata, 0)
    metadata.clear([group(0), group(2), group(7)])
    assert [*metadata.groups] == [group(1)]
    assert metadata.num_rows == 2
    assert len(metadata.freed_blocks) == 1  # a lease still reads the other block
    assert lease(metadata, "actor", ALL) == []
    assert found is not None
    metadata.release(found.lease_id, "me", 0.0)
    assert lease(metadata, "reward", ALL) == [1]
    metadata.clear([group(1), group(1)])
    add(metadata, samples(1))  # the step is redone
    metadata.commit(2, "me", 0.0)
    assert lease(metadata, "reward", ALL) == [1]


def test_consumed_groups_are_not_kept_by_consumers_that_request_them_by_name(
    metadata: MetadataController,
) -> None:
    """Otherwise a run would keep every group."""
    for number in range(1000):
        add(metadata, samples(number))
        fill(metadata, number)
        if number % 2:
            found = metadata.lease("actor", "me", BatchRequest(group=group(number)), 0.0)
            assert found is not None
            metadata.commit(found.lease_id, "me", 0.0)
        metadata.clear([group(number)])
    assert sum(type(kept) is StreamGroup for kept in gc.get_objects()) < 500


class Traffic(RuleBasedStateMachine):
    """Two consumers; clients crash and leases expire; a model counts what is consumed."""

    def __init__(self) -> None:
        super().__init__()
        consumers = [REWARD._replace(lease_s=10.0), ACTOR._replace(lease_s=30.0)]
        self.metadata = MetadataController(NAMES, consumers)
        self.now_s, self.num_put = 0.0, 0
        self.leases: list[StreamLease] = []
        self.unfilled: list[int] = []
        self.consumed: dict[str, list[GroupId]] = {"reward": [], "actor": []}

    @rule(num=st.integers(1, 3), version=st.integers(0, 2))
    def put(self, num: int, version: int) -> None:
        numbers = range(self.num_put, self.num_put + num)
        add(self.metadata, samples(*numbers, version=version))
        self.unfilled += numbers
        self.num_put += num

    @precondition(lambda self: self.unfilled)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.unfilled))
        self.unfilled.remove(number)
        fill(self.metadata, number)

    @rule(name=st.sampled_from(["reward", "actor"]), num=st.integers(1, 6), client=st.sampled_from("ab"))
    def lease(self, name: str, num: int, client: str) -> None:
        if (found := self.metadata.lease(name, client, BatchRequest(num), self.now_s)) is not None:
            assert len(found.rows) <= max(num, 2)
            self.leases.append(found)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        found = data.draw(st.sampled_from(self.leases))
        self.leases.remove(found)
        try:
            self.metadata.commit(found.lease_id, found.client, self.now_s)
        except StreamError:
            return
        self.consumed[found.consumer.name] += [leased.group for leased in found.groups]

    @rule(client=st.sampled_from("ab"))
    def crash(self, client: str) -> None:
        self.metadata.release_client(client)

    @rule(wait_s=st.sampled_from([1.0, 9.0, 31.0]))
    def wait(self, wait_s: float) -> None:
        self.now_s += wait_s
        self.metadata.expire(self.now_s)

    @invariant()
    def nothing_is_consumed_twice(self) -> None:
        for groups in self.consumed.values():
            assert len(groups) == len({*groups})

    @invariant()
    def groups_not_consumed_by_all_exist(self) -> None:
        removed = {*self.consumed["reward"]} & {*self.consumed["actor"]}
        assert {*self.metadata.groups} == {group(number) for number in range(self.num_put)} - removed

    def teardown(self) -> None:
        """Without leases and with all fields, every group can be consumed."""
        for number in self.unfilled:
            fill(self.metadata, number)
        self.metadata.expire(self.now_s + 100.0)
        for name in ("reward", "actor"):
            while (found := self.metadata.lease(name, "c", BatchRequest(3), self.now_s)) is not None:
                self.metadata.commit(found.lease_id, "c", self.now_s)
                self.consumed[name] += [leased.group for leased in found.groups]
            assert sorted(self.consumed[name]) == [group(number) for number in range(self.num_put)]
        assert not self.metadata.groups
        assert self.metadata.num_bytes == 0


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=40)
