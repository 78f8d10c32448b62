"""Load a reward function, check its signature, and score the completions of a prompt.

A reward function is `def reward(prompt, completion, **row) -> float`, or TRL's kind, which scores all
completions at once: `def reward(completions, **columns) -> list[float]`, or verl's `compute_score`. Each may
be async, or an object made by a class with options. Every failure of a reward function becomes a
`RewardResult` with a reason, never an exception: one bad completion must not end a run. A call that hangs is
ended by killing its process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import inspect
import math
import numbers
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from dora.errors import RewardError
from dora.loading import load_attribute

RewardFunction = Callable[..., Any]
NO_COLUMNS: Mapping[str, str] = MappingProxyType({})
Prompt = str | Sequence[Mapping[str, str]]  # text, or the messages of a conversation


@dataclass(frozen=True)
class RewardInput:
    """A completion with its prompt; `row` has the other columns of the prompt's dataset row.

    `finish_reason`: "stop" or "length"; of an episode also "turn_length", "max_turns" or
    "observation_length". None if it is not known.
    """

    prompt: Prompt
    completion: str
    token_ids: Sequence[int]
    row: Mapping[str, Any]
    finish_reason: str | None = None


@dataclass(frozen=True)
class RewardResult:
    """The reward of one completion, or None with a short `reason` and its `detail`."""

    reward: float | None
    reason: str = ""
    detail: str = ""


def load_reward(
    name: str,
    key: str = "reward.function",
    options: Mapping[str, Any] | None = None,
    columns: Sequence[str] | None = None,
    missing: Mapping[str, str] = NO_COLUMNS,
) -> RewardFunction:
    """Load "file.py:function" or "package.module:function", or make an instance of a class so named.

    `key` is the setting that has the name, `options` the arguments of a class, `columns` those of the dataset
    if they are known. `missing` maps other columns to a dataset without it. Raises RewardError, also for a
    function that cannot be called with these columns.
    """
    function = _load(name, key, options)
    check_signature(function, f"{key} = {name!r}", columns, missing)
    return function


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
            f"{key} = {name!r}: the class raised {type(error).__name__} for the options "
            f"{dict(options or {})}: {error}\n{traceback.format_exc()}"
        ) from error
    if not callable(made):
        raise RewardError(f"{key} = {name!r}: its instances are not callable; give the class a __call__")
    reward: RewardFunction = made
    return reward


def score(function: RewardFunction, inputs: Sequence[RewardInput]) -> Iterator[RewardResult]:
    """Score completions in order. A function that scores all at once may yield a single failure.

    Each completion has its own copy of the prompt and the row: what a function changes in them does not reach
    the siblings.
    """
    inputs = [replace(item, prompt=deepcopy(item.prompt), row=deepcopy(item.row)) for item in inputs]
    if takes_batches(function):
        yield from score_batch(function, inputs)
        return
    for item in inputs:
        yield score_one(function, item.prompt, item.completion, _columns(function, item))


def _columns(function: RewardFunction, item: RewardInput) -> Mapping[str, Any]:
    """The row, and the finish reason if the function has a parameter of this name."""
    signature = _signature(function)
    if signature is None or FINISH_REASON not in signature.parameters:
        return item.row
    return {**item.row, FINISH_REASON: item.finish_reason}


def score_one(
    function: RewardFunction, prompt: Prompt, completion: str, row: Mapping[str, Any]
) -> RewardResult:
    """Score one completion with `function(prompt, completion, **row)`, or as verl does."""
    signature, name = _signature(function), reward_name(function)
    if signature is None or not _is_verl_signature(signature):
        value = _call(function, prompt, completion, **row)
        return value if isinstance(value, RewardResult) else _check(value, name)
    known = {
        "data_source": row.get("data_source"),
        "solution_str": completion,
        "ground_truth": _ground_truth(row),
        "extra_info": row.get("extra_info"),
        FINISH_REASON: row.get(FINISH_REASON),
    }
    value = _call(function, **{key: known[key] for key in _verl_arguments(signature)})
    if isinstance(value, Mapping):
        if "score" not in value:
            return _wrong_type(value, name, "a finite float, or a dictionary with a score")
        value = value["score"]
    return value if isinstance(value, RewardResult) else _check(value, name)


def _ground_truth(row: Mapping[str, Any]) -> Any:
    """verl's data has it in the column `reward_model`."""
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        return reward_model["ground_truth"]
    return row.get("ground_truth")


