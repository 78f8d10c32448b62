"""Load a reward function and call it for the answers of a group.

A reward is `def reward(prompt, completion, **row) -> float`, or TRL's kind, which judges all
answers at once: `def reward(completions, **columns) -> list[float]`. Either may be async, or an object
that a class makes of options. Whatever it does wrong becomes an `Outcome` with a named reason, never an
exception: one bad answer must not end a run. A call that hangs is ended from outside, with its process.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dora.errors import RewardError
from dora.loading import load_attribute
from dora.rewards.signature import called, check_signature, takes_batches

RewardFunction = Callable[..., Any]
Prompt = str | Sequence[Mapping[str, str]]  # text, or the messages of a conversation


@dataclass(frozen=True)
class Answer:
    """One sibling's answer to its prompt; `row` are the other columns of the prompt's dataset row."""

    prompt: Prompt
    text: str
    token_ids: Sequence[int]
    row: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What became of one sibling: a reward, or a short `reason` why there is none and its `detail`."""

    reward: float | None
    reason: str = ""
    detail: str = ""


def load_reward(
    name: str,
    key: str = "reward.function",
    options: Mapping[str, Any] | None = None,
    columns: Sequence[str] | None = None,
) -> RewardFunction:
    """The function named "file.py:function" or "package.module:function", or what a class so named makes.

    A class is called once, with `options`; its instance is the reward. `key` is the setting that names it.
    `columns` are those of the dataset, if they are known. Raises RewardError, also for a function that cannot
    be called with them.
    """
    reward = _load(name, key, options)
    check_signature(reward, f"{key} = {name!r}", columns)
    return reward


def _load(name: str, key: str, options: Mapping[str, Any] | None) -> RewardFunction:
    found = load_attribute(name, key, RewardError)
    if not isinstance(found, type):
        if options:
            raise RewardError(f"{key} = {name!r}: a function takes no options; remove them, or name a class")
        function: RewardFunction = found
        return function
    try:
        made = found(**(options or {}))
    except RewardError:
        raise
    except Exception as error:
        raise RewardError(
            f"{key} = {name!r}: making one with the options {dict(options or {})} raised "
            f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        ) from error
    if not callable(made):
        raise RewardError(f"{key} = {name!r}: nobody can call what it makes; give the class a __call__")
    judge: RewardFunction = made
    return judge


def judge(function: RewardFunction, answers: Sequence[Answer]) -> Iterator[Outcome]:
    """Outcomes of answers in their order, the last one perhaps a failure."""
    if takes_batches(function):
        yield from score_batch(function, answers)
        return
    for answer in answers:
        yield score(function, answer.prompt, answer.text, answer.row)


def score(function: RewardFunction, prompt: Prompt, completion: str, row: Mapping[str, Any]) -> Outcome:
    """Judge one answer."""
    value = _call(function, prompt, completion, **row)
    return value if isinstance(value, Outcome) else _check(value, called(function))


def score_batch(function: RewardFunction, answers: Sequence[Answer]) -> list[Outcome]:
    """Judge answers in one call with TRL's arguments: every column is a list with a value per answer.

    Where the prompt is a conversation, so is the completion: one message of the assistant. A column that
    only some rows have is None for the others.
    """
    columns = dict.fromkeys(column for answer in answers for column in answer.row)
    values = _call(
        function,
        prompts=[answer.prompt for answer in answers],
        completions=[_completion(answer) for answer in answers],
        completion_ids=[list(answer.token_ids) for answer in answers],
        **{column: [answer.row.get(column) for answer in answers] for column in columns},
    )
    if isinstance(values, Outcome):
        return [values]
    values = values.tolist() if hasattr(values, "tolist") else values  # an array or a tensor
    if not isinstance(values, list | tuple):
        return [
            _failure(values, called(function), f"a list of {len(answers)} finite floats, one per completion")
        ]
    outcomes = [_check(value, called(function)) for value in values]
    if len(outcomes) == len(answers):
        return outcomes
    reason = f"reward returned {len(outcomes)} values for {len(answers)} completions"
    return [Outcome(None, reason, f"{reason}; it must return one for each")]


def _completion(answer: Answer) -> str | list[dict[str, str]]:
    is_text = isinstance(answer.prompt, str)
    return answer.text if is_text else [{"role": "assistant", "content": answer.text}]


def _call(function: RewardFunction, /, *args: Any, **kwargs: Any) -> Any:
    """What it returns, awaited if need be; an Outcome if it raises. Any column may be among `kwargs`."""
    try:
        value = function(*args, **kwargs)
        return asyncio.run(_wait_for(value)) if inspect.isawaitable(value) else value
    except (Exception, SystemExit) as error:
        return Outcome(None, f"reward raised {type(error).__name__}", traceback.format_exc())


async def _wait_for(value: Awaitable[Any]) -> Any:
    return await value


def _check(value: object, who: str) -> Outcome:
    """Accepts every finite real number, bool, numpy's and tensors of one number included."""
    real = value.item() if hasattr(value, "item") and getattr(value, "size", 1) != 0 else value
    if not isinstance(real, numbers.Real):
        return _failure(value, who, "a finite float")
    try:
        number = float(real)
    except OverflowError:  # of an int
        number = math.inf
    if not math.isfinite(number):
        return Outcome(
            None,
            f"reward returned {number}",
            f"the reward function {who} returned {number}; it must return a finite float",
        )
    return Outcome(number)


def _failure(value: object, who: str, wanted: str) -> Outcome:
    kind = type(value).__name__
    missing = "; is a `return` missing?" if value is None else ""
    return Outcome(
        None,
        f"reward returned {kind}",
        f"the reward function {who} returned {value!r} ({kind}); it must return {wanted}{missing}",
    )
