"""Every error a user can meet; messages name the key, the value, the rule and the remedy.

DoraError
├── InputError    what was given is wrong: exit code 2, before anything runs
│   └── ConfigError, DataError, EnvError, ModelError, RewardError: which part of it
├── RunError      a run that cannot go on: exit code 1 (NoRoomError: a full disk, SilentError: one hangs)
├── StreamError   a request to the sample stream that cannot be; it is answered, and changes nothing
└── ServiceError  a request to the service of a run that cannot be; the same
"""

from __future__ import annotations

import re
from pathlib import Path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.jsonl)(?<!\.json)(?<!\.parquet)")


class DoraError(Exception):
    """Base of all errors DORA raises on purpose."""


class InputError(DoraError):
    """What the user gave is wrong; nothing has been started."""


class ConfigError(InputError):
    """A configuration key, its value, or a combination that cannot work."""


class DataError(InputError):
    """A dataset that is missing, empty or malformed."""


class EnvError(InputError):
    """An environment that cannot be loaded."""


class ModelError(InputError):
    """A model folder or checkpoint that cannot be used."""


class RewardError(InputError):
    """A reward function that cannot be loaded or does not answer as it must."""


class RunError(DoraError):
    """A run that cannot go on; what was written so far stays readable."""


class NoRoomError(RunError):
    """The file system of the sample stream is full: what was to be written is not there."""


class SilentError(RunError):
    """A process that the run cannot replace has shown no sign of life for too long."""


class StreamError(DoraError):
    """A request to the sample stream that cannot be; the stream is as it was."""


class ServiceError(DoraError):
    """A request to a run's service that cannot be; the run is as it was."""

    def __init__(self, status: int, message: str) -> None:
        """`status` is that of the HTTP answer; the message names the remedy."""
        super().__init__(message)
        self.status = status


def how_to_download(name: str, folder: Path, kind: str = "model") -> str:
    """What to add to a message where `folder` is missing; empty if `name` is none of the Hugging Face hub.

    `kind` is what the hub calls it: model or dataset.
    """
    if not _HUB_NAME.fullmatch(name):
        return ""
    of_kind = "" if kind == "model" else f"--repo-type {kind} "
    return (
        f"; DORA downloads nothing: if {name} is a {kind} of the Hugging Face hub, run "
        f"`hf download {name} {of_kind}--local-dir {folder}`"
    )
