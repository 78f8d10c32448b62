"""Processes that serve or consume a stream, and can be killed.

python peers.py serve FOLDER       a recorded stream, until it is killed
python peers.py consume FOLDER     says which rows it got, waits for a line, commits, says so; again
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

    def kill(self) -> None:
        """Without a chance to say goodbye."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def serve(folder: Path) -> None:
    from tests.stream.rows import FIELDS

    server = Server(Stream(FIELDS, folder, record=folder / "samples.sqlite"), [wire.endpoint_of(folder)])
    print("ready", flush=True)
    server.run()


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
    serve(where) if what == "serve" else consume(where, 3)
