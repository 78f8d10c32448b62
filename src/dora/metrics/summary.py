"""`summary.json`: a run in numbers, complete also for a run that stopped or failed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from dora.core.state import State
from dora.metrics.evaluation import EvaluationResult, summarize_evaluation
from dora.metrics.run import RunMetrics, StepRecord


def summarize(
    metrics: RunMetrics,
    state: State,
    before: EvaluationResult | None,
    during: Iterable[EvaluationResult],
    after: EvaluationResult | None,
) -> dict[str, Any]:
    """The summary without the audit's verdicts; null where nothing was measured.

    `before`, `during` and `after` are the evaluations before, during and after training.
    """
    wall_s = max(1e-9, metrics.now_s - metrics.started_s)
    num_samples = metrics.staleness.total()
    utilization = metrics.utilization
    return {
        "steps": len(metrics.steps),
        "trained_groups": state.num_trained,
        "trained_samples": num_samples,
        "filtered_groups": state.num_filtered,
        "failed_groups": state.num_failed,
        "pending_groups": state.num_admitted - state.num_trained - state.num_filtered - state.num_failed,
        **summarize_evaluation("before", before),
        **summarize_evaluation("after", after),
        "evaluations": [e.to_json() for e in (before, *during, after) if e is not None],
        "reward_last": metrics.steps[-1].rewards.mean if metrics.steps else None,
        "trained_tokens": metrics.trained_tokens,
        "regenerated_tokens": state.num_regenerated_tokens,
        "aborted_tokens": state.num_aborted_tokens,
        "reprefill_tokens": metrics.migrations.reprefill_tokens
        + sum(metrics.samples.num_recomputed.values()),
        "breaks_c1": state.limits.breaks_c1,
        "segmented_samples": metrics.num_segmented,
        "wall_s": round(wall_s, 3),
        "tokens_per_s": round(metrics.tokens_per_s, 1),
        "live_versions_max": metrics.live_versions_max,
        "live_versions_mean": round(metrics.live_version_s / max(1e-9, metrics.rollout_s), 3),
        "staleness_histogram": {str(s): n for s, n in sorted(metrics.staleness.items())},
        "staleness_mean": sum(s * n for s, n in metrics.staleness.items()) / max(1, num_samples),
        "staleness_max": max(metrics.staleness, default=0),
        "staleness_bound_mean": _mean(step.staleness_bound for step in metrics.steps),
        "staleness_bound_last": metrics.steps[-1].staleness_bound if metrics.steps else None,
        "rollout_utilization": round(utilization.overall(), 4),
        "rollout_utilization_by_engine": {
            str(engine): round(ratio, 4) for engine, ratio in utilization.by_engine().items()
        },
        "trainer_idle_ratio": round(metrics.trainer_idle_s / wall_s, 4),
        "logprob_mismatch_max": max(
            (found for found in map(_mismatch, metrics.steps) if found is not None), default=None
        ),
        "stall_s": round(state.stall_s, 3),
        "exposed_rollout_s": round(metrics.exposed_rollout_s, 3),
        "stalls": [stall.to_json() for stall in metrics.stalls.longest()],
        **metrics.lengths.to_json(),
        **metrics.migrations.to_json(),
        **metrics.weight_loads.to_json(),
        "engine_failures": metrics.engine_failures,
        "engine_restarts": metrics.engine_restarts,
        **metrics.recoveries.to_json(),
        "attempts": metrics.num_attempts,
        "redone_steps": metrics.redone_steps,
        "redone_tokens": metrics.redone_tokens,
    }


def _mean(values: Iterable[int]) -> float | None:
    found = [*values]
    return statistics.fmean(found) if found else None


def _mismatch(step: StepRecord) -> float | None:
    return step.others.get("mismatch/logprob_abs_diff_max")
