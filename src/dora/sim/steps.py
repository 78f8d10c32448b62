"""Where the trainer stands, seen from outside the core: also when it dies, and another begins farther back.

Follows facts and orders alone and shares no code with the rules it checks.
"""

from __future__ import annotations

from dora.core.actions import Attest, Publish, Train
from dora.core.events import Published, TrainerReplaced
from dora.sim.seats import require


class Steps:
    """The part of the checker that knows steps by their number."""

    def __init__(self) -> None:
        self.num_trained = 0  # by the trainer that is there
        self.is_lost = False
        self.newest: int | None = None  # version published, since everything died last
        self.training: Train | None = None
        self.failed: Train | None = None  # to be repeated as it was
        self._num_known = 0  # steps that were trained before the trainer was lost

    @property
    def is_redo(self) -> bool:
        """Whether the next step was trained before by one that was lost."""
        return self.num_trained < self._num_known

    def trained(self) -> Train | None:
        """The order that has been carried out."""
        order, self.training = self.training, None
        self.num_trained += 1
        return order

    def has_failed(self) -> None:
        self.training, self.failed = None, self.training

    def published(self, fact: Published) -> None:
        self.newest = fact.version

    def lost(self) -> None:
        self.is_lost, self._num_known = True, max(self._num_known, self.num_trained)
        self.training = self.failed = None

    def replaced(self, fact: TrainerReplaced) -> None:
        self.is_lost, self.num_trained = False, fact.from_step

    def resumed(self, from_step: int) -> None:
        """Everything has died."""
        self.num_trained = self._num_known = from_step
        self.is_lost, self.newest = False, None
        self.training = self.failed = None

    def train(self, order: Train) -> None:
        require(not self.is_lost, f"step {order.step} begins without a trainer")
        require(self.training is None, f"step {order.step} begins during another")
        require(order.step == self.num_trained, f"step {order.step} is trained out of order")
        require(self.failed in (None, order), f"C2: step {order.step} is repeated with other groups")
        self.training, self.failed = order, None

    def publish(self, order: Publish) -> None:
        version = order.version
        require(version == self.num_trained, f"version {version} is published untrained")
        is_new = self.newest is None or version > self.newest
        require(is_new and not self.is_lost, f"C1: version {version} is published again")

    def attest(self, order: Attest) -> None:
        version = order.version
        require(version == self.num_trained, f"version {version} is attested untrained")
        is_out = self.newest is not None and version <= self.newest
        require(is_out and not self.is_lost, f"version {version} is attested and was never published")

    def end(self, num_steps: int) -> None:
        require(self.num_trained == num_steps, f"{self.num_trained} steps trained, of {num_steps}")
