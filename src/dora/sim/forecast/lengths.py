"""How long answers are: drawn by position in the dataset, so that all policies get the same ones.

A family is its quantile function. Siblings of a group share a part of what is drawn (a Gaussian copula, so
correlation changes no family), and answers may grow with the steps.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dora.errors import InputError

CHUNK = 1024  # groups that are drawn at once
FAMILIES = ("lognormal", "pareto", "trace")
Floats = NDArray[np.float64]


class Answers(Protocol):
    """How long answers are, by position in the dataset."""

    @property
    def prompt(self) -> int: ...
    @property
    def turns(self) -> int: ...
    @property
    def delay_s(self) -> float: ...
    def draw(self, chunk: int, group_size: int, batch_size: int) -> list[list[int]]: ...


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and answers. `mean` is that of answers as they are cut off at `limit`."""

    limit: int
    mean: float = 0.0
    family: str = "lognormal"
    tail: float = 1.0  # sigma of a lognormal, alpha of a Pareto (the smaller the heavier)
    prompt: int = 128
    alike: float = 0.0  # correlation between siblings, 0 to 1
    drift: float = 0.0  # growth of answers per step, relative
    turns: int = 1  # of an episode, equally long, with the environment's delay after each but the last
    delay_s: float = 0.0
    trace: tuple[int, ...] = ()  # answers of family "trace", any order
    seed: int = 0

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise InputError(f"length family {self.family!r} is not one of {', '.join(FAMILIES)}")
        if self.family == "trace":
            self._check_trace()
        elif not 1 <= self.mean < self.limit:
            raise InputError(f"mean length {self.mean} must be at least 1 and below the limit {self.limit}")
        for name, is_right, rule in (
            ("tail", self.tail > 0, "above 0"),
            ("alike", 0 <= self.alike <= 1, "0 to 1"),
            ("drift", self.drift > -1, "above -1"),
            ("prompt", self.prompt >= 0, "at least 0"),
            ("turns", self.turns >= 1, "at least 1"),
            (
                "delay",
                self.delay_s == 0 or (self.delay_s > 0 and self.turns > 1),
                "0, or of more than one turn",
            ),
        ):
            if not is_right:
                value = self.delay_s if name == "delay" else getattr(self, name)
                raise InputError(f"lengths: {name} = {value} must be {rule}")

    def _check_trace(self) -> None:
        if not self.trace:
            raise InputError("a length trace needs at least one answer")
        if max(self.trace) > self.limit:
            raise InputError(
                f"the longest answer of the trace has {max(self.trace)} tokens, and the limit is "
                f"{self.limit}; raise it, or cut the trace"
            )

    def check_context(self, context: int) -> None:
        """Raises InputError where a prompt and its longest answer do not fit in the model's context."""
        if self.prompt + self.limit > context:
            raise InputError(
                f"prompt {self.prompt} + limit {self.limit} = {self.prompt + self.limit} tokens is beyond "
                f"the context of {context}; lower the limit, or raise the context if the model's is longer"
            )

    def draw(self, chunk: int, group_size: int, batch_size: int) -> list[list[int]]:
        """Answers of groups `chunk * CHUNK` on, one list each."""
        random = np.random.default_rng((self.seed, chunk))
        own = random.standard_normal((CHUNK, group_size))
        shared = random.standard_normal((CHUNK, 1))
        drawn = math.sqrt(self.alike) * shared + math.sqrt(1 - self.alike) * own
        tokens = self.quantiles(drawn)
        if self.drift:
            steps = (chunk * CHUNK + np.arange(CHUNK)) // batch_size
            tokens = tokens * (1 + self.drift * steps)[:, None]
        cut: list[list[int]] = np.clip(np.rint(tokens), 1, self.limit).astype(int).tolist()
        return cut

    def quantiles(self, normals: Floats) -> Floats:
        """Tokens, before they are cut off, for numbers that are distributed normally."""
        if self.family == "lognormal":
            return self._scale * np.exp(self.tail * normals)
        shares = np.clip(_normal_cdf(normals), 0.0, 1 - 1e-12)
        if self.family == "pareto":
            return self._scale * np.power(1 - shares, -1 / self.tail)
        ordered = np.sort(np.array(self.trace, float))
        picked: Floats = ordered[(shares * len(ordered)).astype(int)]
        return picked

    @cached_property
    def _scale(self) -> float:
        """Median of the lognormal, least of the Pareto, for which the mean is `mean`: by halving in logs."""
        low, high = math.log(1e-3), math.log(self.limit * 4.0)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean_at(math.exp(middle)) < self.mean else (low, middle)
        return math.exp(low)

    def _mean_at(self, scale: float) -> float:
        """Mean of min(answer, limit)."""
        most, tail = float(self.limit), self.tail
        if self.family == "lognormal":
            z = math.log(most / scale) / tail
            return scale * math.exp(tail * tail / 2) * _cdf(z - tail) + most * (1 - _cdf(z))
        if scale >= most:
            return most
        if abs(tail - 1) < 1e-9:
            return scale * (1 + math.log(most / scale))
        return scale * (tail - math.pow(scale / most, tail - 1)) / (tail - 1)

    def heavier(self, times: float = 2.0) -> Lengths:
        """The same median, and a 99th percentile so many times as long."""
        if self.family == "trace":
            return replace(self, trace=self._stretched(times))
        if self.family == "lognormal":
            tail = self.tail + math.log(times) / 2.3263
            median = self._scale
        else:
            tail = 1 / (1 / self.tail + math.log(times) / math.log(50))  # from the median to the 99th
            median = self._scale * math.pow(2, 1 / self.tail)
        grown = replace(self, tail=tail)
        scale = median if self.family == "lognormal" else median * math.pow(2, -1 / tail)
        return replace(grown, mean=min(grown._mean_at(scale), 0.9 * self.limit))

    def _stretched(self, times: float) -> tuple[int, ...]:
        """What is above the median, by a power of how far it is above."""
        ordered = np.sort(np.array(self.trace, float))
        middle, late = float(np.median(ordered)), float(np.quantile(ordered, 0.99))
        power = math.log(times) / math.log(late / middle) if late > middle else 0.0
        far = np.maximum(1.0, ordered / middle)
        grown = np.minimum(self.limit, ordered * far**power)
        return tuple(int(tokens) for tokens in grown)

    @cached_property
    def sample(self) -> Floats:
        """Some thousand answers, for estimates."""
        return np.array(self.draw(0, 16, CHUNK), float).ravel()

    @property
    def crowded(self) -> float:
        """Mean context, over all rows, at the worst moment after they have begun together."""
        answers = np.sort(self.sample)
        alive = 1 - np.arange(len(answers)) / len(answers)
        return float(((self.prompt + answers) * alive).max())

    @property
    def resident(self) -> float:
        """Mean context of a row at a random moment of its life: long answers are there for longer."""
        answers = self.sample
        return self.prompt + float((answers**2).sum() / (2 * answers.sum()))


def read_trace(path: Path, column: str = "GeneratedTokens") -> tuple[int, ...]:
    """A column of a CSV. Raises InputError naming the columns, or the line, that do not fit."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            if column not in (rows.fieldnames or ()):
                found = ", ".join(rows.fieldnames or ()) or "none"
                raise InputError(f"{path} has no column {column!r}; its columns are {found}")
            found_tokens = [_count(path, number, row[column]) for number, row in enumerate(rows, 2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as a CSV ({error})") from error
    return tuple(found_tokens)


def _count(path: Path, number: int, text: str | None) -> int:
    if text is None or not text.strip().isdecimal() or int(text) < 1:
        raise InputError(f"{path}, line {number}: {text!r} is no number of tokens, which is at least 1")
    return int(text)


def _cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _normal_cdf(z: Floats) -> Floats:
    values: Sequence[float] = [_cdf(x) for x in z.ravel()]
    return np.array(values).reshape(z.shape)
