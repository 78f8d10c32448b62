"""Stop a run without progress: too many groups fail, no group has a reward signal, or no event arrives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dora.config.schema import Config
from dora.core.actions import Action, Commit, Fail, Filter
from dora.core.events import Event, RequestFailed, ScoringFailed
from dora.core.state import State
from dora.core.types import GroupId
from dora.errors import RunError
from dora.runtime.process.supervisor import DriverClock

MIN_FILTERED, FILTERED_WINDOWS = 200, 20  # groups filtered in a row before the run is stopped
MIN_ENDED = 20  # the failed fraction is taken of at least this many groups


class FailureGuard:
    """Counts groups that end untrained, and held-out prompts that fail, since the last start or resume."""

    def __init__(self, config: Config, state: State) -> None:
        self._config = config
        self._num_failed_before, self._num_ended_before = state.num_failed, _num_ended(state)
        self._first_failure = ""
        self._filtered_in_row = 0
        self._failed_prompts: dict[GroupId, str] = {}  # held-out prompt -> why

    def check(
        self, event: Event | None, actions: Sequence[Action], state: State, first_scoring_failure: str
    ) -> None:
        """Raises RunError with the first failure; `first_scoring_failure` is that of a reward, if any."""
        self._check_evaluation(event, state, first_scoring_failure)
        for action in actions:
            if isinstance(action, Fail):
                self._first_failure = self._first_failure or f"group {action.group}: {action.reason}"
            elif isinstance(action, Filter):
                self._filtered_in_row += 1
            elif isinstance(action, Commit):
                self._filtered_in_row = 0
        failed = state.num_failed - self._num_failed_before
        ended = _num_ended(state) - self._num_ended_before
        limit = self._config.reward.max_failed_fraction
        if failed > limit * max(ended, MIN_ENDED):
            detail = first_scoring_failure or self._first_failure
            raise RunError(
                f"{failed} of {ended} groups failed, more than reward.max_failed_fraction = {limit:g} "
                "allows; correct the cause and resume the run, which does not count them again; the first "
                f"failure:\n{detail.rstrip()}"
            )
        if self._filtered_in_row > max(MIN_FILTERED, FILTERED_WINDOWS * self._config.max_groups_in_flight):
            raise RunError(
                f"the last {self._filtered_in_row} groups were all filtered: the rewards of each group are "
                "equal. The task is too easy or too hard for the policy, or the reward is constant"
            )

    def _check_evaluation(self, event: Event | None, state: State, first_scoring_failure: str) -> None:
        match event:
            case RequestFailed(_, request, reason) if request.is_held_out:
                prompt = request.group
            case ScoringFailed(prompt, reason) if prompt.is_held_out:
                reason = first_scoring_failure or reason
            case _:
                return
        self._failed_prompts.setdefault(prompt, reason)
        failures = [why for other, why in self._failed_prompts.items() if other.epoch == prompt.epoch]
        rule, limit = state.limits.evaluation, self._config.reward.max_failed_fraction
        if rule is not None and len(failures) > max(1.0, limit * rule.num_prompts):
            raise RunError(
                f"{len(failures)} of {rule.num_prompts} evaluation prompts could not be scored, more than "
                f"reward.max_failed_fraction = {limit:g} allows; the first failure:\n{failures[0].rstrip()}"
            )


def _num_ended(state: State) -> int:
    in_batches = sum(map(len, state.batches.values()))  # a resumed run trains some of them again
    return state.num_trained + in_batches + state.num_filtered + state.num_failed


class IdleTimeout:
    """Stops a run that waits too long for input through its service."""

    def __init__(
        self,
        timeout_s: float,
        clock: DriverClock,
        awaited_inputs: Callable[[], Sequence[str]],
        missing_agents: Callable[[], str] = str,
    ) -> None:
        """`awaited_inputs` names the external inputs that the run waits for; empty: none.

        `missing_agents` says what agents have to do if there are none, else "".
        """
        self._timeout_s, self._clock, self._awaited_inputs = timeout_s, clock, awaited_inputs
        self._missing_agents = missing_agents
        self._idle_since_s = clock.now_s

    def check(self, is_active: bool) -> None:
        """Raises RunError after service.idle_timeout_s without an event.

        `is_active`: an event has arrived, or the run is paused.
        """
        now_s = self._clock.now_s
        if is_active:
            self._idle_since_s = now_s
            return
        if now_s - self._idle_since_s > self._timeout_s and (inputs := self._awaited_inputs()):
            missing = self._missing_agents()
            detail = f" ({missing})" if missing else ""
            raise RunError(
                f"no event has arrived for service.idle_timeout_s = {self._timeout_s:g} s: the run waits for "
                f"{', '.join(inputs)} through its service{detail}; resume it once they are available"
            )
