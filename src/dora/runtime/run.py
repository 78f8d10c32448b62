"""A whole run: check, start, evaluate, train, evaluate, save.

However it ends, its processes are gone afterwards and its folder holds a summary.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from dora.config import Config
from dora.core import invariants
from dora.core.actions import Action, Commit, Fail, Filter, Publish
from dora.core.events import Event, Published, Trained
from dora.errors import InputError, RunError
from dora.runtime.control import Control
from dora.runtime.desk import Desk
from dora.runtime.drive import drive
from dora.runtime.evaluate import Evaluation, evaluate
from dora.runtime.garbage import collect_young, no_pauses
from dora.runtime.journal import Journal
from dora.runtime.local import LocalHands
from dora.runtime.meter import Meter, TimedOrchestrator
from dora.runtime.plan import Plan
from dora.runtime.stopping import Stopped, Stopper
from dora.runtime.summary import summarize
from dora.runtime.travels import Travels
from dora.runtime.view import View

MIN_FILTERED, FILTERED_WINDOWS = 200, 20  # groups filtered in a row, before a run without signal is stopped
MIN_ENDED = 20  # groups; the failed share is taken of at least so many
RUN_FILES = ("config.toml", "journal.jsonl", "metrics.jsonl", "samples.sqlite", "summary.json")


def train(config: Config, out: Path, console: Console, plan_type: type[Plan] = Plan) -> dict[str, Any]:
    """Run to the end or to Ctrl-C; returns the summary without the audit's verdicts, `stopped` included.

    `plan_type` may be a plan that asks for other requests, as benchmarks with forced lengths do.

    Raises InputError before anything is started, and RunError where the run cannot go on: what
    was recorded until then stays in `out`, with a summary.
    """
    plan = plan_type.make(config, out)
    _claim(plan)
    try:
        with contextlib.closing(Control(out)) as control, Stopper() as stopper:
            return _Session(plan, console, stopper, control).run()
    except InputError:
        _unclaim(out)
        raise
    except (OSError, sqlite3.Error) as error:
        raise RunError(
            f"the run cannot go on: {error}; make room, or use another --out; what is in {out} stays readable"
        ) from error


def check_out(out: Path) -> None:
    """Raises InputError if the folder holds a run already, or cannot be a folder."""
    if any((out / name).exists() for name in RUN_FILES):
        raise InputError(f"--out {out} already holds a run; choose another folder or remove it")
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; name a folder")


def _claim(plan: Plan) -> None:
    """Make the run folder and write the resolved configuration into it."""
    check_out(out := plan.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.toml").write_text(plan.config.to_toml())
    except OSError as error:
        raise InputError(f"--out {out} cannot be written: {error}") from error


def _unclaim(out: Path) -> None:
    """Input turned out to be bad before anything was generated: the folder can be used again."""
    for name in RUN_FILES:
        (out / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        out.rmdir()


class _Session:
    """One run from its first process to its summary."""

    def __init__(self, plan: Plan, console: Console, stopper: Stopper, control: Control) -> None:
        config = plan.config
        self._plan, self._stopper = plan, stopper
        self._view = View(console, config.run.steps)
        self._core = TimedOrchestrator(plan.limits)
        self._before: Evaluation | None = None
        self._after: Evaluation | None = None
        self._cpu_s = 0.0
        self._first_failure = ""
        self._filtered_in_row = 0
        self._is_saved = self._is_warned = False
        self._journal = Journal(
            plan.out / "journal.jsonl",
            plan.limits,
            config.digest(),
            len(plan.dataset),
            fsync=config.journal.fsync,
        )
        self._metrics = (plan.out / "metrics.jsonl").open("x")
        self._is_training = False
        self._hands = LocalHands(plan, self._view.notice, self._look_up)
        self._desk = Desk(control, self._hands, self._core.snapshot)
        travels = Travels(lambda group: len(plan.prompt_ids(group)))
        self._meter = Meter(plan.limits, self._hands.teller, travels)

    def run(self) -> dict[str, Any]:
        stopped = ""
        try:
            self._train()
        except Stopped as error:
            stopped = str(error)
            self._view.notice(f"stopped by {stopped}")
            self._rescue()
        except RunError:
            self._rescue()
            raise
        finally:
            self._stopper.disarm()
            summary = self._finish(stopped)
        return summary

    def _train(self) -> None:
        hands, config = self._hands, self._plan.config
        hands.wait_until_ready()
        self._view.notice(
            f"{len(hands.engines)} engines ({hands.fleet.kernels}), 1 trainer, 1 rewarder are ready"
        )
        self._before = self._evaluate_start()
        hands.facts.clear()  # what evaluation left behind is no business of the orchestrator
        hands.join_all()
        cpu_before_s = _cpu_s()
        self._meter.start(hands.now)
        self._is_training = True
        try:
            with self._view, no_pauses():
                drive(self._core, hands, self._record)
                self._view.close(self._meter, self._core.snapshot())
        finally:
            self._is_training = False
            self._cpu_s = _cpu_s() - cpu_before_s
        held = {
            e.id: {*e.held, *([] if e.loading is None else [e.loading])}
            for e in self._core.snapshot().engines.values()
        }
        self._save()
        self._after = self._evaluate(config.run.steps, held)
        self._show(self._after, "after")

    def _look_up(self) -> None:
        """Whenever nothing is half done: has somebody asked for something? Raises Stopped."""
        self._stopper.check()
        if self._is_training:
            self._desk.look()

    def _save(self) -> None:
        folder = self._hands.save()
        self._is_saved = True
        self._view.notice(f"saved {folder}")

    def _rescue(self) -> None:
        """Keep what was trained, if the trainer still can."""
        self._stopper.disarm()
        if not self._meter.steps or self._is_saved:
            return
        with contextlib.suppress(RunError):
            self._save()
            # The trainer finished the step it was in before it saved: the record must know that step.
            for fact in self._hands.facts:
                if isinstance(fact, Trained):
                    now = self._hands.now
                    self._record(now, fact, self._core.handle(fact, now))

    def _evaluate(self, version: int, held: Mapping[int, Iterable[int]]) -> Evaluation | None:
        if self._plan.held_out is not None:
            self._view.notice(f"evaluating version {version} on {len(self._plan.held_out)} held-out prompts")
        return evaluate(self._hands, version, held)

    def _evaluate_start(self) -> Evaluation | None:
        """Evaluate the initial policy; the orchestrator publishes it again for itself."""
        hands = self._hands
        if self._plan.held_out is None:
            return None
        hands.perform(Publish(0))
        while not isinstance(hands.next_fact(None), Published):
            pass
        evaluation = self._evaluate(0, {})
        self._show(evaluation, "before")
        return evaluation

    def _record(self, now: float, event: Event | None, orders: Sequence[Action]) -> None:
        """Every fact and its orders pass here before the orders are carried out."""
        self._journal.record(now, event, orders)
        state = self._core.snapshot()
        step = self._meter.hear(now, event, orders, state)
        if step is not None:
            self._check_invariants()
            collect_young()
            if not step.metrics["actor/num_tokens"] and not self._is_warned:
                self._is_warned = True
                self._view.notice(f"step {step.step} had no gradient: the rewards of each group were equal")
            self._metrics.write(json.dumps(step.to_json()) + "\n")
            self._metrics.flush()
        self._view.update(self._meter, state)
        self._check_failures(orders)

    def _check_invariants(self) -> None:
        """Recount the orchestrator's state once a step; a difference is a mistake of DORA's own."""
        broken = invariants.check(self._core.snapshot())
        assert not broken, "; ".join(broken)

    def _check_failures(self, orders: Sequence[Action]) -> None:
        """Stop a run that cannot get anywhere: too many groups fail, or none teaches anything."""
        state, config = self._core.snapshot(), self._plan.config
        for order in orders:
            if isinstance(order, Fail):
                self._first_failure = self._first_failure or f"group {order.group}: {order.reason}"
            elif isinstance(order, Filter):
                self._filtered_in_row += 1
            elif isinstance(order, Commit):
                self._filtered_in_row = 0
        ended = state.num_trained + state.num_filtered + state.num_failed
        share = config.reward.max_failed_share
        if state.num_failed > share * max(ended, MIN_ENDED):
            detail = self._hands.rewarder.first_failure or self._first_failure
            raise RunError(
                f"{state.num_failed} of {ended} groups failed, more than reward.max_failed_share = {share:g} "
                f"allows; the first failure:\n{detail.rstrip()}"
            )
        if self._filtered_in_row > max(MIN_FILTERED, FILTERED_WINDOWS * config.window):
            raise RunError(
                f"the last {self._filtered_in_row} groups were all filtered, for each had equal rewards; "
                "the task is too easy or too hard for the policy, or the reward is constant"
            )

    def _show(self, evaluation: Evaluation | None, when: str) -> None:
        if evaluation is None:
            return
        notice = self._view.notice
        notice(
            f"{when} training (version {evaluation.version}, {evaluation.num_prompts} held-out prompts): "
            f"sampled {evaluation.sampled:.3f}, greedy {evaluation.greedy:.3f}, "
            f"length p50 {evaluation.length_percentile(0.5)}, p99 {evaluation.length_percentile(0.99)}"
        )
        for prompt, answer, group in evaluation.examples:
            notice(f"  {prompt} {answer}   reward {evaluation.rewards[group][1]:g}")

    def _finish(self, stopped: str) -> dict[str, Any]:
        """End the processes and write the summary; also on the way out of an error."""
        with contextlib.ExitStack() as closing:  # on a full disk each of them may raise
            for close in (self._metrics.close, self._journal.close, self._hands.close):
                closing.callback(close)
        state = self._core.snapshot()
        summary = summarize(self._meter, state, self._before, self._after)
        wall_s = max(1e-9, self._meter.now_s - self._meter.began_s)
        summary["orchestration_share"] = round(self._core.busy_s / wall_s, 5)
        summary["cpu_s"] = round(self._cpu_s, 1)
        summary["stopped"] = stopped
        write_summary(self._plan.out, summary)
        return summary


def write_summary(out: Path, summary: dict[str, Any]) -> None:
    """Write `summary.json` in one piece."""
    draft = out / "summary.json.draft"
    draft.write_text(json.dumps(summary, indent=2) + "\n")
    draft.replace(out / "summary.json")


def _cpu_s() -> float:
    """CPU seconds of this process and its living children so far."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total
