"""A process that is measured on its own: it says that it is ready, then answers each JSON line with one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Child:
    """A script beside this one, run by any Python."""

    def __init__(self, python: Path, script: str, arguments: Sequence[str]) -> None:
        """Returns when the child is ready; `ready` is what it said."""
        self._script = script
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name(script)), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # progress bars
            text=True,
        )
        self.ready = self._answer()["ready"]

    def ask(self, question: Any) -> dict[str, Any]:
        """Raises RuntimeError if the child has ended."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        """End the process, which may be waiting or busy."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"{self._script} ended with code {code}; run it by itself")
        answer: dict[str, Any] = json.loads(line)
        return answer
