"""Processes that serve or consume a stream, and can be killed.

python peers.py serve FOLDER       a recorded stream, until it is killed
python peers.py consume FOLDER     says which rows it got, waits for a line, commits, says so; again
python peers.py hurry FOLDER       waits for a line; gets, commits, says which rows; again, until none come
python peers.py produce FOLDER     puts rows from 0 on, says which; again, without waiting for anybody
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dora.stream import wire
from dora.stream.batch import Waited
from dora.stream.client import StreamClient
from dora.stream.lines import Want
from dora.stream.server import Server
from dora.stream.stream import Stream

TASK = "reward"


class Peer:
    """One such process and what it says."""

    def __init__(self, what: str, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.stream.peers", what, str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tell(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def kill(self) -> list[str]:
        """Without a chance to say goodbye; the lines it had said that were not heard yet."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._process.stdin, self._process.stdout as said:
            *lines, _ = said.read().split("\n")  # the last one is cut
        return lines


def serve(folder: Path) -> None:
    from tests.stream.rows import FIELDS

    server = Server(Stream(FIELDS, folder, record=folder / "samples.sqlite"), [wire.endpoint_of(folder)])
    print("ready", flush=True)
    server.run()


def produce(folder: Path, num_rows: int) -> None:
    from tests.stream.rows import columns, row

    client = StreamClient(wire.endpoint_of(folder))
    for first in range(0, 1_000_000, num_rows):
        which = [*range(first, first + num_rows)]
        client.put([row(n) for n in which], columns(which))
        print(*which, flush=True)


def hurry(folder: Path, num_rows: int) -> None:
    from tests.stream.rows import numbers

    client = StreamClient(wire.endpoint_of(folder))
    print("ready", flush=True)
    sys.stdin.readline()
    while not isinstance(batch := client.get(TASK, Want(num_rows), wait_s=1.0), Waited):
        got = numbers(batch)
        client.commit(batch)
        print(*got, flush=True)


def consume(folder: Path, num_rows: int) -> None:
    from tests.stream.rows import numbers

    client = StreamClient(wire.endpoint_of(folder))
    while not isinstance(batch := client.get(TASK, Want(num_rows), wait_s=30.0), Waited):
        print("got", *numbers(batch), flush=True)
        sys.stdin.readline()
        client.commit(batch)
        print("committed", flush=True)


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    if what == "serve":
        serve(where)
    else:
        {"consume": consume, "hurry": hurry, "produce": produce}[what](where, 3)
