"""A test executes actions and waits for events, in the same way on a simulated and on a real executor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from tests.runtime.tiny import PROMPTS, write_task

from dora.config import load
from dora.core.actions import Action, Drop, FetchPrompts, Load, Publish
from dora.core.events import EngineJoined, Event, Loaded, PromptsFetched, Published
from dora.core.types import GroupId, Limits, RequestId
from dora.runtime.executor import ProcessExecutor
from dora.runtime.main_loop import Executor
from dora.runtime.run_setup import RunSetup
from dora.sim.random_config import WorldConfig
from dora.sim.world import World

NUM_PROMPTS = len(PROMPTS)
LIMITS = Limits(num_steps=3, batch_size=2, group_size=2, max_staleness=2)
ROWS, SLOTS, MAX_LENGTH = 4, 3, 24
TIMEOUT_S = 60.0  # on the clock of the executor
EventT = TypeVar("EventT")


def simulated(folder: Path) -> Executor:
    """A simulated world without faults."""
    engines = ((ROWS, SLOTS), (ROWS, SLOTS))
    config = WorldConfig(
        limits=LIMITS,
        num_prompts=NUM_PROMPTS,
        engines=engines,
        seconds_per_token=(0.1, 0.1),
        max_length=MAX_LENGTH,
        tail=0.5,
        length_family="constant",
        reward_s=0.01,
        step_s=0.1,
        load_s=0.01,
        scoring_failure_rate=0.0,
        request_failure_rate=0.0,
        equal_reward_rate=0.0,
        engine_loss_interval_s=None,
        engine_restart_s=1.0,
    )
    return World(config, seed=0)


def processes(folder: Path, *changes: str) -> Executor:
    """Processes whose engines have joined."""
    config = load.read_config(write_task(folder), [f"run.steps={LIMITS.num_steps}", *changes])
    (folder / "run").mkdir()
    executor = ProcessExecutor(RunSetup.make(config, folder / "run"), notice=print)
    while executor.not_started():
        executor.poll()
    executor.begin_clock()
    executor.join_all()
    return executor


def ray_actors(folder: Path) -> Executor:
    """Ray actors on two nodes whose engines have joined."""
    from tests.runs.ray_cluster import two_nodes

    return processes(folder, "runtime.kind=ray", f"ray.address={two_nodes().address}")


MAKERS: dict[str, Callable[[Path], Executor]] = {"simulated": simulated, "processes": processes}
if find_spec("ray") is not None:
    MAKERS["ray"] = ray_actors


class ExecutorHarness:
    """An executor with two engines that have joined."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._unread: deque[Event] = deque()
        self._version = 0
        self.wait_for(EngineJoined, 2)

    @property
    def now(self) -> float:
        return self.executor.now

    def execute(self, action: Action) -> None:
        self.executor.execute(action)

    def next_event(self, until: float) -> Event | None:
        """The next event of the executor; None once `now` has reached `until`."""
        while (event := self.executor.next_event(until)) is None:
            if self.now >= until:
                return None
        return event

    def wait_for(self, kind: type[EventT], count: int = 1) -> list[EventT]:
        """The next events of a type. Other events stay unread."""
        found: list[EventT] = []
        kept: deque[Event] = deque()
        deadline_s = self.now + TIMEOUT_S
        while len(found) < count:
            event = self._unread.popleft() if self._unread else self.next_event(deadline_s)
            assert event is not None, f"no {kind.__name__} within {TIMEOUT_S:g} s"
            if isinstance(event, kind):
                found.append(event)
            else:
                kept.append(event)
        self._unread.extendleft(reversed(kept))
        return found

    def events_until(self, now: float) -> list[Event]:
        """All unread events, and those that arrive until `now`."""
        while (event := self.next_event(now)) is not None:
            self._unread.append(event)
        events = list(self._unread)
        self._unread.clear()
        return events

    def fetch(self, count: int) -> tuple[GroupId, ...]:
        """Fetch new groups."""
        self.execute(FetchPrompts(count))
        return self.wait_for(PromptsFetched)[0].groups

    def publish(self) -> Published:
        """Publish the trainer's weights as a new version."""
        self.execute(Publish(self._version))
        self._version += 1
        return self.wait_for(Published)[0]

    @contextmanager
    def loaded(self, *engines: int) -> Iterator[Published]:
        """A new version that these engines hold inside the context."""
        published = self.publish()
        for engine in engines:
            self.execute(Load(engine, published.version))
        self.wait_for(Loaded, len(engines))
        yield published
        for engine in engines:
            self.execute(Drop(engine, published.version))


def siblings(*groups: GroupId) -> tuple[RequestId, ...]:
    """All requests of these groups."""
    return tuple(RequestId(*group, k) for group in groups for k in range(LIMITS.group_size))
