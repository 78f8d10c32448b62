"""A task's side of the sample stream: take rows, make columns of them, fill the columns in.

Data goes through the stream. The pipe to the driver has words only: at which groups the worker is, and
which it cannot do. What a worker has on lease when it dies is handed to another.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from dora.core.records import GroupId
from dora.errors import NoRoomError, RunError, StreamError
from dora.runtime import messages as m
from dora.runtime.process import Inbox, Outbox
from dora.stream import wire
from dora.stream.batch import Batch, Waited
from dora.stream.client import StreamClient
from dora.stream.feed import fill
from dora.stream.fields import Given, Packing
from dora.stream.lines import Want
from dora.stream.storage import STOPPED_S

WAIT_S = 60.0  # for the next rows; then they are asked for again


class NoResult(Exception):
    """A task cannot do the rows it was given: the groups fail as `reason`; `detail` is for a person."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail or reason


class Work(Protocol):
    """What one task does, in a process of its own."""

    def do(self, batch: Batch) -> Given:
        """The task's columns for all rows of the batch, which may be read until it returns.

        Raises NoResult, or whatever it likes: then each group of the batch is tried alone, and fails alone.
        """


@dataclass(frozen=True)
class ConsumerSpec:
    """What a worker needs: its consumer's name, the stream's folder, and how to `make` its work.

    `make` must be picklable; it is called in the worker with a function that starts the time of a call
    anew, for work that is many calls. `want` says how much is taken at once. On another machine the stream is
    at the TCP endpoint `far`, which comes with its token.
    """

    name: str
    stream: Path
    make: Callable[[Callable[[], None]], Work]
    want: Want
    far: tuple[str, str] | None = None

    def open_stream(self) -> StreamClient:
        """A client of the stream, from wherever this is called. Raises RunError."""
        endpoint, token = self.far or (wire.endpoint_of(self.stream), "")
        return StreamClient(endpoint, STOPPED_S, token)


def run_consumer(outbox: Outbox, inbox: Inbox, spec: ConsumerSpec) -> None:
    """Serve the consumer until the process is ended; `inbox` ends it with the driver."""
    outbox.beat()
    place = _Place(spec.name, outbox)
    work = spec.make(place.still)
    while True:
        try:
            with spec.open_stream() as client:
                outbox.send(m.Ready(client=client.owner))
                _serve_all(spec, work, client, place)
        except NoRoomError as error:
            outbox.send(m.NoRoom(str(error)))
            return
        except RunError:  # the storage has ended: another one takes its place, or the run ends
            place.go(())


class _Place:
    """Where the worker is, as the driver is told."""

    def __init__(self, name: str, outbox: Outbox) -> None:
        self._name, self._outbox = name, outbox
        self._groups: tuple[GroupId, ...] = ()

    def go(self, groups: tuple[GroupId, ...]) -> None:
        self._groups = groups
        self.still()

    def still(self) -> None:
        self._outbox.send(m.Working(self._groups))

    def give_up(self, error: Exception) -> None:
        if isinstance(error, NoResult):
            reason, detail = error.reason, error.detail
        else:
            reason = f"{self._name} raised {type(error).__name__}"
            detail = "".join(traceback.format_exception(error))
        self._outbox.send(m.Unable(self._groups, reason, detail))


def _serve_all(spec: ConsumerSpec, work: Work, client: StreamClient, place: _Place) -> NoReturn:
    """Until it cannot be done any more: raises RunError."""
    while True:
        batch = client.get(spec.name, spec.want, WAIT_S)
        if not isinstance(batch, Waited):
            _serve(spec, work, client, batch, place)
            place.go(())


def _serve(spec: ConsumerSpec, work: Work, client: StreamClient, batch: Batch, place: _Place) -> None:
    """Fill, then commit: who dies in between only has it done once more, and that comes too late to count.

    Raises NoRoomError; then its rows are still on lease, and go to another when the client leaves.
    """
    groups = tuple(dict.fromkeys(batch.groups))
    place.go(groups)
    try:
        columns = work.do(batch)
        Packing(client.fields, columns, len(batch))  # columns that do not fit are the task's failure, too
    except Exception as error:
        if len(groups) > 1:
            _serve_alone(spec, work, client, batch, place)
            return
        place.give_up(error)
    else:
        with contextlib.suppress(StreamError):  # the group has ended meanwhile, or somebody was faster
            fill(client, spec.stream, batch.indices, columns, place.still)
    with contextlib.suppress(StreamError):  # the lease has ended
        client.commit(batch)


def _serve_alone(spec: ConsumerSpec, work: Work, client: StreamClient, batch: Batch, place: _Place) -> None:
    """One group after the other, so that only those fail that must."""
    groups = dict.fromkeys(batch.groups)
    with contextlib.suppress(StreamError):
        client.give_back(batch)
    for group in groups:
        alone = client.get(spec.name, Want(groups=(group,)), 0.0)
        if not isinstance(alone, Waited):  # somebody else may have taken it
            _serve(spec, work, client, alone, place)
