"""Which groups are admitted, when, and at which version."""

from __future__ import annotations

import pytest
from tests.core.stations import Stations, is_work, limits

from dora.core.actions import Admit, Fetch
from dora.core.events import EngineLost, GroupScored, Loaded, PromptsFetched, Trained
from dora.core.records import GroupId, RequestId


def test_an_on_policy_run_admits_nothing_while_a_step_trains() -> None:
    run = Stations(limits(max_staleness=0))
    run.join(0, rows=8, slots=2)
    run.settle(but=lambda fact: isinstance(fact, Trained))
    assert run.state.training == 0
    assert [order.version for order in run.orders(Admit)] == [0, 0]


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3])
def test_at_most_s_plus_one_batches_are_admitted_at_one_version(max_staleness: int) -> None:
    run = Stations(limits(num_steps=9, max_staleness=max_staleness))
    run.join(0, rows=100, slots=9)
    run.settle(but=lambda fact: isinstance(fact, Trained))
    assert len(run.orders(Admit)) == 2 * (max_staleness + 1)


def test_no_more_is_admitted_than_all_steps_train() -> None:
    run = Stations(limits(num_steps=2, max_staleness=8))
    run.join(0, rows=100, slots=9)
    run.settle()
    assert len(run.orders(Admit)) == 4


def test_nothing_is_admitted_before_an_engine_holds_a_version() -> None:
    run = Stations(limits())
    run.join(0, rows=8, slots=1)
    run.settle(but=lambda fact: isinstance(fact, Loaded))
    assert run.orders(Admit) == []
    run.settle(but=is_work)
    assert len(run.orders(Admit)) == 2


def test_nothing_is_admitted_without_an_engine() -> None:
    run = Stations(limits())
    run.settle()
    assert run.orders(Admit) == []


def test_a_group_waits_for_the_newest_version_while_it_is_loaded() -> None:
    run = Stations(limits(max_staleness=1, num_steps=9))
    run.join(0, rows=2, slots=2)
    run.settle(but=lambda fact: fact in (Loaded(0, 1, "v1"), Trained(1)))
    num_admitted_before = len(run.orders(Admit))
    assert run.state.engines[0].free_rows == 2
    run.tell(Loaded(0, 1, "v1"))
    assert [order.version for order in run.orders(Admit)[num_admitted_before:]] == [1, 1]


def test_a_held_version_is_admitted_at_while_the_newest_finds_no_place() -> None:
    """Two full engines with one slot: rows that come free go on with version 0, and none stays empty."""
    run = Stations(limits(batch_size=1, max_staleness=8, num_steps=12))
    run.join(0, rows=2, slots=1)
    run.join(1, rows=3, slots=1)
    run.settle(but=is_work)
    run.finish(GroupId(0, 0))
    run.settle(but=lambda fact: is_work(fact) and not isinstance(fact, Trained))
    assert run.state.newest == 1
    assert [engine.wanted for engine in run.state.engines.values()] == [None, None]
    num_admitted_before = len(run.orders(Admit))
    on_the_other = next(r for r, request in run.state.requests.items() if request.engine == 1)
    run.finish(on_the_other.group)
    assert [order.version for order in run.orders(Admit)[num_admitted_before:]][:1] == [0]


def test_groups_are_admitted_in_the_order_of_the_dataset() -> None:
    run = Stations(limits(num_steps=6, max_staleness=1), num_prompts=5)
    run.join(0, rows=3, slots=2)
    run.settle()
    admitted = [(order.index, order.group) for order in run.orders(Admit)]
    assert admitted == [(k, GroupId(k // 5, k % 5)) for k in range(12)]


def test_groups_are_admitted_only_while_rows_are_free() -> None:
    run = Stations(limits(batch_size=8, group_size=2, max_staleness=2))
    run.join(0, rows=5, slots=1)
    run.settle(but=is_work)
    assert len(run.orders(Admit)) == 3
    assert run.state.engines[0].free_rows == 0


def test_a_filtered_group_is_replaced() -> None:
    run = Stations(limits(group_size=2, filter_groups=True))
    run.join(0, rows=8, slots=1)
    run.settle(but=lambda fact: isinstance(fact, GroupScored))
    assert len(run.orders(Admit)) == 2
    run.pending.remove(GroupScored(GroupId(0, 0), (0.0, 1.0)))
    run.tell(GroupScored(GroupId(0, 0), (1.0, 1.0)))
    assert [order.group for order in run.orders(Admit)[2:]] == [GroupId(0, 2)]
    assert run.state.num_filtered == 1


def test_a_failed_group_is_replaced() -> None:
    run = Stations(limits())
    run.join(0, rows=8, slots=1)
    run.settle(but=is_work)
    run.refuse(RequestId(0, 0, 0))
    assert [order.group for order in run.orders(Admit)[2:]] == [GroupId(0, 2)]
    assert run.state.num_failed == 1


def test_one_batch_of_prompts_is_kept_at_hand() -> None:
    run = Stations(limits(batch_size=3))
    assert run.orders(Fetch) == [Fetch(3)]
    run.tell(run.pending[-1])
    assert len(run.orders(Fetch)) == 1
    run.join(0, rows=2, slots=1)
    run.settle(but=lambda fact: is_work(fact) or isinstance(fact, PromptsFetched))
    assert run.orders(Fetch)[1:] == [Fetch(2)]


def test_the_loss_of_every_engine_stops_admission_until_one_joins() -> None:
    run = Stations(limits(max_staleness=2))
    run.join(0, rows=1, slots=1)
    run.settle(but=is_work)
    run.tell(EngineLost(0, "killed"))
    run.settle()
    assert len(run.orders(Admit)) == 1
    run.join(1, rows=1, slots=1)
    run.settle()
    assert run.core.done
