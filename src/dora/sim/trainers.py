"""The trainers of a simulated run, one after the other: each trains and publishes until it dies.

One that dies leaves a checkpoint that is at most so old; another begins there after a while.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from dora.core.actions import Attest, Publish, Train
from dora.core.events import Attested, Event, Published, StepFailed, Trained, TrainerLost, TrainerReplaced
from dora.core.records import GroupId
from dora.sim.loads import draw_kls
from dora.sim.rollout import digest_of

if TYPE_CHECKING:
    from dora.sim.world import World

MAX_REDONE = 3  # steps between two checkpoints


class Trainers:
    """What the trainer of the day does; the work of a dead one comes to nothing."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._of_versions = Random(f"versions {seed}")
        self._rng = Random(f"trainers {seed}")
        self._number = 0  # of the one that is there
        self._num_trained = self._num_known = 0  # steps, by it and by any
        self._checkpoint = 0  # that everybody may begin with
        self._made: dict[int, str] = {}  # digest of each version, as last made
        self._batches: list[tuple[GroupId, ...]] = []
        self._plan_loss()

    def die(self, from_step: int) -> None:
        """Everything dies; a new one begins with a checkpoint."""
        self._number += 1
        self._num_trained = self._num_known = self._checkpoint = from_step
        self._plan_loss()

    def train(self, order: Train) -> None:
        world, faults = self._world, self._world.config.faults
        world.truth.is_training = True
        world.truth.check_device()
        if order.step == len(self._batches):
            self._batches.append(order.groups)
        takes_s = world.luck.takes(world.config.step_s, faults.share_steps_slow)
        world.at(takes_s, self._trained, order.step, self._number)

    def publish(self, order: Publish | Attest) -> None:
        self._world.at(0.001, self._publish, order, self._number)

    def _trained(self, step: int, number: int) -> Event | None:
        world = self._world
        if number != self._number:
            return None
        world.truth.is_training = False
        if world.luck.fails(world.config.faults.share_steps_failed):
            return StepFailed(step, "simulated step failure")
        self._num_trained = step + 1
        self._num_known = max(self._num_known, self._num_trained)
        kls = draw_kls(self._of_versions, step, world.config.limits.max_staleness)
        return Trained(step, *world.drift.measure(), kls)

    def _publish(self, order: Publish | Attest, number: int) -> Event | None:
        if number != self._number:
            return None
        version = order.version
        if isinstance(order, Publish):
            self._made[version] = digest_of(version)
            return Published(version, digest_of(version))
        if version > self._checkpoint:  # which alone gives back what it was written of
            self._made[version] = f"{digest_of(version)} again"
        return Attested(version, self._made[version])

    def _plan_loss(self) -> None:
        interval_s = self._world.config.faults.trainer_loss_interval_s
        if interval_s is not None and not self._world.luck.is_healed:
            self._world.at(self._rng.expovariate(1.0 / interval_s), self._lose, self._number)

    def _lose(self, number: int) -> Event | None:
        """Its death is noticed at once; what it was at is void."""
        world = self._world
        if number != self._number or world.luck.is_healed:
            return None
        self._number += 1
        world.truth.is_training = False
        world.at(self._rng.uniform(0.0, 2.0) * world.config.return_s, self._replace, self._number)
        return TrainerLost("simulated loss")

    def _replace(self, number: int) -> Event | None:
        if number != self._number:
            return None
        first = min(self._num_trained, max(self._checkpoint, self._num_known - MAX_REDONE))
        from_step = self._checkpoint = self._rng.randint(first, self._num_trained)
        self._num_trained = from_step
        self._plan_loss()
        return TrainerReplaced(from_step, tuple(self._batches[from_step : self._num_known]))
