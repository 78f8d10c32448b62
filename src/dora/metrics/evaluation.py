"""Evaluation results: rewards and pass@k of one version's responses to the held-out prompts.

A response passes with a reward of at least 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dora.core.actions import Action, FinishEvaluation, StartEvaluation
from dora.core.events import Event, GroupScored, RequestFinished
from dora.core.state import State
from dora.core.types import EvaluationRule, GroupId, passes
from dora.metrics.rollout import percentile
from dora.text import plural

VERSION_KEY = "val/version"  # prefix of the lines of metrics.jsonl that belong to an evaluation
Z_95 = 1.959964  # standard deviations that enclose 95 % of a normal distribution


@dataclass
class EvaluationResult:
    """The responses of one version; a prompt that could not be scored counts as 0 in each of its responses.

    If `is_greedy`, the first response to a prompt is greedy; the others are sampled as in training.
    """

    version: int
    num_prompts: int
    num_responses: int  # to each prompt
    is_greedy: bool
    rewards: dict[GroupId, tuple[float, ...]] = field(default_factory=dict)
    # -> rewards by task, if there are several; empty once the evaluation has finished
    task_rewards: dict[GroupId, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    # Source, "": all -> metrics of the rewards by task of a finished evaluation
    task_means: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)  # tokens; of sampled responses, if there are any
    sources: Mapping[str, range] = field(default_factory=dict)  # -> rows of the held-out prompts
    pass_threshold: float = 1.0

    def update(self, event: RequestFinished | GroupScored) -> None:
        """Account for an event about one of its prompts."""
        if isinstance(event, GroupScored):
            self.rewards[event.group] = event.rewards
        elif event.request.sibling >= self.shown_sibling:
            self.lengths.append(event.num_tokens)

    def finish(self) -> None:
        """Compute the mean of each task that scored all scored prompts, and drop the rewards by task."""
        scored = [*self.task_rewards.values()]
        tasks = [task for task in next(iter(scored), {}) if all(task in own for own in scored)]
        means: dict[str, dict[str, float]] = {source: {} for source in ("", *self.sources)}
        for task in tasks:
            whole = replace(self, rewards={group: (*own[task],) for group, own in self.task_rewards.items()})
            for source, part in ({"": whole} | whole.by_source()).items():
                for kind, mean in (("reward", part.sampled), ("greedy_reward", part.greedy)):
                    if mean is not None:
                        means[source][f"val/{kind}/{task}/mean"] = mean
        self.task_means, self.task_rewards = means, {}

    @property
    def greedy(self) -> float | None:
        """Mean reward of the greedy responses; None without any."""
        return self._sum(range(1)) / self.num_prompts if self.is_greedy else None

    @property
    def sampled(self) -> float | None:
        """Mean reward of the sampled responses; None without any."""
        siblings = range(int(self.is_greedy), self.num_responses)
        return self._sum(siblings) / (self.num_prompts * len(siblings)) if siblings else None

    @property
    def reward(self) -> float:
        """Mean reward of the sampled responses, or of the greedy ones if none were sampled."""
        mean = self.greedy if self.sampled is None else self.sampled
        assert mean is not None, "an evaluation has responses"
        return mean

    @property
    def num_failed(self) -> int:
        """Prompts without rewards, once the evaluation has finished."""
        return self.num_prompts - len(self.rewards)

    @property
    def shown_sibling(self) -> int:
        """The response shown as an example: the first sampled one, if there are any."""
        return int(self.is_greedy and self.num_responses > 1)

    def pass_rates(self) -> dict[str, tuple[float, float, float]]:
        """ "pass@k" of the sampled responses and "greedy_pass": value and 95 % confidence interval."""
        found = {}
        passing = [[passes(r, self.pass_threshold) for r in rewards] for rewards in self.rewards.values()]
        num_sampled = self.num_responses - self.is_greedy
        for k in pass_k_values(num_sampled) if num_sampled else []:
            found[f"pass@{k}"] = sum(pass_at_k(num_sampled, sum(p[-num_sampled:]), k) for p in passing)
        if self.is_greedy:
            found["greedy_pass"] = float(sum(p[0] for p in passing))
        means = {name: total / self.num_prompts for name, total in found.items()}
        return {name: (mean, *wilson_interval(mean, self.num_prompts)) for name, mean in means.items()}

    def metrics(self) -> dict[str, float]:
        """The names and values in metrics.jsonl."""
        found: dict[str, float] = {VERSION_KEY: self.version, "val/num_failed": self.num_failed}
        means = {"val/reward_mean": self.sampled, "val/greedy_reward_mean": self.greedy}
        found |= {name: mean for name, mean in means.items() if mean is not None}
        found |= self.task_means.get("", {})
        for name, (value, low, high) in self.pass_rates().items():
            found |= {f"val/{name}": value, f"val/{name}_low": low, f"val/{name}_high": high}
        if self.lengths:
            found["val/response_length_mean"] = statistics.fmean(self.lengths)
        for name, part in self.by_source().items():
            own = part.metrics()
            found |= {f"val/{name}/{key.removeprefix('val/')}": own[key] for key in own if key != VERSION_KEY}
        return found

    def by_source(self) -> dict[str, EvaluationResult]:
        """The results of each source, without lengths; empty with one dataset."""
        return {
            name: replace(
                self,
                num_prompts=len(rows),
                rewards={group: own for group, own in self.rewards.items() if group.row in rows},
                task_rewards={},
                task_means={"": self.task_means.get(name, {})},
                lengths=[],
                sources={},
            )
            for name, rows in self.sources.items()
        }

    def to_json(self) -> dict[str, float]:
        """One item of the summary's `evaluations`."""
        return {name.removeprefix("val/"): value for name, value in self.metrics().items()}

    def describe(self) -> str:
        """The figures in one line."""
        means = {"sampled": self.sampled, "greedy": self.greedy}
        parts = [f"{name} {mean:.3f}" for name, mean in means.items() if mean is not None]
        if self.num_responses - self.is_greedy > 1:
            name = f"pass@{self.num_responses - self.is_greedy}"
            parts.append("{} {:.3f} ({:.3f} to {:.3f})".format(name, *self.pass_rates()[name]))
        if self.lengths:
            parts.append(f"length p50 {percentile(self.lengths, 0.5)}, p99 {percentile(self.lengths, 0.99)}")
        if self.num_failed:
            parts.append(f"{plural(self.num_failed, 'prompt')} failed")
        parts += [f"{name}: {part.describe()}" for name, part in self.by_source().items()]
        return ", ".join(parts)

    def _sum(self, siblings: range) -> float:
        """Exact, so that the order in which prompts finish does not change it."""
        return math.fsum(rewards[k] for rewards in self.rewards.values() for k in siblings)


