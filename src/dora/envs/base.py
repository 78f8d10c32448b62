"""What an environment is: `reset` begins an episode, `step` answers an action.

Both are coroutines, so that one process plays many episodes at once. An object plays one episode
at a time; when that is over, `reset` begins the next.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dora.errors import EnvError
from dora.loading import load_attribute

Observation = str | Sequence[Mapping[str, str]]  # text, or messages with a "role" and a "content"


class Step(NamedTuple):
    """What an action led to. Nobody reads the observation of a step that is `done`."""

    observation: Observation
    reward: float
    done: bool


class Fault(Exception):
    """Why an episode cannot go on: a short sentence that names its group's end."""


class Environment:
    """What environments inherit from, or look like. The reward of an episode is the sum of its steps'."""

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Begin an episode: what the policy reads first, which is the prompt.

        `row` is the dataset's, `seed` the same for all siblings of a group: they should begin alike.
        """
        raise NotImplementedError

    async def step(self, action: str) -> Step:
        """Answer what the policy wrote in its turn; special tokens are left out."""
        raise NotImplementedError

    def close(self) -> None:
        """The object is not needed any more, perhaps in the middle of an episode or of a call."""


def load_environment(name: str) -> Callable[[], Environment]:
    """The class named "file.py:Class" or "package.module:Class", or a function that makes such objects.

    Raises EnvError where there is none, or where `reset` and `step` are no coroutines, or `close` is one.
    """
    make: Callable[[], Environment] = load_attribute(name, "env.environment", EnvError)
    if inspect.isclass(make):
        for method in ("reset", "step"):
            if not inspect.iscoroutinefunction(getattr(make, method, None)):
                raise EnvError(f"env.environment = {name!r}: it needs a method `async def {method}`")
        close = getattr(make, "close", None)
        if not callable(close) or inspect.iscoroutinefunction(close):
            raise EnvError(f"env.environment = {name!r}: it needs a method `def close`")
    return make


def let_go(environment: Environment) -> None:
    """Close an environment; what goes wrong in that is nobody's any more."""
    with contextlib.suppress(Exception, SystemExit):
        environment.close()


def reason_of(error: BaseException) -> str:
    """What an environment did, as its group's end has it."""
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
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise ValueError(f"the reward {reward!r} must be a finite number")
    return Step("" if done else check_observation(observation), float(reward), bool(done))


def _is_message(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    return isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
