"""The shared memory of migrations: the space of a slot, and processes that are late."""

from pathlib import Path

import numpy as np
import pytest
from tests.engine.tiny import make_request

from dora.engine.kv_transfer.atomic import compare_and_swap
from dora.engine.kv_transfer.handoff import HandoffMemory, HandoffSlots, HandoffState, Reservation


def test_a_word_changes_only_from_the_expected_value() -> None:
    words = np.array([7, 8, 9])
    assert compare_and_swap(words, 1, 8, 5)
    assert not compare_and_swap(words, 1, 8, 6)
    assert words.tolist() == [7, 5, 9]


def test_a_free_slot_is_used_again_and_other_slots_do_not_overlap(tmp_path: Path) -> None:
    slots = HandoffSlots(tmp_path)
    sizes = [40, 900, 40, 9000]
    taken = [slots.allocate(i, make_request(i, max_tokens=size)) for i, size in enumerate(sizes)]
    ends = [slot.offset + slot.num_bytes for slot in taken]
    assert [slot.offset for slot in taken] == [0, *ends[:-1]]
    assert taken[0].path.stat().st_size == ends[-1]
    slots.free(taken[0])
    assert slots.allocate(9, make_request(9, max_tokens=40)) == taken[0]
    assert taken[0].path.stat().st_size == ends[-1]


def test_a_process_sees_slots_that_were_added_after_it_mapped_the_file(tmp_path: Path) -> None:
    slots, engine = HandoffSlots(tmp_path), HandoffMemory()
    for number in range(3):
        slot = slots.allocate(number, make_request(number))
        engine.open(number, slot).reserve(Reservation(number, "a hash"))
        assert slots.open(number, slot).reservation() == Reservation(number, "a hash")


def test_a_process_that_is_late_cannot_change_the_next_migration_of_a_slot(tmp_path: Path) -> None:
    slots, request = HandoffSlots(tmp_path), make_request(1)
    slot = slots.allocate(1, request)
    late = HandoffMemory().open(1, slot)
    late.reserve(Reservation(0, ""))
    late.write_export(b"old")
    slots.free(slot)
    assert slots.allocate(2, request) == slot
    assert not late.commit_import()
    assert not late.withdraw_export()
    for call in (lambda: late.is_imported, late.read_export, late.reservation, lambda: late.publish([1])):
        with pytest.raises(OSError, match="migration 1 is over: its slot is that of 2"):
            call()
    with pytest.raises(OSError, match="is over"):
        late.write_export(b"older")
    now = slots.open(2, slot)
    assert (now.state, now.num_copied, now.published(0)) == (HandoffState.STARTED, 0, [])


def test_published_blocks_are_read_from_where_the_reader_is(tmp_path: Path) -> None:
    slots = HandoffSlots(tmp_path)
    slot = slots.allocate(0, make_request(0, max_tokens=200))
    source, destination = slots.open(0, slot), HandoffMemory().open(0, slot)
    source.publish([5, 3])
    source.publish([8])
    assert (destination.published(0), destination.published(2)) == ([5, 3, 8], [8])
    destination.set_num_copied(2)
    assert source.num_copied == 2


def test_a_snapshot_that_does_not_fit_is_rejected(tmp_path: Path) -> None:
    slots = HandoffSlots(tmp_path)
    slot = slots.allocate(0, make_request(0))
    handoff = slots.open(0, slot)
    handoff.reserve(Reservation(0, ""))
    with pytest.raises(OSError, match="there is room for"):
        handoff.write_export(bytes(slot.num_bytes))
    assert handoff.state is HandoffState.RESERVED


def test_a_slot_outside_the_file_is_rejected(tmp_path: Path) -> None:
    slot = HandoffSlots(tmp_path).allocate(0, make_request(0))
    with pytest.raises(OSError, match="the migration's slot ends at"):
        HandoffMemory().open(0, slot._replace(offset=slot.offset + 4096))
