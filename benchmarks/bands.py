"""Mean accuracies over seeds with their 95 % intervals, by Student's t: what few runs can say, how surely."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom.
_T95 = [
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
]


def band(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of its 95 % interval.

    Of a single value the half is 1, for nothing is known of the others but that they are accuracies.
    """
    if len(values) < 2:
        return values[0], 1.0
    quantile = _T95[min(len(values) - 1, len(_T95)) - 1]
    return statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The band of ours - theirs, seed by seed: two-sided paired t-test at 5 %.

    Zero outside of the band is a difference that seeds do not explain.
    """
    return band([a - b for a, b in zip(ours, theirs, strict=True)])
