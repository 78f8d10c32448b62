"""What is reserved for a process on a cluster."""

from dora.runtime.needs import Need, sum_of


def test_a_process_that_asks_for_nothing_leaves_every_cpu_to_others() -> None:
    """Placement groups have no empty bundle; a thousandth of a CPU would keep an engine off a full node."""
    storage, engine = Need("storage", 0.0), Need("engine", 3.0)
    assert "CPU" not in storage.bundle
    assert storage.bundle
    assert sum_of([storage, engine]) == engine.bundle == {"CPU": 3.0}
