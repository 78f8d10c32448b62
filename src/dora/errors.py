"""Every error a user can meet; messages name the key, the value, the rule and the remedy.

DoraError
├── InputError    the input is wrong: exit code 2, nothing has been started
│   └── ConfigError, DataError, EnvError, ModelError, RewardError: which part of it
├── RunError      the run cannot continue: exit code 1
│   └── StorageFullError (a full file system), WorkerTimeoutError (an unresponsive process)
├── StreamError   a request to the sample stream is refused; the stream is unchanged
└── ServiceError  a request to the service of a run is refused; the run is unchanged
"""

from __future__ import annotations

import re
from pathlib import Path

_HUB_NAME = re.compile(
    r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.jsonl)(?<!\.json)(?<!\.csv)(?<!\.parquet)"
)


class DoraError(Exception):
    """Base of all errors DORA-RL raises on purpose."""


class InputError(DoraError):
    """The user's input is wrong; nothing has been started."""


class DamagedRunError(InputError):
    """The files of a run are not as the run wrote them."""


class FinishedRunError(InputError):
    """A run that should resume has finished."""


class ConfigError(InputError):
    """A configuration key, its value, or a combination that cannot work."""


class DataError(InputError):
    """A dataset that is missing, empty or malformed."""


class EnvError(InputError):
    """An environment that cannot be loaded."""


class ModelError(InputError):
    """A model folder or checkpoint that cannot be used."""


class RewardError(InputError):
    """A reward function that cannot be loaded, or that returns no reward."""


class RunError(DoraError):
    """The run cannot continue; what it has written stays readable."""


class StorageFullError(RunError):
    """The file system of the sample stream is full: nothing was written."""


class WorkerTimeoutError(RunError):
    """A process that the run cannot replace has sent no heartbeat within its timeout."""


class StreamError(DoraError):
    """A request to the sample stream is refused; the stream is unchanged."""


class ServiceError(DoraError):
    """A request to a run's service is refused; the run is unchanged."""

    def __init__(self, status: int, message: str, kind: str = "") -> None:
        """`status` is the HTTP status code of the response; the message names the remedy.

        `kind` is the `type` of the error in the response; "run_finished", "run_stopped" or "run_failed" after
        the end of the run.
        """
        super().__init__(message)
        self.status = status
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")


def is_hub_name(name: str) -> bool:
    """Whether it can be the name of a repository on the Hugging Face hub."""
    return _HUB_NAME.fullmatch(name) is not None


def download_hint(name: str, folder: Path, kind: str = "model", revision: str | None = None) -> str:
    """The remedy for a missing `folder`; empty unless `name` can be a Hugging Face hub name.

    `kind` is the type of repository on the hub: model or dataset.
    """
    if not is_hub_name(name):
        return ""
    options = ("" if kind == "model" else f"--repo-type {kind} ") + (
        f"--revision {revision} " if revision else ""
    )
    return (
        f"; if {name} is a {kind} of the Hugging Face hub, run "
        f"`hf download {name} {options}--local-dir {folder}`"
    )


def not_utf8(error: UnicodeDecodeError) -> str:
    """The end of a message about a line that is not UTF-8."""
    byte = error.object[error.start]
    return (
        f"is not UTF-8 (byte 0x{byte:02x} in column {error.start + 1}); convert the file, for example with "
        "iconv -f latin1 -t utf-8"
    )
