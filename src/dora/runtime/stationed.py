"""The driver's side of stations beside the trainer: they hear what the trainer hears.

One that dies is replaced, and its successor told what is left to do: after the commit of a group nothing
may fail it. A critic cannot be replaced, for it has learnt; its death is the trainer's own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from dora.core.records import GroupId
from dora.runtime.beside import run_station
from dora.runtime.messages import (
    Accumulate,
    Filled,
    Gone,
    Learnt,
    Save,
    StationSpec,
    StepDone,
    TrainerSpec,
    TrainStep,
    WeightsPublished,
)
from dora.runtime.process import Told, Worker
from dora.runtime.workers import run_trainer

NAMES = {"reference": "reference station", "proximal": "proximal station", "values": "critic"}
MAX_DEATHS = 3  # of the stations for a column, before the run ends


class StationedTrainer(Worker):
    """A trainer that is told some columns; a step is done once a critic beside it has learnt, too.

    `company` are the processes that somebody has to watch, the trainer first.
    """

    def __init__(self, spec: TrainerSpec, device: str, told: Told, notice: Callable[[str], None]) -> None:
        """Its stations compute on `device`. `notice` gets a sentence for each that is replaced."""
        self._specs = {column: StationSpec(column, spec, device) for column in spec.columns}
        self._all_told, self._notice = told, notice
        self._stations = {column: self._start(column) for column in spec.columns}
        super().__init__("trainer", run_trainer, spec, told)
        self.company: list[Worker] = [self, *self._stations.values()]
        self._num_deaths: Counter[str] = Counter()
        self._heard: dict[int, dict[GroupId, Accumulate]] = defaultdict(dict)  # by stations, of each step
        self._filled: dict[str, set[GroupId]] = defaultdict(set)  # of those, by column
        self._published: WeightsPublished | None = None
        self._learnt: Learnt | None = None
        self._done: StepDone | None = None

    def send(self, message: object) -> None:
        """Pass on what stations hear of a trainer's orders."""
        super().send(message)
        match message:
            case Accumulate(step, group):
                self._commit(step, [group])
            case TrainStep(step, groups):
                self._commit(step, groups)  # of one that is redone nothing was said before
                self._tell(message)
            case Save():
                self._tell(message)

    def hear(self, worker: Worker, message: object) -> object | None:
        """What there is to be told now that one of the company has said this; None: nothing."""
        match message:
            case Filled(column, group):
                self._filled[column].add(group)
                return None
            case Gone():
                if self._replaces(worker):
                    return None
                self.kill()  # it would wait for columns, and for the critic's part of a checkpoint
                return message
            case WeightsPublished():
                self._begin(message)
                return message
            case Learnt():
                self._learnt = message  # the trainer may need several tries at its step
            case StepDone() if "values" in self._specs:
                self._done = message
            case StepDone(step):
                self._forget(step + 1)
                return message
            case _:
                return message
        learnt, done = self._learnt, self._done
        if learnt is None or done is None:
            return None
        self._learnt = self._done = None
        return replace(done, metrics=done.metrics | learnt.metrics)

    def can_replace(self, worker: Worker) -> bool:
        """Whether a successor could do all that this one of the company does."""
        column = self._column_of(worker)
        return column is not None and column != "values" and self._num_deaths[column] < MAX_DEATHS

    @property
    def can_refill(self) -> bool:
        """Whether its columns can be made again: a critic has learnt meanwhile."""
        return "values" not in self._specs

    def refill(self) -> None:
        """Other stations make their columns again, for another storage has rows without them."""
        self._filled.clear()
        for column, worker in [*self._stations.items()]:
            worker.kill()
            self._succeed(column, worker)

    def _column_of(self, worker: Worker) -> str | None:
        return next((column for column, own in self._stations.items() if own is worker), None)

    def _start(self, column: str) -> Worker:
        return Worker(NAMES[column], run_station, self._specs[column], self._all_told)

    def _commit(self, step: int, groups: Sequence[GroupId]) -> None:
        for group in groups:
            if group not in self._heard[step]:
                self._heard[step][group] = Accumulate(step, group)
                self._tell(self._heard[step][group])

    def _begin(self, published: WeightsPublished) -> None:
        """Steps before this version are over."""
        self._published = published
        self._forget(published.version)
        self._tell(published)

    def _forget(self, before: int) -> None:
        """Earlier steps are over."""
        for step in [step for step in self._heard if step < before]:
            for group in self._heard.pop(step):
                for filled in self._filled.values():
                    filled.discard(group)

    def _replaces(self, worker: Worker) -> bool:
        """Start a successor, if there may be one."""
        column = self._column_of(worker)
        if column is None or not self.can_replace(worker):
            return False
        self._num_deaths[column] += 1
        self._notice(f"{worker.how_it_ended}; it is replaced")
        self._succeed(column, worker)
        return True

    def _succeed(self, column: str, worker: Worker) -> None:
        """Start another one, and tell it what is left to do."""
        new = self._stations[column] = self._start(column)
        self.company[self.company.index(worker)] = new
        if self._published is not None:
            new.send(self._published)
        for order in [order for orders in self._heard.values() for order in orders.values()]:
            if order.group not in self._filled[column]:
                new.send(order)

    def _tell(self, message: object) -> None:
        for station in self._stations.values():
            station.send(message)
