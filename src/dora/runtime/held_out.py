"""What evaluations say: rewards of the answers of one version to the held-out prompts.

`Evaluations` reads those beside the training off the facts and orders, so that a run that goes on has
them again.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from dora.core.actions import Action, BeginEvaluation, EndEvaluation
from dora.core.events import Event, GroupScored, RequestFinished
from dora.core.records import EvaluationRule, GroupId
from dora.core.state import State
from dora.core.wording import counted
from dora.runtime.lengths import percentile
from dora.runtime.passing import PASSING_REWARD, ks_of, pass_at_k, wilson_interval

VERSION = "val/version"  # in the lines of metrics.jsonl that tell of an evaluation


@dataclass
class Evaluation:
    """One version's answers; a prompt that could not be scored counts as 0 in each of its answers.

    The first answer to a prompt is the greedy one, if there `is_greedy`; the others are sampled as in
    training.
    """

    version: int
    num_prompts: int
    num_answers: int  # to each
    is_greedy: bool
    rewards: dict[GroupId, tuple[float, ...]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)  # tokens; of sampled answers, if there are any
    shown: dict[GroupId, tuple[str, str]] = field(default_factory=dict)  # prompt and answer of a few

    @property
    def greedy(self) -> float | None:
        """Mean reward of the greedy answers; None without."""
        return self._sum(range(1)) / self.num_prompts if self.is_greedy else None

    @property
    def sampled(self) -> float | None:
        """Mean reward of the sampled answers; None without."""
        siblings = range(int(self.is_greedy), self.num_answers)
        return self._sum(siblings) / (self.num_prompts * len(siblings)) if siblings else None

    @property
    def shown_sibling(self) -> int:
        """The answer that examples show: the first that is sampled, if there are any."""
        return int(self.is_greedy and self.num_answers > 1)

    def examples(self) -> list[tuple[str, str, float]]:
        """Prompt, answer and its reward of a few."""
        zeros = (0.0,) * self.num_answers
        return [
            (prompt, answer, self.rewards.get(group, zeros)[self.shown_sibling])
            for group, (prompt, answer) in self.shown.items()
        ]

    @property
    def num_failed(self) -> int:
        """Prompts without rewards, once it is over."""
        return self.num_prompts - len(self.rewards)

    def hear(self, event: RequestFinished | GroupScored) -> None:
        """Take in a fact about one of its prompts."""
        if isinstance(event, GroupScored):
            self.rewards[event.group] = event.rewards
        elif event.request.sibling >= self.shown_sibling:
            self.lengths.append(event.num_tokens)

    def length_percentile(self, share: float) -> int | None:
        """Length (tokens) of answers that `share` of them do not exceed; None without any."""
        return int(percentile(self.lengths, share)) if self.lengths else None

    def passing(self) -> dict[str, tuple[float, float, float]]:
        """ "pass@k" of the sampled answers and "greedy_pass": value, and from where to where it may be."""
        found = {}
        passes = [[reward >= PASSING_REWARD for reward in rewards] for rewards in self.rewards.values()]
        num_sampled = self.num_answers - self.is_greedy
        for k in ks_of(num_sampled) if num_sampled else []:
            found[f"pass@{k}"] = sum(pass_at_k(num_sampled, sum(p[-num_sampled:]), k) for p in passes)
        if self.is_greedy:
            found["greedy_pass"] = float(sum(p[0] for p in passes))
        means = {name: total / self.num_prompts for name, total in found.items()}
        return {name: (mean, *wilson_interval(mean, self.num_prompts)) for name, mean in means.items()}

    def metrics(self) -> dict[str, float]:
        """As metrics.jsonl and trackers have them."""
        told: dict[str, float] = {VERSION: self.version, "val/num_failed": self.num_failed}
        means = {"val/reward_mean": self.sampled, "val/greedy_reward_mean": self.greedy}
        told |= {name: mean for name, mean in means.items() if mean is not None}
        for name, (value, low, high) in self.passing().items():
            told |= {f"val/{name}": value, f"val/{name}_low": low, f"val/{name}_high": high}
        if self.lengths:
            told["val/response_length_mean"] = statistics.fmean(self.lengths)
        return told

    def to_json(self) -> dict[str, float]:
        """The same as the summary has it."""
        return {name.removeprefix("val/"): value for name, value in self.metrics().items()}

    def describe(self) -> str:
        """The figures in one line."""
        means = {"sampled": self.sampled, "greedy": self.greedy}
        told = [f"{name} {mean:.3f}" for name, mean in means.items() if mean is not None]
        if self.num_answers - self.is_greedy > 1:
            name = f"pass@{self.num_answers - self.is_greedy}"
            told.append("{} {:.3f} ({:.3f} to {:.3f})".format(name, *self.passing()[name]))
        if self.lengths:
            told.append(f"length p50 {self.length_percentile(0.5)}, p99 {self.length_percentile(0.99)}")
        if self.num_failed:
            told.append(f"{counted(self.num_failed, 'prompt')} failed")
        return ", ".join(told)

    def _sum(self, siblings: range) -> float:
        return sum(rewards[k] for rewards in self.rewards.values() for k in siblings)


@dataclass
class Evaluations:
    """Those beside the training, in order."""

    is_greedy: bool
    ended: list[Evaluation] = field(default_factory=list)
    _under_way: Evaluation | None = None

    def hear(
        self, event: Event | None, orders: Sequence[Action], rule: EvaluationRule | None
    ) -> Evaluation | None:
        """Take in one fact and its orders; an evaluation that is over with them is returned."""
        under_way = self._under_way
        if under_way is not None:
            is_finish = isinstance(event, RequestFinished) and event.request.is_held_out
            if is_finish or (isinstance(event, GroupScored) and event.group.is_held_out):
                under_way.hear(event)  # type: ignore[arg-type]
        over = None
        for order in orders:
            if isinstance(order, EndEvaluation):
                assert under_way is not None, "an evaluation ends that has not begun"
                self.ended.append(over := under_way)
                self._under_way = None
            elif isinstance(order, BeginEvaluation) and rule is not None:
                self._under_way = Evaluation(
                    order.version, rule.num_prompts, rule.num_answers, self.is_greedy
                )
        return over


def describe_awaited(state: State) -> str:
    """What a run whose last step is trained still waits for; empty if it does not."""
    run, rule = state.evaluation, state.limits.evaluation
    if run is None or rule is None or not state.is_trained:
        return ""
    num_left = rule.num_prompts - run.num_judged
    of_all = f"{num_left} of {rule.num_prompts} prompts"
    return f"all steps are trained, but {of_all} of the evaluation of version {run.version} are left"
