"""Mean accuracies over seeds with 95 % confidence intervals by Student's t."""

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
    """Mean, and half of its 95 % interval.

    For a single value the half is 1, because other accuracies may have any value from 0 to 1.
    """
    if len(values) < 2:
        return values[0], 1.0
    quantile = _T95[min(len(values) - 1, len(_T95)) - 1]
    return statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Mean and half interval of ours - theirs by seed: a two-sided paired t-test at 5 %.

    If 0 is not in the interval, the difference is significant.
    """
    return band([a - b for a, b in zip(ours, theirs, strict=True)])
