"""Processes that serve or use a stream, and can be killed: `python -m tests.stream.processes ROLE FOLDER`.

serve    serves a stream
produce  puts groups from 0 on and prints their numbers
consume  leases groups and prints them; commits after each line of stdin
drain    after a line of stdin: commits and prints groups until none come
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dora.stream.client import StreamClient
from dora.stream.metadata import BatchRequest, ConsumerDeclaration
from dora.stream.schema import TimedOut
from dora.stream.server import StreamServer
from dora.stream.storage import SampleStream

TASK = "reward"
NUM_GROUPS = 3  # of a put and of a get


class StreamProcess:
    """A process in one of these roles."""

    def __init__(self, role: str, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.stream.processes", role, str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def proceed(self) -> None:
        """Write a line to its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def kill(self) -> list[str]:
        """Kill it without warning; the complete lines that were not read."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._process.stdin, self._process.stdout as output:
            *lines, _ = output.read().split("\n")  # the last one is truncated
        return lines


def serve(folder: Path) -> None:
    from tests.stream.sample_rows import FIELDS

    stream = SampleStream(FIELDS, [ConsumerDeclaration(TASK, ["ids", "logprobs"])], folder)
    server = StreamServer(stream)
    print("ready", flush=True)
    server.run()


def produce(folder: Path) -> None:
    from tests.stream.sample_rows import put

    client = StreamClient(folder)
    for first in range(0, 1_000_000, NUM_GROUPS):
        numbers = range(first, first + NUM_GROUPS)
        put(client, *numbers)
        print(*numbers, flush=True)


def consume(folder: Path) -> None:
    from tests.stream.sample_rows import GROUP_SIZE, numbers

    client, request = StreamClient(folder), BatchRequest(NUM_GROUPS * GROUP_SIZE)
    while not isinstance(batch := client.get(TASK, request, wait_s=30.0), TimedOut):
        print("got", *numbers(batch), flush=True)
        sys.stdin.readline()
        client.commit(batch)
        print("committed", flush=True)


def drain(folder: Path) -> None:
    from tests.stream.sample_rows import GROUP_SIZE, numbers

    client, request = StreamClient(folder), BatchRequest(NUM_GROUPS * GROUP_SIZE)
    print("ready", flush=True)
    sys.stdin.readline()
    while not isinstance(batch := client.get(TASK, request, wait_s=1.0), TimedOut):
        found = numbers(batch)
        client.commit(batch)
        print(*found, flush=True)


if __name__ == "__main__":
    role, folder = sys.argv[1], Path(sys.argv[2])
    {"serve": serve, "produce": produce, "consume": consume, "drain": drain}[role](folder)
