"""What a reward function takes and gives, read from its signature before it is called for the first time.

A function that cannot be called as rewards are is refused, with what it takes and how one is written; of a
function without a signature, as some of C's are, nothing is known.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from dora.errors import RewardError

ONE = ("prompt", "completion")
MANY = ("prompts", "completions", "completion_ids")
EXAMPLES = """\
    def reward(prompt, completion, **row):  # one answer; `row` has the other columns
        return float(row["answer"] in completion)
or, for all answers to a prompt at once, as TRL calls its reward_funcs:
    def reward(prompts, completions, **columns):
        return [float(right in text) for right, text in zip(columns["answer"], completions)]"""
NO_NUMBER = {"none", "nonetype", "str", "bytes", "dict", "list", "tuple"}
NO_LIST = {"none", "nonetype", "str", "bytes", "dict", "float", "int", "bool"}


def called(function: Callable[..., Any]) -> str:
    """What to call a reward in messages: a function's name, or the class of an object."""
    return str(getattr(function, "__name__", type(function).__name__))


def takes_batches(function: Callable[..., Any]) -> bool:
    """Whether it judges many answers in one call, as TRL's do.

    It has a parameter `completions` or `prompts`, or takes everything by name.
    """
    signature = _signature(function)
    return signature is not None and _is_of_many(signature)


def check_signature(function: Callable[..., Any], named: str, columns: Sequence[str] | None) -> None:
    """Raises RewardError where a call must fail, or what it returns is said to be no reward.

    `named` begins the message. `columns` of the dataset come along by name; None: they are not known yet.
    """
    signature = _signature(function)
    if signature is None:
        return
    takes = f"{called(function)}{_without_types(signature)}"
    is_of_many = _is_of_many(signature)
    fixed: tuple[str, ...] = MANY if is_of_many else ONE
    given = _own_columns(signature, fixed) if columns is None else columns
    try:
        if is_of_many:
            signature.bind(**dict.fromkeys((*fixed, *given)))
        else:
            signature.bind(*fixed, **dict.fromkeys(given))
    except TypeError as error:
        told = ", ".join(fixed) + (f" and the first row's {', '.join(columns)}" if columns else "")
        raise RewardError(
            f"{named}: {takes} cannot be called with {told}: {error}; write it as\n{EXAMPLES}"
        ) from error
    returned = _type(signature.return_annotation)
    if returned.lower() in (NO_LIST if is_of_many else NO_NUMBER):
        wanted = "a list with a finite number for each completion" if is_of_many else "a finite number"
        says = f"{takes} says that it returns {returned}, and must return {wanted}"
        raise RewardError(f"{named}: {says}; write it as\n{EXAMPLES}")


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without signature
        return None


def _is_of_many(signature: inspect.Signature) -> bool:
    takes_all = [p.kind for p in signature.parameters.values()] == [inspect.Parameter.VAR_KEYWORD]
    return takes_all or not {"completions", "prompts"}.isdisjoint(signature.parameters)


def _own_columns(signature: inspect.Signature, fixed: Sequence[str]) -> list[str]:
    """Parameters that only columns can be meant for, whatever columns there are."""
    parameters = [p for p in signature.parameters.values() if p.default is p.empty]
    by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    either = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if fixed is ONE:
        either = either[len(ONE) :]  # the first two are given by place, whatever they are called
    return [name for name in (*either, *by_name) if name not in fixed]


def _without_types(signature: inspect.Signature) -> inspect.Signature:
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


def _type(annotation: object) -> str:
    """The outermost type of an annotation: "list" of `list[float]`."""
    text = annotation if isinstance(annotation, str) else str(getattr(annotation, "__name__", annotation))
    return text.split("[")[0].split(".")[-1].strip()
