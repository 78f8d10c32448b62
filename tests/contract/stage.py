"""Hands on a stage: a test gives orders and hears facts, and sees no difference between the two kinds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from tests.runtime.tiny import write_task

from dora import settings
from dora.core.actions import Drop, Fetch, Load, Publish
from dora.core.events import EngineJoined, Event, Loaded, PromptsFetched, Published
from dora.core.records import GroupId, Limits, RequestId
from dora.runtime.drive import Hands
from dora.runtime.local import LocalHands
from dora.runtime.plan import Plan
from dora.sim.models import WorldConfig
from dora.sim.world import World

LIMITS = Limits(num_steps=3, batch_size=2, group_size=2, max_staleness=2)
ROWS, SLOTS, MAX_LENGTH = 4, 3, 24
DEADLINE_S = 60.0  # on the clock of the hands
Fact = TypeVar("Fact")


def simulated(folder: Path) -> Hands:
    """A simulated world without mishaps."""
    engines = ((ROWS, SLOTS), (ROWS, SLOTS))
    config = WorldConfig(
        limits=LIMITS,
        num_prompts=7,
        engines=engines,
        speeds=(0.1, 0.1),
        max_length=MAX_LENGTH,
        tail=0.5,
        family="constant",
        reward_s=0.01,
        step_s=0.1,
        load_s=0.01,
        share_failed=0.0,
        share_refused=0.0,
        share_flat=0.0,
        loss_interval_s=None,
        return_s=1.0,
    )
    return World(config, seed=0)


def real(folder: Path, *changes: str) -> Hands:
    """Processes, which are ready and have joined."""
    config = settings.read(write_task(folder), [f"run.steps={LIMITS.num_steps}", *changes])
    (folder / "run").mkdir()
    hands = LocalHands(Plan.make(config, folder / "run"), notice=print)
    hands.wait_until_ready()
    hands.join_all()
    return hands


def on_ray(folder: Path) -> Hands:
    """Actors, which are ready and have joined, on two nodes."""
    from tests.runtime.nodes import two_nodes

    return real(folder, "runtime.kind=ray", f"ray.address={two_nodes().address}")


MAKERS: dict[str, Callable[[Path], Hands]] = {"simulated": simulated, "real": real}
if find_spec("ray") is not None:
    MAKERS["ray"] = on_ray


class Stage:
    """One set of hands with both engines joined."""

    def __init__(self, hands: Hands) -> None:
        self.hands = hands
        self._unread: deque[Event] = deque()
        self._version = 0
        self.hear(EngineJoined, 2)

    def hear(self, kind: type[Fact], count: int = 1) -> list[Fact]:
        """The next facts of a kind; the others wait until somebody asks for them."""
        found: list[Fact] = []
        kept: deque[Event] = deque()
        deadline_s = self.hands.now + DEADLINE_S
        while len(found) < count:
            event = self._unread.popleft() if self._unread else self.hands.next_fact(deadline_s)
            assert event is not None, f"{kind.__name__} is not told"
            if isinstance(event, kind):
                found.append(event)
            else:
                kept.append(event)
        self._unread.extendleft(reversed(kept))
        return found

    def heard_until(self, now: float) -> list[Event]:
        """All facts told until then, and those nobody has asked for."""
        while (event := self.hands.next_fact(now)) is not None:
            self._unread.append(event)
        facts = list(self._unread)
        self._unread.clear()
        return facts

    def fetch(self, count: int) -> tuple[GroupId, ...]:
        """New groups."""
        self.hands.perform(Fetch(count))
        return self.hear(PromptsFetched)[0].groups

    def publish(self) -> Published:
        """Publish the trainer's weights under a new number."""
        self.hands.perform(Publish(self._version))
        self._version += 1
        return self.hear(Published)[0]

    @contextmanager
    def holding(self, *engines: int) -> Iterator[Published]:
        """A new version, held by these engines inside the context."""
        published = self.publish()
        for engine in engines:
            self.hands.perform(Load(engine, published.version))
        self.hear(Loaded, len(engines))
        yield published
        for engine in engines:
            self.hands.perform(Drop(engine, published.version))


def siblings(*groups: GroupId) -> tuple[RequestId, ...]:
    """All requests of groups."""
    return tuple(RequestId(*group, k) for group in groups for k in range(LIMITS.group_size))