def score_batch(function: RewardFunction, inputs: Sequence[RewardInput]) -> list[RewardResult]:
    """Score completions in one call with TRL's arguments: every column is a list with one value each.

    Where the prompt is a conversation, the completion is one message of the assistant. A column that only
    some rows have is None for the others.
    """
    rows = [_columns(function, item) for item in inputs]
    columns = dict.fromkeys(column for row in rows for column in row)
    values = _call(
        function,
        prompts=[item.prompt for item in inputs],
        completions=[_completion(item) for item in inputs],
        completion_ids=[list(item.token_ids) for item in inputs],
        **{column: [row.get(column) for row in rows] for column in columns},
    )
    if isinstance(values, RewardResult):
        return [values]
    values = values.tolist() if hasattr(values, "tolist") else values  # an array or a tensor
    name = reward_name(function)
    if not isinstance(values, list | tuple):
        return [_wrong_type(values, name, f"a list of {len(inputs)} finite floats, one per completion")]
    results = [_check(value, name) for value in values]
    if len(results) == len(inputs):
        return results
    reason = f"reward returned {len(results)} values for {len(inputs)} completions"
    return [RewardResult(None, reason, f"{reason}; it must return one value for each completion")]


def _completion(item: RewardInput) -> str | list[dict[str, str]]:
    is_text = isinstance(item.prompt, str)
    return item.completion if is_text else [{"role": "assistant", "content": item.completion}]


def _call(function: RewardFunction, /, *args: Any, **kwargs: Any) -> Any:
    """The value, awaited if necessary; a RewardResult if the function raises. `kwargs` may have any name."""
    try:
        value = function(*args, **kwargs)
        return _runner().run(_await(value)) if inspect.isawaitable(value) else value
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return RewardResult(None, f"reward raised {type(error).__name__}", traceback.format_exc())


@functools.cache
def _runner() -> asyncio.Runner:
    """The event loop of all calls in this process: HTTP clients and locks that a function keeps from one call
    to the next belong to the loop in which they were first used.
    """
    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner


async def _await(value: Awaitable[Any]) -> Any:
    return await value


def _check(value: object, name: str) -> RewardResult:
    """Accepts every finite real number, including bool, numpy scalars and tensors with one element."""
    real = value
    if hasattr(value, "item"):
        with contextlib.suppress(ValueError, RuntimeError):  # it has not one element
            real = value.item()
    if not isinstance(real, numbers.Real):
        return _wrong_type(value, name, "a finite float")
    try:
        number = float(real)
    except OverflowError:  # of a large int
        number = math.inf
    if not math.isfinite(number):
        detail = f"the reward function {name} returned {number}; it must return a finite float"
        return RewardResult(None, f"reward returned {number}", detail)
    return RewardResult(number)


def _wrong_type(value: object, name: str, expected: str) -> RewardResult:
    kind = type(value).__name__
    hint = "; is a `return` missing?" if value is None else ""
    detail = f"the reward function {name} returned {value!r} ({kind}); it must return {expected}{hint}"
    return RewardResult(None, f"reward returned {kind}", detail)


ONE_ARGUMENTS = ("prompt", "completion")
BATCH_ARGUMENTS = ("prompts", "completions", "completion_ids")
FINISH_REASON = "finish_reason"  # only of functions that name it
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
EXAMPLES = """\
    def reward(prompt, completion, **row):  # one completion; `row` has the other columns
        return float(row["answer"] in completion)
or, for all completions of a prompt at once, as TRL calls its reward_funcs:
    def reward(prompts, completions, **columns):
        return [float(right in text) for right, text in zip(columns["answer"], completions)]
or as verl's compute_score, for rows with its column reward_model:
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return float(ground_truth in solution_str)"""
NOT_A_NUMBER = {"none", "nonetype", "str", "bytes", "dict", "list", "tuple"}
NOT_A_LIST = {"none", "nonetype", "str", "bytes", "dict", "float", "int", "bool"}


def reward_name(function: Callable[..., Any]) -> str:
    """The name of a reward in messages: a function's name, or the class of an object."""
    return str(getattr(function, "__name__", type(function).__name__))


def takes_batches(function: Callable[..., Any]) -> bool:
    """Whether it scores many completions in one call, as TRL's functions do.

    Such a function has a parameter `completions` or `prompts`, or only `**kwargs`.
    """
    signature = _signature(function)
    return signature is not None and _is_batch_signature(signature)


