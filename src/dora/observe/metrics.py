"""Every name in `metrics.jsonl` and `summary.json`: its unit, what it means, and when it is there.

The pages of the documentation and `dora metrics` show these tables; the tests compare them with real runs.
Capitals in a name stand for what varies: `staleness/num_S` is `staleness/num_0`, `staleness/num_1` and so on.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from dora.errors import InputError


class Metric(NamedTuple):
    """Names that share a meaning; `only`: when they are there, empty where they always are."""

    names: str  # separated by ", "
    unit: str
    meaning: str
    only: str = ""

    def each(self) -> list[str]:
        """Its names, one by one."""
        return self.names.split(", ")

    def has(self, name: str) -> bool:
        """Whether a name found in a file is one of these."""
        return any(_pattern(own).fullmatch(name) for own in self.each())


class Part(NamedTuple):
    """Metrics that are read together."""

    key: str  # what the page of the documentation calls its place
    title: str
    metrics: tuple[Metric, ...]


def _pattern(name: str) -> re.Pattern[str]:
    """NAME stands for any text; S, N and K at the end of a word for a number."""
    pattern = re.sub(r"(?<=[_@])(?:S|N|K)(?=_|$)", r"\\d+", re.escape(name))
    return re.compile(pattern.replace("NAME", "[^/]+"))


LEARNT = (
    Metric("step", "", "number of the training step, from 0; it makes version step + 1"),
    Metric("t_s", "s", "when it ended, since the run began; the time between two lives is left out"),
    Metric("reward/mean, reward/std, reward/min, reward/max", "reward", "over the samples of the batch"),
    Metric(
        "reward/NAME/mean",
        "reward",
        "of the task NAME alone, unweighted; that of `[reward]` is called `reward`",
        "with a table `[[task]]` beside `[reward]` or another",
    ),
    Metric("reward/frac_zero_std", "share of groups", "all rewards equal: nothing was learnt from these"),
    Metric(
        "response_length/mean, response_length/min, response_length/max",
        "tokens",
        "of the answers in the batch",
    ),
    Metric("response_length/clip_ratio", "share of answers", "cut at `max_response_length`"),
    Metric("staleness/mean, staleness/min, staleness/max", "versions", "of the samples: step - version"),
    Metric("staleness/num_S", "samples", "of staleness S: the histogram, one name for each S that occurs"),
    Metric(
        "staleness/effective",
        "versions",
        "the bound for groups admitted from here on, lower than `max_staleness` with `staleness "
        '= "adaptive"`',
    ),
    Metric("tokens", "tokens", "of the answers in the batch"),
    Metric("groups/num_admitted, groups/num_filtered, groups/num_failed", "groups", "since the run began"),
    Metric("groups/num_ready", "groups", "scored and not trained yet"),
    Metric(
        "outside/NAME",
        "",
        "what a trainer outside sent with its weights; names that follow from the gradient are then absent",
        '`service.trainer = "external"`',
    ),
)
EVALUATED = (
    Metric("val/version", "", "that answered the held-out prompts"),
    Metric(
        "val/num_failed", "prompts", "that an engine refused or that could not be scored; they count as 0"
    ),
    Metric("val/reward_mean", "reward", "of the sampled answers", "with `eval.num_samples`"),
    Metric("val/greedy_reward_mean", "reward", "of the greedy answers", "with `eval.greedy`"),
    Metric(
        "val/pass@K",
        "probability",
        "that one of K sampled answers has a reward of at least 1",
        "with `eval.num_samples`",
    ),
    Metric("val/greedy_pass", "share of prompts", "whose greedy answer has", "with `eval.greedy`"),
    Metric(
        "val/pass@K_low, val/pass@K_high, val/greedy_pass_low, val/greedy_pass_high",
        "",
        "95 % interval of these",
        "as these",
    ),
    Metric("val/response_length_mean", "tokens", "of the sampled answers, or of the greedy ones"),
)
TRAINER = (
    Metric("actor/pg_loss", "", "value of the policy loss"),
    Metric(
        "actor/kl_loss",
        "nats",
        "KL to the initial policy, as estimated by `kl_loss_type`",
        "with `kl_loss_coef`",
    ),
    Metric("actor/entropy", "nats per token", "of the policy in training", "where a token is trained"),
    Metric(
        "actor/ppo_kl",
        "nats per token",
        "mean of behaviour - current log-prob; as `off_policy/kl_k1` without its bound",
        "where a token is trained",
    ),
    Metric(
        "actor/pg_clipfrac", "share of tokens", "a bound of the loss decided them", "where a token is trained"
    ),
    Metric(
        "actor/pg_clipfrac_low, actor/pg_clipfrac_high",
        "share of tokens",
        "of these, those that have become less, or more probable since they were drawn",
        "where a token is trained",
    ),
    Metric("actor/grad_norm", "", "of the gradient, before it is clipped"),
    Metric("actor/lr", "", "learning rate of the step"),
    Metric(
        "actor/num_tokens",
        "tokens",
        "answer tokens that went through the model: groups of equal rewards need not",
    ),
    Metric("actor/num_tokens_early", "tokens", "of these, before the batch was complete"),
    Metric("actor/num_updates", "updates", "of the weights in this step"),
    Metric(
        "actor/tflop",
        "TFLOP",
        "of the policy's passes forward and back, its comparisons, and the reference's; nothing "
        "that is computed again to save memory, nor exact mode's log-probs",
    ),
    Metric(
        "critic/vf_loss",
        "reward squared",
        "half the squared error of its values, clipped, per token learnt from",
        'with `adv_estimator = "gae"`',
    ),
    Metric(
        "critic/vf_clipfrac",
        "share of tokens",
        "the clipped error decided them",
        'with `adv_estimator = "gae"`',
    ),
    Metric(
        "critic/vf_explained_var",
        "share",
        "of the returns' variance that was foretold: 1 is all of it, 0 no better than a constant",
        'with `adv_estimator = "gae"`',
    ),
    Metric(
        "critic/values/mean, critic/returns/mean",
        "reward",
        "over the tokens of the batch: what was foretold, and what came",
        'with `adv_estimator = "gae"`',
    ),
    Metric("critic/grad_norm", "", "of its gradient, before it is clipped", 'with `adv_estimator = "gae"`'),
    Metric("critic/lr", "", "its learning rate of the step", 'with `adv_estimator = "gae"`'),
    Metric("moe/load_imbalance", "", "fullest expert over the mean, 1 is even", "mixtures of experts"),
    Metric(
        "off_policy/ess",
        "share of tokens",
        "effective sample size, 1: all tokens weigh alike",
        "where a token is trained",
    ),
    Metric(
        "off_policy/kl_k1, off_policy/kl_k3",
        "nats per token",
        "KL of the policies that sampled to the one in training, by two estimates",
        "where a token is trained",
    ),
    Metric(
        "off_policy/kl_k3_age_N",
        "nats per token",
        "the same of the samples that are N versions old; what `weights.skip_below_kl` looks at",
        "where a token of that age is trained",
    ),
    Metric(
        "off_policy/frac_truncated, off_policy/frac_masked",
        "share of tokens",
        "a correction has capped their weight, or left them out",
        "where a token is trained",
    ),
    Metric(
        "off_policy/weight_mean", "", "mean weight that corrections give a token", "where a token is trained"
    ),
    Metric(
        "mismatch/num_tokens", "tokens", "compared between trainer and engine", "where a token is compared"
    ),
    Metric(
        "mismatch/logprob_abs_diff_mean, mismatch/logprob_abs_diff_max",
        "nats",
        "distance of trainer's and engine's log-prob under weights of the same version",
        "where a token is compared",
    ),
    Metric("mismatch/kl", "nats per token", "KL(engine to trainer), k3", "where a token is compared"),
)
TIME = (
    Metric("timing_s/step", "s", "since the step before ended, or the run began"),
    Metric(
        "timing_s/wait", "s", "the trainer had no complete batch; it may have worked on an incomplete one"
    ),
    Metric("timing_s/train", "s", "from a complete batch to new weights"),
    Metric("timing_s/publish", "s", "from there until they could be loaded"),
    Metric("timing_s/recovery", "s", "from the loss of the trainer until another one was where it had been"),
    Metric("timing_s/rollout", "s", "some request was unfinished"),
    Metric("timing_s/reward", "s", "some group was being judged"),
    Metric("timing_s/stall", "s", "of the wait: for a group at its deadline"),
    Metric("timing_s/update_actor", "s", "the trainer computed, before the batch was complete or after"),
    Metric(
        "timing_s/group_spread_mean, timing_s/group_spread_max",
        "s",
        "from the first to the last answer of a group, of groups that were finished meanwhile; "
        "held-out prompts are none",
    ),
    Metric("trainer/idle_ratio", "share of time", "`timing_s/wait` over the step"),
    Metric(
        "rollout/busy_ratio",
        "share of rows x time",
        "that decoded since the step before, as engines told; they do with every answer and once a second",
    ),
    Metric(
        "rollout/num_engines, rollout/num_versions",
        "count",
        "engines that are here, versions with unfinished requests; at the end of the step, as the next three",
    ),
    Metric("rollout/num_running, rollout/num_waiting", "requests", "in a row of an engine, or without one"),
    Metric("rollout/kv_share_max", "share", "of the fullest engine's KV blocks, as last told"),
    Metric(
        "perf/throughput",
        "tokens/s",
        "answer tokens trained, over the time of the step; of the whole run, not of one GPU",
    ),
    Metric(
        "perf/tflops/actor",
        "TFLOP/s",
        "`actor/tflop` over `timing_s/update_actor`, of all ranks; too low with a critic, whose "
        "time counts and whose work does not",
    ),
    Metric("perf/mfu/actor", "share", "of what the trainer's devices can do", "where the peak is known"),
    Metric("perf/peak_memory_gb", "GB", "most that the trainer's process has had: on its GPU, or resident"),
)
SUMMARY = (
    Metric("steps", "steps", "that were trained"),
    Metric(
        "trained_groups, filtered_groups, failed_groups, pending_groups",
        "groups",
        "how every admitted group ended (C2)",
    ),
    Metric("trained_samples", "samples", "in trained groups"),
    Metric("eval_before, eval_after", "reward", "mean of the sampled answers to held-out prompts"),
    Metric("eval_greedy_before, eval_greedy_after", "reward", "mean of the greedy ones"),
    Metric(
        "eval_length_p50_before, eval_length_p99_before",
        "tokens",
        "of the sampled answers before training, or of the greedy ones",
        "with `eval.path`",
    ),
    Metric("eval_length_p50_after, eval_length_p99_after", "tokens", "the same after it", "with `eval.path`"),
    Metric("evaluations", "", "every evaluation: the names `val/...` without `val/`"),
    Metric("reward_last", "reward", "mean over the samples of the last step"),
    Metric("trained_tokens", "tokens", "of the answers that were trained"),
    Metric("regenerated_tokens", "tokens", "lost with an engine, as last reported, and generated once more"),
    Metric("aborted_tokens", "tokens", "of unfinished siblings of a group that failed"),
    Metric(
        "reprefill_tokens",
        "tokens",
        "of prompts and answers that were begun again though no engine was lost, or that moved without KV; "
        "also what engines computed again for newer weights (`partial`) or after a move that failed, in the "
        "last life of a resumed run",
    ),
    Metric("wall_s", "s", "of training, evaluation before and after it not included"),
    Metric("cpu_s", "s", "of all processes of the last life that lived to the end, evaluation not included"),
    Metric("tokens_per_s", "tokens/s", "answer tokens trained, over `wall_s`"),
    Metric(
        "live_versions_mean, live_versions_max",
        "versions",
        "with unfinished requests, over the time with any",
    ),
    Metric("staleness_mean, staleness_max", "versions", "of the samples trained"),
    Metric("staleness_histogram", "samples", "by staleness"),
    Metric(
        "staleness_effective_mean, staleness_effective_last",
        "versions",
        "the bound for new groups after each step",
    ),
    Metric(
        "engine_busy_ratio, engine_busy_ratios",
        "share of rows x time",
        "that decoded, first admission to last finish: of all engines, and of each; loads and "
        "idle time count as empty",
    ),
    Metric(
        "trainer_idle_ratio",
        "share of time",
        "in which no step was under way; groups of the next one may have been worked on",
    ),
    Metric("exposed_rollout_s", "s", "engines worked and no step was under way"),
    Metric("stall_s", "s", "no step could begin while a group at its deadline was unfinished"),
    Metric("stalls", "", "the longest of these: step, group, requests, seconds"),
    Metric(
        "mismatch_max", "nats", "largest distance of trainer's and engine's log-prob under the same version"
    ),
    Metric(
        "response_length_generated, response_length_trained",
        "tokens",
        "mean, p50, p99 and max of what was generated and of what was trained: their difference "
        "is the bias of whatever was left out",
    ),
    Metric("response_length_drift", "share", "mean length trained over mean length generated, less 1"),
    Metric("filtered_samples_by_length", "samples", "of filtered groups, by length in powers of two"),
    Metric("migrations, migration_reasons", "moves", "that succeeded, and why"),
    Metric(
        "failed_migrations, failed_migration_reasons",
        "moves",
        "that were not done; the request stayed where it was",
    ),
    Metric("migrated_kv_bytes", "bytes", "of KV that was copied"),
    Metric("migration_stop_s_p50, migration_stop_s_max", "s", "a moved request stood still"),
    Metric(
        "weight_loads, weight_loads_left_out",
        "loads",
        "of a version by an engine; those that were not asked for later",
    ),
    Metric(
        "weight_load_s, weight_load_stop_s",
        "s",
        "from order to end, summed; for which engines with requests stood still",
    ),
    Metric("engine_losses, engine_restarts", "engines", "that died or fell silent; that took their places"),
    Metric("trainer_losses", "", "times that the trainer died or hung, and another one took its place"),
    Metric(
        "trainer_recovery_s_max, engine_recovery_s_max",
        "s",
        "longest time until another trainer was where the lost one had been, with all steps redone; until "
        "another engine had joined in the place of a lost one",
    ),
    Metric("lives", "", "of the run: 1, and one more for each resume"),
    Metric("redone_steps, redone_tokens", "steps, tokens", "that resumes and new trainers trained once more"),
    Metric("orchestration_share", "share of time", "the orchestrator computed"),
    Metric("stopped", "", "why the run ended early; empty: it did not"),
    Metric("c1, c2, c3", "true or false", "the audit's verdicts: true where the guarantee was kept"),
    Metric("breaks_c1", "true or false", "whether the policy finishes answers with newer weights"),
    Metric("segmented_samples", "samples", "of several versions, which only such a policy has"),
)

PARTS = (
    Part("learnt", "What was learnt from", LEARNT),
    Part("evaluated", "Evaluations", EVALUATED),
    Part("trainer", "What the trainer did", TRAINER),
    Part("time", "Where the time went", TIME),
    Part("summary", "The run as a whole: summary.json", SUMMARY),
)


def found(word: str = "") -> list[tuple[str, Metric]]:
    """Title and metric wherever a word is in a name or in its meaning, or is a name that a file may have."""
    return [
        (part.title, metric)
        for part in PARTS
        for metric in part.metrics
        if word in metric.names or word in metric.meaning or metric.has(word)
    ]


def listing(word: str) -> str:
    """What `dora metrics` prints. Raises InputError where nothing is known of the word."""
    lines, last = list[str](), ""
    for title, metric in found(word):
        if title != last:
            lines += ["", title, ""]
        last = title
        unit = f" ({metric.unit})" if metric.unit else ""
        only = f"; only {metric.only}" if metric.only else ""
        lines += [f"  {metric.names}{unit}", f"      {metric.meaning}{only}"]
    if not lines:
        raise InputError(
            f"no metric has {word!r} in its name or its meaning; `dora metrics` without a word prints all"
        )
    return "\n".join(lines[1:]).replace("`", "")
