"""The control plane serves each consumer every row once, in its order, and takes back what it must."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.stream.rows import group, row

from dora.core.records import GroupId, RequestId
from dora.errors import StreamError
from dora.stream.ledger import Lease, Ledger
from dora.stream.lines import Block, NewRow, Row, Want

NAMES = ("ids", "reward")


def block(names: Sequence[str], num_rows: int) -> Block:
    return Block(tuple(names), num_rows, num_bytes=10 * num_rows, place=None)


def add(ledger: Ledger, rows: Sequence[NewRow], names: Sequence[str] = ("ids",)) -> range:
    ledger.check_new(rows)
    return ledger.add(rows, block(names, len(rows)))


def fill(ledger: Ledger, indices: Sequence[int], names: Sequence[str] = ("reward",)) -> None:
    ledger.check_fill(indices, names)
    ledger.fill(indices, block(names, len(indices)))


def take(ledger: Ledger, name: str, want: Want = Want(), client: str = "me", now_s: float = 0.0) -> list[int]:  # noqa: B008
    lease = ledger.take(name, client, want, now_s)
    return [r.index for r in lease.rows] if lease else []


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(NAMES)


def test_a_row_is_ready_for_each_consumer_when_its_own_columns_are_there(ledger: Ledger) -> None:
    ledger.declare("reward", ["ids"])
    ledger.declare("actor", ["ids", "reward"])
    add(ledger, [row(0)])
    assert take(ledger, "actor") == []
    assert take(ledger, "reward") == [0]
    assert take(ledger, "reward") == []
    fill(ledger, [0])
    assert take(ledger, "actor") == [0]


def test_a_late_consumer_is_served_what_is_still_here(ledger: Ledger) -> None:
    add(ledger, [row(0), row(1)])
    ledger.declare("reward", ["ids"])
    assert take(ledger, "reward", Want(num_rows=9)) == [0, 1]


def test_a_row_goes_after_its_last_consumer_and_a_block_after_its_last_row(ledger: Ledger) -> None:
    for name in ("one", "two"):
        ledger.declare(name, ["ids"])
    add(ledger, [row(0), row(1)])
    leases = [ledger.take(name, "me", Want(), 0.0) for name in ("one", "two", "one", "two")]
    for lease in leases[:3]:
        assert lease is not None
        ledger.commit(lease.number, "me", 0.0)
    assert [*ledger.rows] == [1]
    assert not ledger.free
    assert leases[3] is not None
    ledger.commit(leases[3].number, "me", 0.0)
    assert not ledger.rows
    assert len(ledger.free) == 1
    assert ledger.num_bytes == 0


def test_the_oldest_version_goes_first_and_then_who_came_first(ledger: Ledger) -> None:
    ledger.declare("reward", ["ids"], by_version=True)
    ledger.declare("judge", ["ids"])
    add(ledger, [row(0, version=2), row(2, version=1), row(4, version=2), row(6, version=1)])
    assert take(ledger, "reward", Want(num_rows=3)) == [1, 3, 0]
    assert take(ledger, "judge", Want(num_rows=3)) == [0, 1, 2]


def test_what_is_given_back_is_first_in_line(ledger: Ledger) -> None:
    ledger.declare("reward", ["ids"])
    add(ledger, [row(n) for n in range(4)])
    lease = ledger.take("reward", "me", Want(num_rows=2), 0.0)
    assert lease is not None
    ledger.give_back(lease.number, "me", 0.0)
    assert take(ledger, "reward", Want(num_rows=3)) == [0, 1, 2]


def test_a_group_is_served_whole_whatever_order_its_rows_come_in(ledger: Ledger) -> None:
    """Neighbours are of different groups here, and are never taken for one."""
    ledger.declare("actor", ["ids"], group_size=2)
    add(ledger, [row(1), row(2), row(5), row(3)])
    lease = ledger.take("actor", "me", Want(num_rows=2), 0.0)
    assert lease is not None
    assert [r.id for r in lease.rows] == [row(2).id, row(3).id]
    assert take(ledger, "actor") == []


def test_the_first_ready_rows_in_a_row_are_no_group(ledger: Ledger) -> None:
    """The trap: of groups {0, 1, 2} and {3, 4, 5}, ready are 1 to 5; three neighbours are 1, 2 and 3."""
    ledger.declare("actor", ["ids", "reward"], group_size=3)
    add(ledger, [row(n, group_size=3) for n in range(6)])
    fill(ledger, [1, 2, 3, 4, 5])
    assert take(ledger, "actor", Want(num_rows=3)) == [3, 4, 5]
    assert take(ledger, "actor", Want(num_rows=3)) == []


@given(group_size=st.integers(1, 4), data=st.data())
def test_no_order_of_arrival_makes_a_group_of_neighbours(group_size: int, data: st.DataObject) -> None:
    """Rows come and become ready in any order, and go back when who holds them dies."""
    ledger = Ledger(NAMES)
    ledger.declare("actor", ["ids", "reward"], group_size=group_size, by_version=data.draw(st.booleans()))
    numbers = data.draw(st.permutations(range(3 * group_size)))
    indices = add(ledger, [row(n, version=n % 2, group_size=group_size) for n in numbers])
    num_left = len(indices)
    for index in data.draw(st.permutations(indices)):
        fill(ledger, [index])
        while (lease := ledger.take("actor", "me", Want(data.draw(st.integers(1, 9))), 0.0)) is not None:
            by_group = [r.id.group for r in lease.rows]
            siblings = [r.id.sibling for r in lease.rows]
            num_groups = len({*by_group})
            assert siblings == [*range(group_size)] * num_groups
            assert by_group == [g for g in dict.fromkeys(by_group) for _ in range(group_size)]
            if data.draw(st.booleans()):
                ledger.leave("me")
                break
            ledger.commit(lease.number, "me", 0.0)
            num_left -= len(lease.rows)
    while (lease := ledger.take("actor", "me", Want(99), 0.0)) is not None:
        ledger.commit(lease.number, "me", 0.0)
        num_left -= len(lease.rows)
    assert num_left == len(ledger.rows) == 0


def test_what_somebody_holds_can_be_looked_at_and_nothing_else(ledger: Ledger) -> None:
    ledger.declare("actor", ["ids"])
    ledger.declare("reward", ["ids"])
    add(ledger, [row(n) for n in range(3)])
    assert take(ledger, "actor", Want(2)) == [0, 1]
    assert [r.index for r in ledger.look("actor", [1, 0]).rows] == [1, 0]
    ledger.commit(1, "me", 0.0)
    for name, indices, missing in (
        ("actor", [2], 2),
        ("actor", [0], 0),
        ("reward", [0], 0),
        ("actor", [7], 7),
        ("actor", [], "none"),
    ):
        with pytest.raises(StreamError, match=f"row {missing} is not on lease to '{name}'"):
            ledger.look(name, indices)


def test_answers_to_held_out_prompts_are_whole_in_their_own_number_for_who_asks_for_them(
    ledger: Ledger,
) -> None:
    ledger.declare("actor", ["ids"], group_size=2)
    ledger.declare("reward", ["ids"], group_size=2, held_out_size=3)
    add(ledger, [NewRow(RequestId(-5, 7, sibling), 4) for sibling in range(2)])
    assert take(ledger, "reward") == []
    add(ledger, [NewRow(RequestId(-5, 7, 2), 4), row(0), row(1)])
    assert take(ledger, "actor", Want(num_rows=9)) == [3, 4]
    assert take(ledger, "reward", Want(groups=(GroupId(-5, 7),))) == [0, 1, 2]
    assert take(ledger, "reward") == [3, 4]


def test_chosen_groups_are_handed_out_together_or_not_at_all(ledger: Ledger) -> None:
    ledger.declare("actor", ["ids", "reward"], group_size=2)
    add(ledger, [row(n) for n in range(6)])
    want = Want(groups=(group(2), group(0)))
    assert take(ledger, "actor", want) == []
    fill(ledger, [0, 1, 2, 3, 4])
    assert take(ledger, "actor", want) == []
    assert "group 0/2: 2 of 2 rows are here, without reward" in ledger.waits_for("actor", want)
    fill(ledger, [5])
    assert take(ledger, "actor", want) == [4, 5, 0, 1]
    assert "2 on lease or consumed" in ledger.waits_for("actor", want)
    assert take(ledger, "actor", Want(num_rows=9)) == [2, 3]
    ledger.leave("me")
    assert take(ledger, "actor", Want(groups=(group(0),))) == [0, 1]


def test_rows_are_handed_out_up_to_a_number_of_tokens_and_at_least_one(ledger: Ledger) -> None:
    ledger.declare("critic", ["ids"])
    add(ledger, [row(n)._replace(num_tokens=num) for n, num in enumerate((50, 4, 5, 3))])
    assert take(ledger, "critic", Want(9, num_tokens=10)) == [0]
    assert take(ledger, "critic", Want(9, num_tokens=10)) == [1, 2]
    assert take(ledger, "critic", Want(9, at_least=2)) == []
    assert take(ledger, "critic", Want(9)) == [3]


def test_a_lease_ends_and_its_rows_go_to_the_next(ledger: Ledger) -> None:
    ledger.declare("reward", ["ids"], lease_s=5.0)
    add(ledger, [row(0)])
    lease = ledger.take("reward", "slow", Want(), 0.0)
    assert lease is not None
    ledger.renew(lease.number, "slow", 4.0)
    ledger.expire(8.9)
    assert take(ledger, "reward") == []
    assert ledger.next_end_s == 9.0
    ledger.expire(9.0)
    assert take(ledger, "reward", client="quick", now_s=9.0) == [0]
    with pytest.raises(StreamError, match=r"lease 1 is over.*get rows anew"):
        ledger.commit(lease.number, "slow", 9.0)
    ledger.commit(2, "quick", 9.5)
    assert not ledger.rows


def test_a_commit_needs_a_lease_of_ones_own(ledger: Ledger) -> None:
    ledger.declare("reward", ["ids"])
    add(ledger, [row(0)])
    with pytest.raises(StreamError, match="this client has no lease 1: get rows first"):
        ledger.commit(1, "me", 0.0)
    take(ledger, "reward")
    with pytest.raises(StreamError, match="this client has no lease 1"):
        ledger.commit(1, "you", 0.0)
    ledger.commit(1, "me", 0.0)
    with pytest.raises(StreamError, match="lease 1 is over"):
        ledger.commit(1, "me", 0.0)


@pytest.mark.parametrize(
    ("rows", "fragment"),
    [([row(0)], "row 0/0/0 is here already"), ([row(3), row(3)], "row 0/1/1 is here already")],
)
def test_a_row_comes_once(ledger: Ledger, rows: list[NewRow], fragment: str) -> None:
    add(ledger, [row(0)])
    with pytest.raises(StreamError, match=fragment):
        add(ledger, rows)
    assert [*ledger.rows] == [0]


def test_a_column_is_written_once_and_only_to_rows_that_are_here(ledger: Ledger) -> None:
    add(ledger, [row(0)])
    fill(ledger, [0])
    for indices, names, fragment in (
        ([0], ["reward"], "row 0 has reward already"),
        ([7], ["reward"], "row 7 is not here"),
        ([0, 0], ["reward"], "a row is named twice"),
        ([0], ["value"], "field 'value' is not declared; declared are ids, reward"),
    ):
        with pytest.raises(StreamError, match=fragment):
            fill(ledger, indices, names)


def test_consumers_are_declared_once_and_by_what_there_is(ledger: Ledger) -> None:
    ledger.declare("actor", ["ids"], group_size=2)
    ledger.declare("actor", ["ids"], group_size=2)
    for name, fields, fragment in (
        ("actor", ["ids"], "consumer 'actor' is declared already, and otherwise"),
        ("critic", ["values"], "field 'values' is not declared"),
    ):
        with pytest.raises(StreamError, match=fragment):
            ledger.declare(name, fields)
    with pytest.raises(StreamError, match="consumer 'critic' is not declared; declared are: actor"):
        take(ledger, "critic")
    ledger.declare("reward", ["ids"])
    with pytest.raises(StreamError, match="needs a group_size to ask for groups"):
        take(ledger, "reward", Want(groups=(group(0),)))


def test_cleared_groups_are_in_nobodys_line_and_on_nobodys_lease(ledger: Ledger) -> None:
    ledger.declare("actor", ["ids"], group_size=2)
    ledger.declare("reward", ["ids"])
    add(ledger, [row(n) for n in range(4)])
    lease = ledger.take("reward", "me", Want(num_rows=3), 0.0)
    assert ledger.clear([group(0), group(7)]) == [0, 1]
    assert not ledger.free  # somebody still reads the block
    assert take(ledger, "actor", Want(9)) == [2, 3]
    assert lease is not None
    ledger.give_back(lease.number, "me", 0.0)
    assert take(ledger, "reward", Want(9)) == [2, 3]
    assert ledger.clear([group(1), group(1)]) == [2, 3]


def test_who_asks_by_groups_does_not_keep_what_is_consumed(ledger: Ledger) -> None:
    """Else a run would keep every row that ever was."""
    for name, size in (("actor", 2), ("reward", 0)):
        ledger.declare(name, ["ids"], group_size=size)
    for number in range(0, 2000, 2):
        add(ledger, [row(number), row(number + 1)])
        if number % 4:
            lease = ledger.take("actor", "me", Want(groups=(group(number // 2),)), 0.0)
            assert lease is not None
            ledger.commit(lease.number, "me", 0.0)
        ledger.clear([group(number // 2)])
    assert sum(type(kept) is Row for kept in gc.get_objects()) < 500


def test_a_full_ledger_names_who_is_furthest_behind() -> None:
    ledger = Ledger(NAMES, max_rows=4, max_bytes=1000)
    assert ledger.slowest() == "0 rows, and no consumer is declared"
    ledger.declare("reward", ["ids"])
    ledger.declare("actor", ["reward"])
    add(ledger, [row(n) for n in range(4)])
    take(ledger, "reward", Want(3))
    ledger.commit(1, "me", 0.0)
    fill(ledger, [0, 1])
    take(ledger, "actor")
    assert not ledger.has_room(1, 10)
    assert ledger.slowest() == (
        "'actor' is 4 rows behind: 1 are ready for it, it holds 1, 2 lack columns or siblings"
    )
    for num_rows, num_bytes, fragment in ((5, 1, "5 rows at once, but max_rows = 4"), (1, 2000, "max_bytes")):
        with pytest.raises(StreamError, match=fragment):
            ledger.has_room(num_rows, num_bytes)


class Traffic(RuleBasedStateMachine):
    """Two consumers, one of them of groups; clients come, die and are late; a model counts what they got."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(NAMES)
        self.ledger.declare("reward", ["ids"], lease_s=10.0)
        self.ledger.declare("actor", ["ids", "reward"], group_size=2, lease_s=30.0, by_version=True)
        self.now_s, self.num_put = 0.0, 0
        self.leases: list[Lease] = []
        self.lacking: list[int] = []
        self.consumed: dict[str, list[int]] = {"reward": [], "actor": []}

    @rule(num=st.integers(1, 5), version=st.integers(0, 2))
    def put(self, num: int, version: int) -> None:
        rows = [row(n, version) for n in range(self.num_put, self.num_put + num)]
        self.lacking += add(self.ledger, rows)
        self.num_put += num

    @precondition(lambda self: self.lacking)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(self.lacking))
        self.lacking.remove(index)
        if index in self.ledger.rows:
            fill(self.ledger, [index])

    @rule(name=st.sampled_from(["reward", "actor"]), num=st.integers(1, 4), client=st.sampled_from("ab"))
    def take(self, name: str, num: int, client: str) -> None:
        if (lease := self.ledger.take(name, client, Want(num), self.now_s)) is not None:
            self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        try:
            self.ledger.commit(lease.number, lease.client, self.now_s)
        except StreamError:
            return
        self.consumed[lease.consumer.name] += [r.index for r in lease.rows]

    @rule(client=st.sampled_from("ab"))
    def die(self, client: str) -> None:
        self.ledger.leave(client)

    @rule(wait_s=st.sampled_from([1.0, 9.0, 31.0]))
    def wait(self, wait_s: float) -> None:
        self.now_s += wait_s
        self.ledger.expire(self.now_s)

    @invariant()
    def nothing_is_consumed_twice(self) -> None:
        for indices in self.consumed.values():
            assert len(indices) == len({*indices})

    @invariant()
    def what_is_not_consumed_by_all_is_here(self) -> None:
        gone = {*self.consumed["reward"]} & {*self.consumed["actor"]}
        assert {*self.ledger.rows} == {*range(self.num_put)} - gone

    def teardown(self) -> None:
        """Once all is there and nobody holds anything, everything can be consumed, groups whole."""
        if self.num_put % 2:
            self.put(1, 0)
        for index in self.lacking:
            fill(self.ledger, [index])
        self.ledger.expire(self.now_s + 100.0)
        for name in ("reward", "actor"):
            while (lease := self.ledger.take(name, "c", Want(3), self.now_s)) is not None:
                if name == "actor":
                    assert [r.id.sibling for r in lease.rows] == [0, 1]
                    assert len({r.id.group for r in lease.rows}) == 1
                self.ledger.commit(lease.number, "c", self.now_s)
                self.consumed[name] += [r.index for r in lease.rows]
            assert sorted(self.consumed[name]) == [*range(self.num_put)]
        assert not self.ledger.rows
        assert self.ledger.num_bytes == 0


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
