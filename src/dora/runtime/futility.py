"""Ends a run that cannot get anywhere: too many of its groups fail, or none teaches anything.

A few failures are a task's own affair; a run in which nothing else happens would only cost money.
"""

from __future__ import annotations

from collections.abc import Sequence

from dora.config import Config
from dora.core.actions import Action, Commit, Fail, Filter
from dora.core.state import State
from dora.errors import RunError

MIN_FILTERED, FILTERED_WINDOWS = 200, 20  # groups filtered in a row, before a run without signal is stopped
MIN_ENDED = 20  # groups; the failed share is taken of at least so many


class Futility:
    """Counts what orders say of groups that end untrained."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._first_failure = ""
        self._filtered_in_row = 0

    def check(self, orders: Sequence[Action], state: State, first_unscored: str) -> None:
        """Raises RunError with the first failure; `first_unscored` is that of a reward, if there was one."""
        for order in orders:
            if isinstance(order, Fail):
                self._first_failure = self._first_failure or f"group {order.group}: {order.reason}"
            elif isinstance(order, Filter):
                self._filtered_in_row += 1
            elif isinstance(order, Commit):
                self._filtered_in_row = 0
        in_batches = sum(map(len, state.batches.values()))  # a run that goes on trains some of them again
        ended = state.num_trained + in_batches + state.num_filtered + state.num_failed
        share = self._config.reward.max_failed_share
        if state.num_failed > share * max(ended, MIN_ENDED):
            detail = first_unscored or self._first_failure
            raise RunError(
                f"{state.num_failed} of {ended} groups failed, more than reward.max_failed_share = {share:g} "
                f"allows; the first failure:\n{detail.rstrip()}"
            )
        if self._filtered_in_row > max(MIN_FILTERED, FILTERED_WINDOWS * self._config.window):
            raise RunError(
                f"the last {self._filtered_in_row} groups were all filtered, for each had equal rewards; "
                "the task is too easy or too hard for the policy, or the reward is constant"
            )
