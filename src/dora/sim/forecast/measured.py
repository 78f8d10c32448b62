"""What a run's parts take, by least squares over what its journal says.

An answer takes `telling + tokens * (fixed + each * rows + version * (versions - 1))`, a training step
`fixed + each * tokens`, and either a share longer while the other works, for they may be on the same cores.
How much is seen only where they work alone and together: in a synchronous run and another one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dora.errors import InputError
from dora.sim.forecast.bench import Contention
from dora.sim.forecast.costs import Pace, Terms
from dora.sim.forecast.recorded import Life, Recorded

Floats = NDArray[np.float64]
ALONE = Contention()
STEP = 0.02  # between the shares of contention that are tried
NEARLY = 1.001  # times the least error: what is no worse than that is as good


@dataclass(frozen=True)
class Line:
    """Seconds of something that takes `fixed_s` and `each_s` for each unit of it."""

    fixed_s: float = 0.0
    each_s: float = 0.0

    def at(self, units: float) -> float:
        return self.fixed_s + self.each_s * units


@dataclass(frozen=True)
class Measured:
    """What a run's parts took. An engine's step by rows, a training step by thousands of tokens."""

    decode: Line = Line()
    train: Line = Line()
    version_s: float = 0.0  # of a decode step, for each version beyond the first
    telling_s: float = 0.0  # of an answer, beside its steps
    loading_s: float = 0.0
    stopping_s: float = 0.0  # of it, what an engine's other requests stand still
    moving_s: float = 0.0
    publishing_s: float = 0.0
    reward_s: float = 0.0
    contention: Contention = ALONE
    expert: int = 1
    kv_tokens: int = 1 << 60
    kv_bytes: float = 0.0

    def terms(self, num_rows: int, rank_rows: int) -> Terms:
        return Terms(0.0, self.decode.at(num_rows) - self.version_s, self.version_s, 0.0, 0.0)

    def pace(self, num_rows: int, rank_rows: int, rank_context: float, num_versions: int = 1) -> Pace:
        return self.terms(num_rows, rank_rows).pace(rank_context, num_versions)

    def prefill_s(self, tokens: float) -> float:
        return 0.0  # it is in what an answer takes

    def move_s(self, tokens: float) -> float:
        return self.moving_s

    def swap_s(self, tokens: float) -> float:
        return 0.0

    def load_s(self) -> float:
        return self.loading_s

    def load_stop_s(self) -> float:
        return self.stopping_s

    def work_s(self, tokens: float) -> float:
        return self.train.each_s * tokens / 1000

    @property
    def fixed_s(self) -> float:
        return self.train.fixed_s

    def publish_s(self) -> float:
        return self.publishing_s


def measure(runs: Sequence[Recorded]) -> Measured:
    """Of runs of one machine and model, together. Raises InputError where they say too little."""
    num_steps = sum(len(run.trainings) for run in runs)
    num_lives = sum(life.is_whole for run in runs for life in run.lives)
    if num_steps < 3 or num_lives < 3:
        raise InputError(
            f"the run has {num_steps} training steps and {num_lives} answers that were decoded in one go; to "
            "calibrate takes at least 3 of each"
        )
    (telling_s, fixed_s, each_s, version_s), slower = fitted([_lives(run) for run in runs], 1.0)
    engines = max(len(run.engines) for run in runs)
    (train_s, token_s), train_slower = fitted([_trainings(run) for run in runs], float(engines))

    def mean(what: str) -> float:
        found = [seconds for run in runs for seconds in run.seconds.get(what, ())]
        return sum(found) / len(found) if found else 0.0

    return Measured(
        Line(fixed_s, each_s), Line(train_s, token_s), version_s, telling_s, mean("load"), mean("load stop"),
        mean("move"), mean("publish"), mean("reward"), Contention(slower, train_slower),
    )  # fmt: skip


@dataclass(frozen=True)
class Points:
    """What took so long, [n]; what is in each, [n, k]; the share of its time in which others worked, [n]."""

    took_s: Floats
    parts: Floats
    shares: Floats
    weights: Floats


def fitted(found: Sequence[Points], most: float) -> tuple[list[float], float]:
    """Seconds of each part, none below 0, and by what share, at most `most`, others make all of it longer.

    The least such share that fits as well as any.
    """
    took_s = np.concatenate([points.took_s * points.weights for points in found])
    parts = np.concatenate([points.parts * points.weights[:, None] for points in found])
    shares = np.concatenate([points.shares for points in found])
    tried: list[tuple[float, float, list[float]]] = []
    for slower in np.arange(0.0, most + STEP / 2, STEP) if np.ptp(shares) > 0.5 else (0.0,):
        scaled = parts * (1 + slower * shares)[:, None]
        seconds = _not_negative(scaled, took_s)
        tried.append((float(((scaled @ seconds - took_s) ** 2).sum()), float(slower), seconds.tolist()))
    least = min(error for error, _, _ in tried)
    return next((found, slower) for error, slower, found in tried if error <= NEARLY * least)


def _not_negative(parts: Floats, took_s: Floats) -> Floats:
    """Least squares; what would be below 0 is left out, the worst first."""
    left = [k for k in range(parts.shape[1]) if parts[:, k].any()]
    found = np.zeros(parts.shape[1])
    while left:
        found[:] = 0.0
        found[left] = np.linalg.lstsq(parts[:, left], took_s, rcond=None)[0]
        worst = min(left, key=lambda k: found[k])
        if found[worst] >= 0:
            break
        left.remove(worst)
    return found


def _lives(run: Recorded) -> Points:
    """Whole lives: one, tokens, tokens of all rows meanwhile, and steps with further versions."""
    trains = integral(
        point
        for step in run.trainings
        for point in ((step.began_s - step.early_s, 1.0), (step.ended_s, -1.0))
    )
    made, alive = {}, {}
    for number, *_ in run.engines:
        own = [life for life in run.lives if life.engine == number]
        made[number] = integral(
            point
            for life in own
            for point in (
                (life.began_s, life.tokens / life.took_s),
                (life.ended_s, -life.tokens / life.took_s),
            )
        )
        alive[number] = integral(_versions(own))
    whole = [life for life in run.lives if life.is_whole]
    rows = []
    for life in whole:
        begins, ends = life.began_s, life.ended_s
        of_all = made[life.engine](ends) - made[life.engine](begins)
        versions = (alive[life.engine](ends) - alive[life.engine](begins)) / life.took_s
        share = min(1.0, (trains(ends) - trains(begins)) / life.took_s)
        rows.append((1.0, life.tokens, of_all, life.tokens * max(0.0, versions - 1), life.took_s, share))
    table = np.array(rows, dtype=float).reshape(-1, 6)
    return Points(table[:, 4], table[:, :4], table[:, 5], 1 / np.sqrt(table[:, 1]))


def _versions(lives: Iterable[Life]) -> Iterable[tuple[float, float]]:
    """When an engine begins to decode one more version, or ends."""
    running: Counter[int] = Counter()
    changes = [(life.began_s, 1, life.version) for life in lives]
    changes += [(life.ended_s, -1, life.version) for life in lives]
    for at_s, change, version in sorted(changes):
        before = len(+running)
        running[version] += change
        if (after := len(+running)) != before:
            yield at_s, float(after - before)


def _trainings(run: Recorded) -> Points:
    """Steps: one and thousands of tokens; the share of engines that had requests meanwhile."""
    by_engine: dict[int, list[Life]] = defaultdict(list)
    for life in run.lives:
        by_engine[life.engine].append(life)
    busy = integral(point for own in by_engine.values() for point in _busy(own))
    rows = [
        (1.0, step.tokens / 1000, step.took_s, (busy(step.ended_s) - busy(step.began_s - step.early_s)))
        for step in run.trainings
    ]
    table = np.array(rows, dtype=float).reshape(-1, 4)
    return Points(
        table[:, 2], table[:, :2], table[:, 3] / table[:, 2] / len(run.engines), np.ones(len(table))
    )


def _busy(lives: Iterable[Life]) -> Iterable[tuple[float, float]]:
    """When an engine has requests, and when none."""
    num = 0
    changes = sorted([(life.began_s, 1) for life in lives] + [(life.ended_s, -1) for life in lives])
    for at_s, change in changes:
        if num == 0 or num + change == 0:
            yield at_s, float(change)
        num += change


def integral(changes: Iterable[tuple[float, float]]) -> Callable[[float], float]:
    """Of what changes by so much at each time, from the first on."""
    found = sorted(changes) or [(0.0, 0.0)]
    at_s = np.array([at for at, _ in found])
    levels = np.cumsum([by for _, by in found])
    sums = np.concatenate([[0.0], np.cumsum(levels[:-1] * np.diff(at_s))])
    return lambda time_s: float(np.interp(time_s, at_s, sums))
