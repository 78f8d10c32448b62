"""Lengths of responses, drawn by position in the dataset, so that all policies get the same ones.

A family is its quantile function. Siblings of a group are correlated by a Gaussian copula, which changes no
family, and responses may grow from step to step.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dora.errors import InputError

CHUNK_SIZE = 1024  # groups that are drawn at once
MAX_TAIL = 30.0  # of a lognormal, `exp(tail * tail / 2)` is finite
LENGTH_FAMILIES = ("lognormal", "pareto", "trace")
Floats = NDArray[np.float64]


class LengthSource(Protocol):
    """Lengths of prompts and responses in tokens; `turn_delay_s` passes between two turns of an episode."""

    @property
    def num_turns(self) -> int: ...
    @property
    def turn_delay_s(self) -> float: ...
    def draw(self, chunk: int, group_size: int, batch_size: int) -> list[list[int]]:
        """Lengths of the responses of `CHUNK_SIZE` groups, a list for each."""

    def draw_prompts(self, chunk: int, group_size: int) -> Sequence[int]:
        """Lengths of the prompts of the same groups."""


@dataclass(frozen=True)
class LengthDistribution:
    """Random lengths in tokens. `mean` is the mean of responses after truncation at `limit`."""

    limit: int
    mean: float = 0.0
    family: str = "lognormal"
    tail: float = 1.0  # sigma of a lognormal, alpha of a Pareto (smaller is heavier)
    prompt: int = 128  # without `prompts`
    correlation: float = 0.0  # between siblings, 0 to 1
    growth: float = 0.0  # relative, per step
    num_turns: int = 1  # of an episode, equally long
    turn_delay_s: float = 0.0  # of the environment after each turn but the last
    trace: tuple[int, ...] = ()  # responses of family "trace", in any order
    prompts: tuple[int, ...] = ()  # of the same rows as `trace`; empty: all have the length `prompt`
    seed: int = 0

    def __post_init__(self) -> None:
        if self.family not in LENGTH_FAMILIES:
            raise InputError(f"length family {self.family!r} must be one of {', '.join(LENGTH_FAMILIES)}")
        if self.family == "trace":
            self._check_trace()
        elif not 1 <= self.mean < self.limit:
            raise InputError(f"mean length {self.mean} must be at least 1 and below the limit {self.limit}")
        has_delay_between_turns = 0 < self.turn_delay_s < math.inf and self.num_turns > 1
        for name, value, is_valid, rule in (
            ("tail", self.tail, 0 < self.tail <= MAX_TAIL, f"above 0 and at most {MAX_TAIL:g}"),
            ("correlation", self.correlation, 0 <= self.correlation <= 1, "between 0 and 1"),
            ("growth", self.growth, -1 < self.growth < math.inf, "above -1"),
            ("prompt", self.prompt, self.prompt >= 0, "at least 0"),
            ("turns", self.num_turns, self.num_turns >= 1, "at least 1"),
            (
                "turn delay",
                self.turn_delay_s,
                self.turn_delay_s == 0 or has_delay_between_turns,
                "0, or above 0 with at least 2 turns",
            ),
        ):
            if not is_valid:
                raise InputError(f"lengths: {name} = {value} must be {rule}")

    def _check_trace(self) -> None:
        if not self.trace:
            raise InputError("a length trace must have at least one response")
        if max(self.trace) > self.limit:
            raise InputError(
                f"the longest response of the trace has {max(self.trace)} tokens, above the limit "
                f"{self.limit}; raise the limit, or cut the trace"
            )
        if self.prompts and len(self.prompts) != len(self.trace):
            raise InputError(f"the trace has {len(self.trace)} responses and {len(self.prompts)} prompts")

    @property
    def mean_prompt(self) -> float:
        return float(np.mean(self.prompts)) if self.prompts else float(self.prompt)

    @property
    def max_prompt(self) -> int:
        return max(self.prompts, default=self.prompt)

    def check_context(self, context: int) -> None:
        """Raise InputError if a prompt with its longest response exceeds the model's context."""
        longest = self.max_prompt + self.limit
        if longest > context:
            raise InputError(
                f"prompt {self.max_prompt} + limit {self.limit} = {longest} tokens exceed "
                f"the context of {context}; lower the limit, or raise the context if the model allows it"
            )

    def check_mean(self) -> None:
        """Raise InputError if a tail is so heavy that no distribution with it has the mean."""
        if self.family == "trace":
            return
        nearest = self._mean_at(self._scale)
        if not math.isclose(nearest, self.mean, rel_tol=0.01):
            raise InputError(
                f"no {self.family} with tail = {self.tail:g} and the limit {self.limit} has the mean "
                f"{self.mean:g}; the nearest mean is {nearest:.0f}: choose another tail or mean"
            )

    def draw(self, chunk: int, group_size: int, batch_size: int) -> list[list[int]]:
        """Lengths of the responses of groups `chunk * CHUNK_SIZE` and following, a list for each."""
        tokens = self.quantiles(self._normals(chunk, group_size))
        if self.growth:
            steps = (chunk * CHUNK_SIZE + np.arange(CHUNK_SIZE)) // batch_size
            tokens = tokens * (1 + self.growth * steps)[:, None]
        truncated: list[list[int]] = np.clip(np.rint(tokens), 1, self.limit).astype(int).tolist()
        return truncated

    def draw_prompts(self, chunk: int, group_size: int) -> Sequence[int]:
        """Lengths of the prompts of the same groups; in a trace, that of the row with the first response."""
        if not self.prompts:
            return [self.prompt] * CHUNK_SIZE
        by_response = np.array(self.prompts)[np.argsort(self.trace, kind="stable")]
        rows = _trace_rows(self._normals(chunk, group_size)[:, 0], len(by_response))
        drawn: list[int] = by_response[rows].tolist()
        return drawn

    def _normals(self, chunk: int, group_size: int) -> Floats:
        """Standard normal numbers, one for each response: [CHUNK_SIZE, group_size]."""
        rng = np.random.default_rng((self.seed, chunk))
        own = rng.standard_normal((CHUNK_SIZE, group_size))
        shared = rng.standard_normal((CHUNK_SIZE, 1))
        mixed: Floats = math.sqrt(self.correlation) * shared + math.sqrt(1 - self.correlation) * own
        return mixed

    def quantiles(self, normals: Floats) -> Floats:
        """Tokens before truncation, for standard normal numbers."""
        if self.family == "lognormal":
            return self._scale * np.exp(self.tail * normals)
        if self.family == "pareto":
            return self._scale * np.power(1 - _probabilities(normals), -1 / self.tail)
        ordered = np.sort(np.array(self.trace, float))
        picked: Floats = ordered[_trace_rows(normals, len(ordered))]
        return picked

    @cached_property
    def _scale(self) -> float:
        """Median of the lognormal, or minimum of the Pareto, that gives `mean`: by bisection on a logarithmic
        scale.
        """
        low, high = math.log(1e-3), math.log(self.limit * 4.0)
        if self._mean_at(math.exp(high)) < self.mean:  # nearly all responses are cut off
            high += 5 * self.tail
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean_at(math.exp(middle)) < self.mean else (low, middle)
        return math.exp(low)

    def _mean_at(self, scale: float) -> float:
        """Mean of min(response, limit)."""
        limit, tail = float(self.limit), self.tail
        if self.family == "lognormal":
            z = math.log(limit / scale) / tail
            return scale * math.exp(tail * tail / 2) * _cdf(z - tail) + limit * (1 - _cdf(z))
        if scale >= limit:
            return limit
        if abs(tail - 1) < 1e-9:
            return scale * (1 + math.log(limit / scale))
        return scale * (tail - math.pow(scale / limit, tail - 1)) / (tail - 1)

    def with_heavier_tail(self) -> LengthDistribution:
        """The same median, and a 99th percentile that is twice as long."""
        if self.family == "trace":
            return replace(self, trace=self._stretched_trace())
        if self.family == "lognormal":
            tail = self.tail + math.log(2) / 2.3263
            median = self._scale
        else:
            tail = 1 / (1 / self.tail + math.log(2) / math.log(50))  # from the median to the 99th
            median = self._scale * math.pow(2, 1 / self.tail)
        heavier = replace(self, tail=(tail := min(tail, MAX_TAIL)))
        scale = median if self.family == "lognormal" else median * math.pow(2, -1 / tail)
        return replace(heavier, mean=min(heavier._mean_at(scale), 0.9 * self.limit))

    def _stretched_trace(self) -> tuple[int, ...]:
        """Stretch responses above the median, by a power of their ratio to it."""
        lengths = np.array(self.trace, float)
        median, p99 = float(np.median(lengths)), float(np.quantile(lengths, 0.99))
        power = math.log(2) / math.log(p99 / median) if p99 > median else 0.0
        ratios = np.maximum(1.0, lengths / median)
        stretched = np.minimum(self.limit, lengths * ratios**power)
        return tuple(int(tokens) for tokens in stretched)

    @cached_property
    def sample(self) -> Floats:
        """Some thousand responses, for estimates."""
        return np.array(self.draw(0, 16, CHUNK_SIZE), float).ravel()

    @property
    def peak_context(self) -> float:
        """Context per row at its maximum over time, for rows that all start together."""
        answers = np.sort(self.sample)
        alive = 1 - np.arange(len(answers)) / len(answers)
        return float(((self.mean_prompt + answers) * alive).max())

    @property
    def mean_context(self) -> float:
        """Mean context of a row at a random moment: long responses run longer, and so count more."""
        answers = self.sample
        return self.mean_prompt + float((answers**2).sum() / (2 * answers.sum()))