def check_signature(
    function: Callable[..., Any],
    source: str,
    columns: Sequence[str] | None,
    missing: Mapping[str, str] = NO_COLUMNS,
) -> None:
    """Raises RewardError if a call must fail, or if the return annotation is no reward.

    `source` begins the message. `columns` are passed by name; None: not known yet. `missing` maps other
    columns to a dataset without it. A builtin without a signature passes.
    """
    signature = _signature(function)
    if signature is None:
        return
    declared = f"{reward_name(function)}{_without_types(signature)}"
    if _is_verl_signature(signature):
        _check_verl_signature(signature, f"{source}: {declared}", columns, missing)
        return
    for column in (name for name in _required_columns(signature, _arguments(signature)) if name in missing):
        raise RewardError(
            f"{source}: {declared} needs the column {column!r}, which {missing[column]} lacks; add it there, "
            "or give the parameter a default"
        )
    is_batch, arguments = _is_batch_signature(signature), _arguments(signature)
    if not is_batch:
        _check_order(signature, f"{source}: {declared}")
    passed = [*(_required_columns(signature, arguments) if columns is None else columns)]
    passed += [FINISH_REASON] if FINISH_REASON in signature.parameters else []
    try:
        if is_batch:
            signature.bind(**dict.fromkeys((*arguments, *passed)))
        else:
            signature.bind(*arguments, **dict.fromkeys(passed))
    except TypeError as error:
        call = ", ".join(arguments) + (f" and the columns {', '.join(columns)}" if columns else "")
        raise RewardError(
            f"{source}: {declared} cannot be called with {call}: {error}; write it as\n{EXAMPLES}"
        ) from error
    returned = _outer_type(signature.return_annotation)
    if returned.lower() in (NOT_A_LIST if is_batch else NOT_A_NUMBER):
        expected = "a list with a finite number for each completion" if is_batch else "a finite number"
        raise RewardError(
            f"{source}: {declared} is annotated to return {returned}, and must return {expected}; "
            f"write it as\n{EXAMPLES}"
        )


def _check_order(signature: inspect.Signature, declared: str) -> None:
    """Raises RewardError, which begins with `declared`, if the names of the first two parameters are not in
    the order in which they are passed.
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]
    if names[:1] == ["completion"] or names[1:2] == ["prompt"]:
        raise RewardError(
            f"{declared} gets the prompt as its first argument and the completion as its second; write it "
            f"as\n{EXAMPLES}"
        )


def _check_verl_signature(
    signature: inspect.Signature, declared: str, columns: Sequence[str] | None, missing: Mapping[str, str]
) -> None:
    """Raises RewardError, which begins with `declared`, if a call as verl's must fail.

    One dataset may have reward_model and another one ground_truth.
    """
    try:
        signature.bind(**dict.fromkeys(_verl_arguments(signature)))
    except TypeError as error:
        raise RewardError(
            f"{declared} cannot be called with {', '.join(VERL_ARGUMENTS)}: {error}; write it as\n{EXAMPLES}"
        ) from error
    if columns is not None and {"reward_model", "ground_truth"}.isdisjoint((*columns, *missing)):
        raise RewardError(
            f"{declared} needs the column reward_model with ground_truth in it, or ground_truth; the first "
            f"row has {', '.join(columns) or 'no column'}; add one of the two, or write it as\n{EXAMPLES}"
        )


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without signature
        return None


def _is_batch_signature(signature: inspect.Signature) -> bool:
    has_only_kwargs = [p.kind for p in signature.parameters.values()] == [inspect.Parameter.VAR_KEYWORD]
    return has_only_kwargs or not {"completions", "prompts"}.isdisjoint(signature.parameters)


def _is_verl_signature(signature: inspect.Signature) -> bool:
    return {"solution_str", "ground_truth"} <= {*signature.parameters}


def _arguments(signature: inspect.Signature) -> tuple[str, ...]:
    """The arguments besides columns."""
    return BATCH_ARGUMENTS if _is_batch_signature(signature) else ONE_ARGUMENTS


def _verl_arguments(signature: inspect.Signature) -> list[str]:
    """The arguments of `VERL_ARGUMENTS` that the function accepts, and the finish reason if it names it."""
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    names = [name for name in VERL_ARGUMENTS if takes_all or name in signature.parameters]
    return [*names, FINISH_REASON] if FINISH_REASON in signature.parameters else names


def _required_columns(signature: inspect.Signature, arguments: Sequence[str]) -> list[str]:
    """Required parameters that only a column can fill."""
    parameters = [p for p in signature.parameters.values() if p.default is p.empty]
    keyword_only = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    either = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if arguments is ONE_ARGUMENTS:
        either = either[len(ONE_ARGUMENTS) :]  # the first two are passed by position, whatever their names
    return [name for name in (*either, *keyword_only) if name not in (*arguments, FINISH_REASON)]


def _without_types(signature: inspect.Signature) -> inspect.Signature:
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


def _outer_type(annotation: object) -> str:
    """The outermost type of an annotation: "list" of `list[float]`."""
    text = annotation if isinstance(annotation, str) else str(getattr(annotation, "__name__", annotation))
    return text.split("[")[0].split(".")[-1].strip()
