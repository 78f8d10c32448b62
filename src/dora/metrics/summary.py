"""`summary.json`: a run in numbers, complete also for a run that stopped or failed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from dora.core.state import State
from dora.metrics.evaluation import EvaluationResult
from dora.metrics.rollout import percentile
from dora.metrics.run import RunMetrics

MISMATCH = "mismatch/logprob_abs_diff_max"


def summarize(metrics: RunMetrics, state: State, evaluations: Sequence[EvaluationResult]) -> dict[str, Any]:
    """The summary without the audit's verdicts; null where nothing was measured."""
    of_version = {result.version: result for result in evaluations}
    spent_s = metrics.timing.total_s
    wall_s = max(1e-9, metrics.now_s - metrics.started_s)
    return {
        "steps": len(metrics.steps),
        "steps_without_gradient": sum(not step.has_gradient for step in metrics.steps),
        **_groups(metrics, state),
        **_evaluation("before", of_version.get(0)),
        **_evaluation("after", of_version.get(state.limits.num_steps)),
        "evaluations": [result.to_json() for result in evaluations],
        "reward_last": metrics.steps[-1].rewards.mean if metrics.steps else None,
        **_tokens(metrics, state),
        "wall_s": round(wall_s, 3),
        "tokens_per_s": round(metrics.tokens_per_s, 1),
        "live_versions_max": metrics.live_versions_max,
        "live_versions_mean": round(metrics.live_version_s / max(1e-9, spent_s["rollout"]), 3),
        **_staleness(metrics),
        "rollout_utilization": round(metrics.utilization.overall(), 4),
        "rollout_utilization_by_engine": {
            str(engine): round(ratio, 4) for engine, ratio in metrics.utilization.by_engine().items()
        },
        "trainer_idle_ratio": round(spent_s["wait_for_batch"] / wall_s, 4),
        "logprob_mismatch_max": max(
            (step.others[MISMATCH] for step in metrics.steps if MISMATCH in step.others), default=None
        ),
        "stall_s": round(state.stall_s, 3),
        "exposed_rollout_s": round(spent_s["exposed_rollout"], 3),
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
        "differing_redone_versions": metrics.differing_redone_versions,
    }


def _groups(metrics: RunMetrics, state: State) -> dict[str, Any]:
    num_finished = state.num_trained + state.num_filtered + state.num_failed
    return {
        "skipped_prompts": state.num_skipped,
        "trained_groups": state.num_trained,
        "trained_samples": metrics.staleness.total(),
        "filtered_groups": state.num_filtered,
        "failed_groups": state.num_failed,
        "retried_requests": state.num_retries,
        "pending_groups": state.num_admitted - num_finished,
    }


def _evaluation(when: str, result: EvaluationResult | None) -> dict[str, Any]:
    """The keys of the evaluation `when`: "before" or "after" training."""
    if result is None:
        return {f"eval_{when}": None, f"eval_greedy_{when}": None}
    return {
        f"eval_{when}": result.sampled,
        f"eval_greedy_{when}": result.greedy,
        f"eval_length_p50_{when}": percentile(result.lengths, 0.5),
        f"eval_length_p99_{when}": percentile(result.lengths, 0.99),
    }


def _tokens(metrics: RunMetrics, state: State) -> dict[str, Any]:
    num_reprefilled = metrics.migrations.reprefill_tokens + sum(metrics.samples.num_recomputed.values())
    return {
        "trained_tokens": metrics.trained_tokens,
        "regenerated_tokens": state.num_regenerated_tokens,
        "kept_tokens": state.num_kept_tokens,
        "aborted_tokens": state.num_aborted_tokens,
        "reprefill_tokens": num_reprefilled,
        "breaks_c1": state.limits.breaks_c1,
        "segmented_samples": metrics.num_segmented,
    }


def _staleness(metrics: RunMetrics) -> dict[str, Any]:
    histogram, bounds = metrics.staleness, [step.staleness_bound for step in metrics.steps]
    return {
        "staleness_histogram": {str(s): n for s, n in sorted(histogram.items())},
        "staleness_mean": sum(s * n for s, n in histogram.items()) / max(1, histogram.total()),
        "staleness_max": max(histogram, default=0),
        "staleness_bound_mean": statistics.fmean(bounds) if bounds else None,
        "staleness_bound_last": bounds[-1] if bounds else None,
    }