def has_column(path: Path, column: str) -> bool:
    """Whether a CSV file has a column of this name. False if it cannot be read."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return column in next(csv.reader(file), ())
    except (OSError, UnicodeDecodeError, csv.Error):
        return False


def read_trace(path: Path, column: str = "GeneratedTokens") -> tuple[int, ...]:
    """Lengths in a column of a CSV file. Raises InputError naming the columns, or the line that is wrong."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            if column not in (rows.fieldnames or ()):
                found = ", ".join(rows.fieldnames or ()) or "none"
                raise InputError(f"{path} has no column {column!r}; its columns are {found}")
            lengths = [_parse_length(path, line, row[column]) for line, row in enumerate(rows, 2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot read {path} as CSV: {error}") from error
    return tuple(lengths)


def _parse_length(path: Path, line: int, text: str | None) -> int:
    if text is None or not re.fullmatch(r"0*[1-9]\d{0,17}", text.strip(), re.ASCII):
        raise InputError(f"{path}, line {line}: {text!r} must be a number of tokens, at least 1")
    return int(text)


def _trace_rows(normals: Floats, num_rows: int) -> NDArray[np.int64]:
    """Rows of a trace that is ordered by length, for standard normal numbers."""
    rows: NDArray[np.int64] = (_probabilities(normals) * num_rows).astype(np.int64)
    return rows


def _probabilities(normals: Floats) -> Floats:
    clipped: Floats = np.clip(np.vectorize(_cdf)(normals), 0.0, 1 - 1e-12)
    return clipped


def _cdf(z: float) -> float:
    """The cumulative distribution function of the standard normal distribution."""
    return 0.5 * math.erfc(-z / math.sqrt(2))
