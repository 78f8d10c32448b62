"""`summary.json`: a run in one page of numbers.

Complete also for a run that was stopped or failed; null where nothing was measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from dora.core.state import State
from dora.runtime.held_out import Evaluation
from dora.runtime.meter import Meter, StepRecord
from dora.runtime.travels import Travels


def summarize(
    meter: Meter,
    state: State,
    before: Evaluation | None,
    during: Iterable[Evaluation],
    after: Evaluation | None,
) -> dict[str, Any]:
    """Everything but the audit's verdicts c1, c2, c3, which are added from the run's files.

    Times in seconds; the evaluations are those before, during and after training.
    """
    wall_s = max(1e-9, meter.now_s - meter.began_s)
    trained = meter.staleness.total()
    return {
        "steps": len(meter.steps),
        "trained_groups": state.num_trained,
        "trained_samples": trained,
        "filtered_groups": state.num_filtered,
        "failed_groups": state.num_failed,
        "pending_groups": state.num_admitted - state.num_trained - state.num_filtered - state.num_failed,
        **evaluation_numbers("before", before),
        **evaluation_numbers("after", after),
        "evaluations": [e.to_json() for e in (before, *during, after) if e is not None],
        "reward_last": meter.steps[-1].rewards.mean if meter.steps else None,
        "trained_tokens": meter.trained_tokens,
        "regenerated_tokens": state.num_regenerated_tokens,
        "aborted_tokens": state.num_aborted_tokens,
        "reprefill_tokens": meter.travels.reprefill_tokens + sum(meter.teller.num_recomputed.values()),
        "breaks_c1": state.limits.breaks_c1,
        "segmented_samples": meter.num_segmented,
        "wall_s": round(wall_s, 3),
        "tokens_per_s": round(meter.tokens_per_s, 1),
        "live_versions_max": meter.live_versions_max,
        "live_versions_mean": round(meter.live_version_s / max(1e-9, meter.rollout_s), 3),
        "staleness_histogram": {str(s): n for s, n in sorted(meter.staleness.items())},
        "staleness_mean": sum(s * n for s, n in meter.staleness.items()) / max(1, trained),
        "staleness_max": max(meter.staleness, default=0),
        "staleness_effective_mean": _mean(step.effective for step in meter.steps),
        "staleness_effective_last": meter.steps[-1].effective if meter.steps else None,
        "engine_busy_ratio": round(meter.occupancy.of_all(), 4),
        "engine_busy_ratios": {str(e): round(share, 4) for e, share in meter.occupancy.of_each().items()},
        "trainer_idle_ratio": round(meter.trainer_idle_s / wall_s, 4),
        "mismatch_max": max((m for m in map(_mismatch, meter.steps) if m is not None), default=None),
        "stall_s": round(state.stall_s, 3),
        "exposed_rollout_s": round(meter.exposed_rollout_s, 3),
        "stalls": [stall.to_json() for stall in meter.stalls.longest()],
        **meter.lengths.to_json(),
        **_moves(meter.travels),
        **meter.loads.to_json(),
        "engine_losses": meter.engine_losses,
        "engine_restarts": meter.engine_restarts,
        **meter.recoveries.to_json(),
        "lives": meter.lives,
        "redone_steps": meter.redone_steps,
        "redone_tokens": meter.redone_tokens,
    }


def _mean(values: Iterable[int]) -> float | None:
    found = [*values]
    return statistics.fmean(found) if found else None


def _mismatch(step: StepRecord) -> float | None:
    return step.metrics.get("mismatch/logprob_abs_diff_max")


def _moves(travels: Travels) -> dict[str, Any]:
    return {
        "migrations": travels.migrations.total(),
        "migration_reasons": dict(sorted(travels.migrations.items())),
        "failed_migrations": travels.failed.total(),
        "failed_migration_reasons": dict(sorted(travels.failed.items())),
        "migrated_kv_bytes": travels.kv_bytes,
        "migration_stop_s_p50": travels.stop_percentile(0.5),
        "migration_stop_s_max": travels.stop_percentile(1.0),
    }


def evaluation_numbers(when: str, evaluation: Evaluation | None) -> dict[str, Any]:
    """What the summary says of the evaluation `when`, "before" or "after" training."""
    if evaluation is None:
        return {f"eval_{when}": None, f"eval_greedy_{when}": None}
    return {
        f"eval_{when}": evaluation.sampled,
        f"eval_greedy_{when}": evaluation.greedy,
        f"eval_length_p50_{when}": evaluation.length_percentile(0.5),
        f"eval_length_p99_{when}": evaluation.length_percentile(0.99),
    }
