"""A forecast of a recorded run: its limits, engines and answers, with costs that may be another run's.

What happened when is not looked at, only what there was to do; so that a forecast can be wrong.
"""

from __future__ import annotations

from dataclasses import replace

from dora.core.orchestrator import Orchestrator
from dora.sim.forecast.fluid import FluidEngine
from dora.sim.forecast.lengths import CHUNK
from dora.sim.forecast.manner import Manner
from dora.sim.forecast.measured import Measured
from dora.sim.forecast.outcome import Outcome
from dora.sim.forecast.player import Player
from dora.sim.forecast.recorded import Recorded


class RecordedLengths:
    """The answers of a run by their prompts' positions; those that it did not finish are as others were."""

    prompt, turns, delay_s = 0, 1, 0.0

    def __init__(self, recorded: Recorded) -> None:
        size = recorded.limits.group_size
        known = {
            recorded.index[group]: [lengths[k] for k in range(size)]
            for group, lengths in recorded.answers.items()
            if len(lengths) == size and group in recorded.index
        }
        self._known = known
        self._others = [known[index] for index in sorted(known)]

    def draw(self, chunk: int, group_size: int, batch_size: int) -> list[list[int]]:
        positions = range(chunk * CHUNK, (chunk + 1) * CHUNK)
        return [self._known.get(p) or self._others[p % len(self._others)] for p in positions]


def forecast(run: Recorded, costs: Measured) -> Outcome:
    """The run as it would be with these costs."""
    engines = [FluidEngine(number, costs, rows, shared) for number, rows, _, shared in run.engines]
    manner = Manner(
        is_streamed=run.least_early is not None,
        least_early=run.least_early or 0,
        reward_s=costs.reward_s,
        telling_s=0.0 if run.limits.breaks_c1 else costs.telling_s,  # else a version too old would be told
        contention=costs.contention,
        report_s=1.0,
        slots=max(slots for _, _, slots, _ in run.engines),
    )
    limits = replace(run.limits, num_steps=len(run.trainings), evaluation=None, filter_groups=False)
    sizes = (limits.batch_size, limits.group_size)
    return Player(Orchestrator(limits), engines, costs, RecordedLengths(run), sizes, manner).play()


def forecast_speed(run: Recorded, costs: Measured) -> float:
    """Trained tokens a second, as `Recorded.tokens_per_s` counts them."""
    steps = forecast(run, costs).steps
    return sum(step.tokens for step in steps[1:]) / (steps[-1].ended_s - steps[0].ended_s)
