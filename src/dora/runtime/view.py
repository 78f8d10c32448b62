"""What a person sees while a run goes.

A live screen on a terminal, a plain line every few seconds elsewhere.
"""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dora.core.state import State
from dora.core.wording import counted
from dora.runtime.meter import Meter

REFRESH_S = 0.25
LINE_S = 10.0  # between plain lines
SMOOTHING = 0.1  # of the reward shown


class View:
    """Shows one run; everything it knows it is handed."""

    def __init__(self, console: Console, num_steps: int) -> None:
        self.console = console
        self._num_steps = num_steps
        self._is_live = console.is_terminal
        self._next_s = 0.0
        self._num_told = 0  # steps, by the last plain line
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps, left"),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task("steps", total=num_steps)
        self._live = Live(console=console, refresh_per_second=1 / REFRESH_S) if self._is_live else None

    def __enter__(self) -> View:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def notice(self, sentence: str) -> None:
        """A sentence that stays on the screen."""
        self.console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def close(self, meter: Meter, state: State) -> None:
        """Show where the run ended; a line is not written twice for the last step."""
        if self._live or len(meter.steps) > self._num_told:
            self._next_s = 0.0
            self.update(meter, state)

    def update(self, meter: Meter, state: State) -> None:
        """Show where the run stands, if the last time is long enough ago."""
        now_s = time.monotonic()
        if now_s < self._next_s or not meter.steps:
            return
        self._next_s = now_s + (REFRESH_S if self._live else LINE_S)
        if self._live:
            self._progress.update(self._task, completed=len(meter.steps))
            self._live.update(Group(self._progress, _facts(meter, state), _engines(state)))
        else:
            self._num_told = len(meter.steps)
            self.notice(plain_line(meter, state, self._num_steps))


def plain_line(meter: Meter, state: State, num_steps: int) -> str:
    """The run's state in one line."""
    left_s = (meter.now_s - meter.began_s) / len(meter.steps) * (num_steps - len(meter.steps))
    return (
        f"step {len(meter.steps)}/{num_steps}, {left_s:.0f} s left, reward {_reward(meter):.3f}, "
        f"accuracy {_accuracy(meter):.3f}, {meter.tokens_per_s:.0f} tokens/s, {_versions(state)}, "
        f"staleness {_staleness(meter)}, stall {state.stall_s:.1f} s"
    )


def _facts(meter: Meter, state: State) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row("reward", f"{_reward(meter):.3f}", "tokens/s", f"{meter.tokens_per_s:.0f}")
    table.add_row("accuracy", f"{_accuracy(meter):.3f}", "staleness", _staleness(meter))
    waits = f", waiting for group {state.stall_group}" if state.stall_group else ""
    table.add_row("alive", _versions(state), "stall", f"{state.stall_s:.1f} s{waits}")
    table.add_row("moved", counted(meter.travels.migrations.total(), "request"))
    return table


def _engines(state: State) -> Table:
    """Requests per engine and version."""
    versions = sorted({v for e in state.engines.values() for v in e.held})
    table = Table("engine", *(f"v{v}" for v in versions), "free rows", box=None, padding=(0, 2))
    for engine in state.engines.values():
        running = Counter(engine.requests.values())
        cells = [str(running[v]) if v in engine.held else "-" for v in versions]
        table.add_row(str(engine.id), *cells, str(engine.free_rows))
    return table


def _versions(state: State) -> str:
    live = [(v, n) for v, n in sorted(state.unfinished.items()) if n]
    return "versions " + (" ".join(f"v{v}:{n}" for v, n in live) or "none")


def _staleness(meter: Meter) -> str:
    last = meter.steps[-1].staleness
    shown = f"{sum(s * n for s, n in last.items()) / last.total():.2f} (max {max(last)})"
    return shown if meter.limits.aging is None else f"{shown}, allowed {meter.steps[-1].effective}"


def _reward(meter: Meter) -> float:
    """Mean reward per step, smoothed."""
    smooth = meter.steps[0].rewards.mean
    for record in meter.steps[1:]:
        smooth += SMOOTHING * (record.rewards.mean - smooth)
    return smooth


def _accuracy(meter: Meter) -> float:
    """Share of the last step's samples with a reward of at least 1."""
    return meter.steps[-1].rewards.frac_solved
