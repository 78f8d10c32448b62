"""A measured child process: it reports that it is ready, then replies to each JSON line with one line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Child:
    """A script of this folder, run with any Python interpreter."""

    def __init__(self, python: Path, script: str, arguments: Sequence[str]) -> None:
        """Returns once the child is ready; `ready` is its report."""
        self._script = script
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name(script)), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # progress bars
            text=True,
        )
        self.ready = self._reply()["ready"]

    def request(self, content: Any) -> dict[str, Any]:
        """The reply to a line. Raises RuntimeError if the child has exited."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(content) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def stop(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"{self._script} exited with code {code}; run it by itself")
        reply: dict[str, Any] = json.loads(line)
        return reply
