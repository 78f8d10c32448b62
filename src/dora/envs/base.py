"""The protocol of environments: `reset` starts an episode, `step` executes an action.

Both are coroutines, so that one process can run many episodes concurrently. An object runs one episode at a
time; afterwards `reset` starts the next.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from dora.errors import EnvError
from dora.loading import load_attribute

MAX_SNAPSHOT_BYTES = 2**20
Observation = str | Sequence[Mapping[str, str]]  # text, or messages with a "role" and a "content"


class Step(NamedTuple):
    """The result of an action. The observation of a step that is `done` is not used."""

    observation: Observation
    reward: float
    done: bool


class Fault(Exception):
    """The episode cannot continue. The message is the reason with which its group fails: keep it short."""


class Environment:
    """Base class of environments; a class with the same methods works as well.

    The reward of an episode is the sum of the rewards of its steps.
    """

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Start an episode; the first observation is the prompt.

        `row` is the row of the dataset. `seed` is the same for all siblings of a group: they should start
        alike.
        """
        raise NotImplementedError

    async def step(self, action: str) -> Step:
        """Execute an action: the text of the policy's turn, without special tokens."""
        raise NotImplementedError

    def close(self) -> None:
        """Release resources; may be called in the middle of an episode or of a call."""


@runtime_checkable
class SupportsSnapshots(Protocol):
    """What an environment implements beside `Environment` so that its episodes survive the whole run.

    The run stores a snapshot after `reset` and after each step. If all of its processes are killed, the
    resumed run restores the last one.
    """

    def snapshot(self) -> bytes | None:
        """The state of the episode, at most MAX_SNAPSHOT_BYTES; None: it cannot be restored."""

    def restore(self, state: bytes) -> Awaitable[None] | None:
        """Continue the episode of a snapshot, in place of `reset`. It may be a coroutine."""


def load_environment(
    name: str, options: Mapping[str, Any] = {}, options_key: str = "env.options"
) -> Callable[[], Environment]:
    """Makes objects of the class "file.py:Class" or "package.module:Class", or by a function, with these
    keyword arguments.

    Raises EnvError if it does not exist or has other parameters, if it has no own `reset` or `step`, or one
    that is not a coroutine, if `close` is one, or if it has one of `snapshot` and `restore`, or a coroutine
    of this name.
    """
    make: Callable[..., Environment] = load_attribute(name, "env.environment", EnvError)
    if inspect.isclass(make):
        for method in ("reset", "step"):
            own = getattr(make, method, None)
            if own is getattr(Environment, method) or not inspect.iscoroutinefunction(own):
                raise EnvError(f"env.environment = {name!r}: it needs a method `async def {method}`")
        has_snapshots = any(hasattr(make, method) for method in ("snapshot", "restore"))
        for method in ("close", "snapshot", "restore") if has_snapshots else ("close",):
            plain = getattr(make, method, None)
            if inspect.iscoroutinefunction(plain):
                raise EnvError(
                    f"env.environment = {name!r}: its `{method}` must not be async: write `def {method}`"
                )
            if not callable(plain):
                also = "" if method == "close" else "also "
                raise EnvError(f"env.environment = {name!r}: it {also}needs a method `def {method}`")
    with contextlib.suppress(ValueError):  # it has no signature
        signature = inspect.signature(make)
        try:
            signature.bind(**options)
        except TypeError as error:
            raise EnvError(
                f"env.environment = {name!r}: it has the parameters {signature}, and {options_key} = "
                f"{dict(options)}: {error}; correct {options_key}"
            ) from error
    return partial(make, **options)


def take_snapshot(environment: Environment) -> bytes | None:
    """The state of an episode between two turns; None if it has none. Raises Fault if it is too large."""
    snapshot = environment.snapshot() if isinstance(environment, SupportsSnapshots) else None
    if snapshot is not None and len(snapshot) > MAX_SNAPSHOT_BYTES:
        raise Fault(
            f"environment snapshot has {len(snapshot)} bytes, more than {MAX_SNAPSHOT_BYTES}: keep less state"
        )
    return snapshot


async def restore_snapshot(environment: Environment, snapshot: bytes) -> None:
    """Restore an environment. Raises Fault if it has no snapshots any more."""
    if not isinstance(environment, SupportsSnapshots):
        raise Fault("environment has no method restore, and its episode was stored with a snapshot")
    restored: object = environment.restore(snapshot)
    if inspect.isawaitable(restored):
        restored = await restored
    if restored is not None:
        raise Fault("environment returned something from restore, which must return nothing")


def close_environment(environment: Environment) -> None:
    """Close an environment and ignore its errors."""
    with contextlib.suppress(Exception, SystemExit):
        environment.close()


def failure_reason(error: BaseException) -> str:
    """The reason with which a group fails because of an error of its environment."""
    return str(error) if isinstance(error, Fault) else f"environment raised {type(error).__name__}"


def check_observation(value: object) -> Observation:
    """The value, if it is text or messages. Raises TypeError."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(_is_message(message) for message in value):
        return value
    raise TypeError(
        f"the observation {value!r} is a {type(value).__name__}, must be a string, or messages such as "
        '[{"role": "user", "content": "..."}]'
    )


def check_step(value: object) -> Step:
    """The value, if it is (observation, reward, done). Raises TypeError or ValueError."""
    if not isinstance(value, tuple) or len(value) != len(Step._fields):
        raise TypeError(f"step returned {value!r}, must return (observation, reward, done)")
    observation, reward, done = value
    if not isinstance(done, bool | np.bool_):
        raise TypeError(f"done = {done!r} must be True or False; step returns (observation, reward, done)")
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise ValueError(f"the reward {reward!r} must be a finite number")
    return Step("" if done else check_observation(observation), float(reward), bool(done))


def _is_message(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    return isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
