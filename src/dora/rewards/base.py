"""Load a reward function and call it for the answers of a group.

A reward is `def reward(prompt, completion, **row) -> float`, or TRL's kind, which judges all
answers at once: `def reward(completions, **columns) -> list[float]`. Either may be async.
Whatever it does wrong becomes an `Outcome` with a named reason, never an exception: one bad
answer must not end a run. A call that hangs is ended from outside, with its process.
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
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from dora.errors import RewardError

RewardFunction = Callable[..., Any]
Prompt = str | Sequence[Mapping[str, str]]  # text, or the messages of a conversation


@dataclass(frozen=True)
class Answer:
    """One sibling's answer."""

    text: str
    token_ids: Sequence[int]


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


def judge(
    function: RewardFunction, prompt: Prompt, answers: Sequence[Answer], row: Mapping[str, Any]
) -> Iterator[Outcome]:
    """Outcomes of a group's answers in their order, the last one perhaps a failure.

    `row` are the other columns of the prompt's dataset row.
    """
    if takes_batches(function):
        yield from score_batch(function, prompt, answers, row)
        return
    for answer in answers:
        yield score(function, prompt, answer.text, row)


def takes_batches(function: RewardFunction) -> bool:
    """Whether it judges all answers of a group in one call, as TRL's do.

    It has a parameter `completions` or `prompts`, or takes everything by name.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without signature
        return False
    takes_all = [p.kind for p in parameters.values()] == [inspect.Parameter.VAR_KEYWORD]
    return takes_all or not {"completions", "prompts"}.isdisjoint(parameters)


def score(function: RewardFunction, prompt: Prompt, completion: str, row: Mapping[str, Any]) -> Outcome:
    """Judge one answer."""
    value = _call(function, prompt, completion, **row)
    return value if isinstance(value, Outcome) else _check(value)


def score_batch(
    function: RewardFunction, prompt: Prompt, answers: Sequence[Answer], row: Mapping[str, Any]
) -> list[Outcome]:
    """Judge a group in one call with TRL's arguments: every column is a list with a value per answer.

    Where the prompt is a conversation, so is each completion: one message of the assistant.
    """
    texts: list[Any] = [answer.text for answer in answers]
    if not isinstance(prompt, str):
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    values = _call(
        function,
        prompts=[prompt] * len(answers),
        completions=texts,
        completion_ids=[list(answer.token_ids) for answer in answers],
        **{column: [value] * len(answers) for column, value in row.items()},
    )
    if isinstance(values, Outcome):
        return [values]
    values = values.tolist() if hasattr(values, "tolist") else values  # an array or a tensor
    if not isinstance(values, list | tuple):
        return [_failure(values, f"a list of {len(answers)} finite floats, one per completion")]
    outcomes = [_check(value) for value in values]
    if len(outcomes) == len(answers):
        return outcomes
    reason = f"reward returned {len(outcomes)} values for {len(answers)} completions"
    return [Outcome(None, reason, f"{reason}; it must return one for each")]


def _call(function: RewardFunction, /, *args: Any, **kwargs: Any) -> Any:
    """What it returns, awaited if need be; an Outcome if it raises. Any column may be among `kwargs`."""
    try:
        value = function(*args, **kwargs)
        return asyncio.run(_wait_for(value)) if inspect.isawaitable(value) else value
    except (Exception, SystemExit) as error:
        return Outcome(None, f"reward raised {type(error).__name__}", traceback.format_exc())


async def _wait_for(value: Awaitable[Any]) -> Any:
    return await value


def _check(value: object) -> Outcome:
    """Accepts every finite real number, bool, numpy's and tensors of one number included."""
    real = value.item() if hasattr(value, "item") and getattr(value, "size", 1) != 0 else value
    if not isinstance(real, numbers.Real):
        return _failure(value, "a finite float")
    try:
        number = float(real)
    except OverflowError:  # of an int
        number = math.inf
    if not math.isfinite(number):
        return Outcome(
            None,
            f"reward returned {number}",
            f"the reward function returned {number}; it must return a finite float",
        )
    return Outcome(number)


def _failure(value: object, wanted: str) -> Outcome:
    kind = type(value).__name__
    return Outcome(
        None,
        f"reward returned {kind}",
        f"the reward function returned {value!r} ({kind}); it must return {wanted}",
    )
