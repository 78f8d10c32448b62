"""Who waits for a place to start in: a cluster may have none for a process that is to replace another.

Read from the processes alone, of which the orchestrator knows nothing until they have started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dora.core.waits import Wait
from dora.runtime.process import Pulse

PLACE = "a place to start in"


def waits_for_places(stations: Mapping[str, Sequence[Pulse]]) -> Iterator[Wait]:
    """`stations` are the processes of each at which the orchestrator's waits may end.

    A station waits for those to come once none of its processes is ready.
    """
    for station, pulses in stations.items():
        late = [pulse.worker for pulse in pulses if not pulse.is_ready and pulse.worker.awaits]
        if not any(pulse.is_ready for pulse in pulses):
            yield from (Wait(station, worker.name, "it starts") for worker in late if worker.name != station)
        yield from (Wait(worker.name, worker.awaits, PLACE) for worker in late)
