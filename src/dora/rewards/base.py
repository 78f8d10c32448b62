"""Load a reward function and call it for one answer.

A reward is `def reward(prompt, completion, **row) -> float`, sync or async. Whatever it does
wrong becomes an `Outcome` with a named reason, never an exception: one bad answer must not
end a run. A call that hangs is ended from outside, with its process.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from dora.errors import RewardError

RewardFunction = Callable[..., Any]


@dataclass(frozen=True)
class Outcome:
    """What became of one sibling: a reward, or a short `reason` why there is none and its `detail`."""

    reward: float | None
    reason: str = ""
    detail: str = ""


def load_reward(name: str) -> RewardFunction:
    """The function named "file.py:function" or "package.module:function". Raises RewardError."""
    source, colon, attribute = name.rpartition(":")
    if not (source and colon and attribute):
        raise RewardError(f"reward.function = {name!r}: must read file.py:function or module:function")
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except RewardError:
        raise
    except (Exception, SystemExit) as error:
        raise RewardError(
            f"reward.function = {name!r}: importing {source} raised {type(error).__name__}: {error}\n"
            f"{traceback.format_exc()}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise RewardError(
            f"reward.function = {name!r}: {source} has no function {attribute!r}; "
            f"it has {', '.join(there) or 'none'}"
        )
    found: RewardFunction = function
    return found


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise RewardError(f"reward.function: the file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"dora_reward_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # a reward may import what lies beside it
    spec.loader.exec_module(module)
    return module


def score(function: RewardFunction, prompt: str, completion: str, row: Mapping[str, Any]) -> Outcome:
    """Judge one answer; `row` are the other columns of its dataset row."""
    try:
        value = function(prompt, completion, **row)
        if inspect.isawaitable(value):
            value = asyncio.run(_wait_for(value))
    except (Exception, SystemExit) as error:
        return Outcome(None, f"reward raised {type(error).__name__}", traceback.format_exc())
    return _judge(value)


async def _wait_for(value: Awaitable[Any]) -> Any:
    return await value


def _judge(value: object) -> Outcome:
    """Accepts every finite real number, numpy's and bool included."""
    if not isinstance(value, numbers.Real):
        kind = type(value).__name__
        return Outcome(
            None,
            f"reward returned {kind}",
            f"the reward function returned {value!r} ({kind}); it must return a finite float",
        )
    number = float(value)
    if not math.isfinite(number):
        return Outcome(
            None,
            f"reward returned {number}",
            f"the reward function returned {number}; it must return a finite float",
        )
    return Outcome(number)
