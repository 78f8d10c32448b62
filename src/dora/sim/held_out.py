"""Evaluations, seen from outside the core: a part of the checker.

One at a time, every request of it once and on its version, every prompt judged with all its answers, its
version kept until it is over, and never more than its share of rows beside the training.
"""

from __future__ import annotations

from dora.core.actions import BeginEvaluation, EndEvaluation, SkipEvaluation
from dora.core.records import GroupId, Limits, RequestId
from dora.sim.engines import Violation
from dora.sim.seats import require


class HeldOut:
    """The ledger of evaluations."""

    def __init__(self, limits: Limits) -> None:
        self._rule, self._num_steps = limits.evaluation, limits.num_steps
        self.version: int | None = None  # of the one under way
        self._last = 0  # version that was due last
        self._is_due: int | None = None  # just published; to be begun or skipped at once
        self.running: set[RequestId] = set()  # given to an engine once, and not at their end
        self._ended: set[RequestId] = set()
        self._failed: set[GroupId] = set()
        self._judging: set[GroupId] = set()
        self._judged: set[GroupId] = set()
        self._newest = self._num_rows = 0  # the most that were seen

    # facts

    def begin_fact(self) -> None:
        """Before each fact: what the last one asked for has been ordered."""
        require(self._is_due is None, f"version {self._is_due} was due for an evaluation")
        is_over = self._rule is not None and len(self._judged) == self._rule.num_prompts
        require(self.version is None or not is_over, f"the evaluation of {self.version} does not end")

    def joined(self, num_rows: int) -> None:
        """Rows of all engines that are there now."""
        self._num_rows = max(self._num_rows, num_rows)

    def published(self, version: int) -> None:
        rule, self._newest = self._rule, max(self._newest, version)
        if rule and self._last < version < self._num_steps and version % rule.every == 0:
            self._last = self._is_due = version

    def end(self, request: RequestId, *, is_failed: bool) -> None:
        self.running.remove(request)
        self._ended.add(request)
        if is_failed:
            self._failed.add(request.group)
        if self._is_whole(request.group) and request.group in self._failed:
            self._judged.add(request.group)

    def judge(self, group: GroupId) -> None:
        self._judging.remove(group)
        self._judged.add(group)

    # orders

    def begin(self, order: BeginEvaluation) -> None:
        require(self.version is None, f"versions {self.version} and {order.version} are evaluated at once")
        self._take_due(order.version)
        self.version = order.version
        for known in (self._ended, self._failed, self._judged):
            known.clear()

    def skip(self, order: SkipEvaluation) -> None:
        is_under_way = self.version is not None and self.version == order.under_way
        require(is_under_way, f"the evaluation of version {order.version} is skipped for none")
        self._take_due(order.version)

    def generate(self, request: RequestId, *, is_over: bool) -> int:
        """The version a request has to be generated on; `is_over`: there is no other use for the rows."""
        rule = self._rule
        is_known = rule is not None and request.row < rule.num_prompts and request.sibling < rule.num_answers
        if not is_known or self.version is None or request.epoch != -1 - self.version:
            raise Violation(f"{request} is generated, and version {self.version} is evaluated")
        require(request not in self._ended, f"{request} is generated after its end")
        self.running.add(request)
        if self.version == self._newest and not is_over:
            share = max(1, self._num_rows // 8)
            require(len(self.running) <= share, f"{len(self.running)} of {self._num_rows} rows evaluate")
        return self.version

    def score(self, group: GroupId) -> None:
        is_due = self._is_whole(group) and group not in self._failed and group not in self._judged
        require(is_due, f"held-out prompt {group} is scored before it is whole, or again")
        self._judging.add(group)  # a second time after everything died

    def finish(self, order: EndEvaluation) -> None:
        assert self._rule is not None
        is_over = self.version == order.version and len(self._judged) == self._rule.num_prompts
        require(is_over, f"the evaluation of version {order.version} ends before it is over")
        self.version = None

    def _take_due(self, version: int) -> None:
        require(self._is_due == version, f"version {version} is not due for an evaluation")
        self._is_due = None

    def _is_whole(self, group: GroupId) -> bool:
        assert self._rule is not None
        return all(RequestId(*group, k) in self._ended for k in range(self._rule.num_answers))