def best_first(rewards: Mapping[int, float]) -> tuple[int, ...]:
    """Versions in the order of their mean rewards, the highest first; of equal ones the older first."""
    return tuple(sorted(rewards, key=lambda version: (-rewards[version], version)))


def pass_k_values(num_responses: int) -> list[int]:
    """The k for which pass@k is reported: powers of two, and all responses."""
    powers = [1 << power for power in range(num_responses.bit_length()) if 1 << power < num_responses]
    return [*powers, num_responses]


def pass_at_k(num_responses: int, num_passing: int, k: int) -> float:
    """Probability that one of k responses, drawn from these without replacement, passes.

    1 - C(n - c, k) / C(n, k): the unbiased estimator of Chen et al., arXiv 2107.03374, equation 1.
    """
    return 1.0 - math.comb(num_responses - num_passing, k) / math.comb(num_responses, k)


def wilson_interval(mean: float, count: int) -> tuple[float, float]:
    """95 % confidence interval of the mean of `count` independent values between 0 and 1.

    Wilson's score interval (J. Am. Stat. Assoc. 22, 1927). Unlike a bootstrap it has a width where all values
    are 0 or all are 1. It is derived for values of 0 or 1; for others, whose variance is below mean * (1 -
    mean), it is too wide rather than too narrow.
    """
    spread = Z_95**2 / count
    middle = (mean + spread / 2) / (1 + spread)
    half = Z_95 / (1 + spread) * math.sqrt(mean * (1 - mean) / count + spread / count / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass
class EvaluationTracker:
    """The evaluations of a run, in order, from events and actions."""

    is_greedy: bool
    sources: Mapping[str, range] = field(default_factory=dict)  # -> rows of the held-out prompts
    # Of scored prompts, by task, if there are several; `update` removes those of the prompt that it reads.
    task_rewards: dict[GroupId, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    pass_threshold: float = 1.0
    finished: list[EvaluationResult] = field(default_factory=list)
    _running: EvaluationResult | None = None

    def update(
        self, event: Event | None, actions: Sequence[Action], rule: EvaluationRule | None
    ) -> EvaluationResult | None:
        """Account for an event and its actions; returns an evaluation that has finished with them."""
        running = self._running
        if running is not None and (
            (isinstance(event, RequestFinished) and event.request.is_held_out)
            or (isinstance(event, GroupScored) and event.group.is_held_out)
        ):
            running.update(event)
            if isinstance(event, GroupScored):
                running.task_rewards[event.group] = self.task_rewards.pop(event.group, {})
        finished = None
        for action in actions:
            if isinstance(action, FinishEvaluation):
                assert running is not None, "an evaluation finished without having started"
                running.finish()
                self.finished.append(finished := running)
                self._running = None
            elif isinstance(action, StartEvaluation) and rule is not None:
                self._running = EvaluationResult(
                    action.version,
                    rule.num_prompts,
                    rule.num_answers,
                    self.is_greedy,
                    sources=self.sources,
                    pass_threshold=self.pass_threshold,
                )
        return finished

    def best_first(self) -> tuple[int, ...]:
        """The evaluated versions, that with the highest mean reward first."""
        return best_first({result.version: result.reward for result in self.finished})


def describe_pending_evaluation(state: State) -> str:
    """Which evaluation a run still waits for before that of its last version; empty if none."""
    run, rule = state.evaluation, state.limits.evaluation
    if run is None or rule is None or run.version == state.limits.num_steps or not state.is_training_done:
        return ""
    num_left = rule.num_prompts - run.num_prompts_done
    return (
        f"all steps are trained; waiting for {num_left} of {rule.num_prompts} prompts of the evaluation of "
        f"version {run.version}"
    )
