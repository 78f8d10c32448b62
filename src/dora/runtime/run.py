"""A whole run: check, start, evaluate, train, evaluate, save.

However it ends, its processes are gone afterwards and its folder holds a summary.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dora.config import Config
from dora.core import invariants, snapshot
from dora.core.actions import Action, Publish, SkipEvaluation
from dora.core.events import Event, Published, Trained, TrainerReplaced
from dora.core.wording import counted, nth
from dora.errors import InputError, RunError
from dora.runtime import adapters, devices, folder, resuming
from dora.runtime.calls import Calls, Door, Inside, check_door
from dora.runtime.control import Control, forget_dead
from dora.runtime.curves import Curves
from dora.runtime.desk import Desk
from dora.runtime.drive import drive
from dora.runtime.evaluate import evaluate
from dora.runtime.futility import Futility
from dora.runtime.garbage import collect_young, no_pauses
from dora.runtime.held_out import Evaluation, Evaluations, describe_awaited
from dora.runtime.journal import Journal
from dora.runtime.lengths import DRIFT_LIMIT
from dora.runtime.local import LocalHands
from dora.runtime.meter import Meter, StepRecord, TimedOrchestrator
from dora.runtime.past import SAMPLES, Past, read_past
from dora.runtime.plan import Plan
from dora.runtime.process import cpu_s
from dora.runtime.starting import critic_digest
from dora.runtime.status import TRAINING, Status
from dora.runtime.stopping import Stopped, Stopper
from dora.runtime.summary import evaluation_numbers, summarize
from dora.runtime.travels import Travels
from dora.runtime.view import View
from dora.stream.samples import SampleStore


def train(
    config: Config, out: Path, console: Console, plan_type: type[Plan] = Plan, door: Door | None = None
) -> dict[str, Any]:
    """Run to the end or to Ctrl-C; returns the summary without the audit's verdicts, `stopped` included.

    `plan_type` may be a plan that asks for other requests, as benchmarks with forced lengths do; through
    a `door` the run can be asked from outside.

    Raises InputError before anything is started, and RunError where the run cannot go on: what
    was recorded until then stays in `out`, with a summary.
    """
    devices.check(config)
    adapters.check(config)
    check_door(config, door)
    plan = plan_type.make(config, out)
    folder.claim(out, plan.config)
    try:
        return _run(plan, console, door=door)
    except InputError:
        folder.unclaim(out)
        raise


def resume(
    run: Path,
    overrides: Sequence[str],
    console: Console,
    plan_type: type[Plan] = Plan,
    door: Door | None = None,
) -> dict[str, Any]:
    """Go on with a run that was stopped, or whose processes died; as `train`.

    Raises InputError, with what is recorded as it was, if it cannot go on.
    """
    config = resuming.resumed_config(run, overrides)
    devices.check(config)
    adapters.check(config)
    check_door(config, door)
    plan = plan_type.make(config, run)
    forget_dead(run)
    if resuming.has_begun(run):
        with _past(plan) as past:
            return _run(plan, console, past, door)
    folder.reclaim(run, config)
    return _run(plan, console, door=door)


@contextlib.contextmanager
def _past(plan: Plan) -> Iterator[Past]:
    """What a former life left. Its journal is as long as that life was, and is not kept."""
    journal = resuming.recorded(plan.out, plan.num_prompts)
    store = SampleStore(plan.out / SAMPLES, fsync=plan.config.journal.fsync)
    with contextlib.closing(store) as samples:
        past = read_past(plan, journal, samples)
        del journal
        yield past


def _run(plan: Plan, console: Console, past: Past | None = None, door: Door | None = None) -> dict[str, Any]:
    """With a `past`, go on from where it ended."""
    try:
        with contextlib.closing(Control(plan.out)) as control, Stopper() as stopper:
            return _Session(plan, console, stopper, control, past, door).run()
    except (OSError, sqlite3.Error) as error:
        raise RunError(
            f"the run cannot go on: {error}; make room, or use another --out; what is in {plan.out} stays "
            "readable"
        ) from error


class _Session:
    """One run from its first process to its summary."""

    def __init__(
        self,
        plan: Plan,
        console: Console,
        stopper: Stopper,
        control: Control,
        past: Past | None,
        door: Door | None,
    ) -> None:
        config = plan.config
        self._plan, self._stopper, self._past = plan, stopper, past
        self._view = View(console, config.run.steps)
        self._core = past.core if past else TimedOrchestrator(plan.limits)
        self._before: Evaluation | None = None
        self._after: Evaluation | None = None
        self._cpu_s = 0.0
        self._is_saved = self._is_warned = False
        told = (past.resumed.from_step, past.evaluations.ended, past.now_s) if past else ()
        self._curves = Curves(config, plan.out, self._view.notice, *told)
        if past is not None:  # all of it fits, so from here on the folder changes
            past.settle()
            resuming.put_in_order(plan.out, past.resumed.from_step)
        self._journal = Journal(
            plan.out / "journal.jsonl",
            plan.limits,
            config.digest(),
            plan.num_prompts,
            critic_digest=None if past else critic_digest(config),
            seq=past.seq if past else None,
            fsync=config.journal.fsync,
        )
        self._has_begun = False
        self._ended: list[StepRecord] = []  # steps that have not been looked at
        self._unsaved: str | None = None  # what the orchestrator knew when a checkpoint became due
        self._hands = LocalHands(plan, self._view.notice, self._look_up, past)
        self._desk = Desk(control, self._hands, self._core.snapshot)
        travels = Travels(lambda group: len(plan.prompt_ids(group)))
        self._meter = past.meter if past else Meter(plan.limits, self._hands.teller, travels)
        self._evaluations = past.evaluations if past else Evaluations(config.eval.greedy)
        self._inside = Inside(plan, self._hands, self._core.snapshot, self._meter)
        self._calls = Calls(self._inside, door)
        self._futility = Futility(config)
        self._status = Status(plan.out, self._hands, self._core.snapshot, self._view.notice)

    def run(self) -> dict[str, Any]:
        stopped = "an error"
        try:
            self._train()
            stopped = ""
        except Stopped as error:
            stopped = str(error)
            self._view.notice(f"stopped by {stopped}")
            self._rescue()
        except RunError as error:
            self._status.fail(error)
            self._rescue()
            raise
        finally:
            self._stopper.disarm()
            summary = self._finish(stopped)
        return summary

    def _train(self) -> None:
        hands, config = self._hands, self._plan.config
        self._status.look()
        self._calls.open(self._view.notice)
        hands.wait_until_ready()
        self._status.enter("evaluating")
        engines = f"{counted(len(hands.engines), 'engine')} ({', '.join(hands.fleet.kernels)})"
        self._view.notice(f"{engines}, 1 trainer, {hands.rewarding.headcount} are ready")
        if self._past is None:
            self._evaluate_start()
            self._meter.start(hands.now)
        else:
            self._go_on(self._past)
        first = self._past.resumed if self._past else None
        hands.facts.clear()  # what evaluation left behind is no business of the orchestrator
        hands.join_all()
        cpu_before_s = cpu_s()
        self._has_begun = self._inside.is_training = True
        self._status.enter(TRAINING)
        try:
            with self._view, no_pauses():
                drive(self._core, hands, self._record, first)
                self._look_back()
                self._view.close(self._meter, self._core.snapshot())
        finally:
            self._inside.is_training = False
            self._cpu_s = cpu_s() - cpu_before_s
        held = {
            e.id: {*e.held, *([] if e.loading is None else [e.loading])}
            for e in self._core.snapshot().engines.values()
        }
        self._warn_of_drift()
        self._status.enter("saving")
        self._save(self._snapshot())
        self._wait_until_saved()
        self._status.enter("evaluating")
        self._after = self._evaluate(config.run.steps, held)
        self._show(self._after, "after")

    def _warn_of_drift(self) -> None:
        """What was trained should be as long as what was generated."""
        drift = self._meter.lengths.drift()
        if drift is not None and abs(drift) > DRIFT_LIMIT:
            self._view.notice(
                f"answers trained are on average {abs(drift):.0%} {'longer' if drift > 0 else 'shorter'} "
                "than answers generated, for groups of equal rewards were left out; see summary.json"
            )

    def _look_up(self) -> None:
        """Whenever nothing is half done: has somebody asked for something? Raises Stopped."""
        self._look_back()
        if self._unsaved is not None:
            self._save(self._unsaved)
            self._unsaved = None
        self._stopper.check()
        self._calls.look()
        self._status.look()
        if self._inside.is_training:
            self._desk.look()

    def _go_on(self, past: Past) -> None:
        """Record what the last life had no time to, and say where this one begins."""
        self._journal.record(past.now_s, None, past.unrecorded)
        self._brief()
        num_redone = len(past.resumed.redone)
        self._view.notice(
            f"resumed at {past.checkpoint or 'the start'}: {counted(past.resumed.from_step, 'trained step')} "
            f"kept, {num_redone} redone"
        )

    def _brief(self) -> None:
        """Tell a new trainer what the one before it was told of steps to come."""
        state = self._core.snapshot()
        for step, groups in (*state.batches.items(), (state.next_step, state.committed)):
            self._hands.accumulate(step, groups)

    def _snapshot(self) -> str:
        """What the orchestrator knows now, and how much of the journal that is."""
        state = snapshot.to_json(self._core.snapshot())
        return json.dumps({"seq": self._journal.seq, "state": state})

    def _save(self, core: str) -> None:
        """Have a checkpoint written, with the versions that unfinished requests may still need."""
        state = self._core.snapshot()
        num_trained = state.num_trained // state.limits.batch_size
        self._hands.save(core, [version for version in sorted(state.store) if version < num_trained])

    def _wait_until_saved(self) -> None:
        saved = self._hands.wait_until_saved()
        self._is_saved = True
        self._view.notice(f"saved {saved}")

    def _rescue(self) -> None:
        """Keep what was trained, if the trainer still can; the record must know the step it is in."""
        self._stopper.disarm()
        if not (self._has_begun and self._meter.steps) or self._is_saved:
            return
        hands, core = self._hands, self._core
        with contextlib.suppress(RunError):
            hands.wait_until_trained()
            for fact in [fact for fact in hands.facts if isinstance(fact, Trained)]:
                now = hands.now
                self._note(now, fact, core.handle(fact, now))
            self._look_back()
            self._save(self._snapshot())
            self._wait_until_saved()

    def _evaluate(self, version: int, held: Mapping[int, Iterable[int]]) -> Evaluation | None:
        if self._plan.held_out is not None:
            prompts = counted(len(self._plan.held_out), "held-out prompt")
            self._view.notice(f"evaluating version {version} on {prompts}")
        evaluation = evaluate(self._hands, version, held)
        if evaluation is not None and self._plan.config.eval.every:  # the ends of the curve
            self._curves.write_evaluation(evaluation, len(self._meter.steps), self._hands.now)
        return evaluation

    def _evaluate_start(self) -> None:
        """Evaluate the initial policy; the orchestrator publishes it again for itself."""
        hands = self._hands
        if self._plan.held_out is None:
            return
        hands.perform(Publish(0))
        while not isinstance(hands.next_fact(None), Published):
            pass
        self._before = self._evaluate(0, {})
        self._show(self._before, "before")
        if self._before is not None:
            first = evaluation_numbers("before", self._before)
            first["evaluations"] = [self._before.to_json()]
            (self._plan.out / folder.EVAL_BEFORE).write_text(json.dumps(first))

    def _record(self, now: float, event: Event | None, orders: Sequence[Action]) -> None:
        """Every fact and its orders pass here before the orders are carried out."""
        self._note(now, event, orders)
        if isinstance(event, Trained) and self._is_save_due(event.step + 1):
            self._unsaved = self._snapshot()
        if isinstance(event, TrainerReplaced):
            state = self._core.snapshot()
            batches = (*event.redone, *state.batches.values(), state.committed)
            self._hands.brief([group for batch in batches for group in batch])
            self._brief()
        self._futility.check(orders, self._core.snapshot(), self._hands.rewarding.first_failure)

    def _is_save_due(self, step: int) -> bool:
        """The last step is saved when the run is over."""
        save_freq, steps = self._plan.config.trainer.save_freq, self._plan.config.run.steps
        return save_freq > 0 and step % save_freq == 0 and step < steps

    def _note(self, now: float, event: Event | None, orders: Sequence[Action]) -> None:
        self._journal.record(now, event, orders)
        self._status.hear(event)
        state = self._core.snapshot()
        if (step := self._meter.hear(now, event, orders, state)) is not None:
            self._ended.append(step)
        self._note_evaluation(event, orders)
        self._view.update(self._meter, state)

    def _look_back(self) -> None:
        """At steps that have ended, once what follows has been ordered: the trainer waits for that."""
        ended, self._ended = self._ended, []
        for step in ended:
            self._check_invariants()
            collect_young()
            if step.metrics.get("actor/num_tokens") == 0 and not self._is_warned:
                self._is_warned = True
                self._view.notice(f"step {nth(step.step)} had no gradient: each group's rewards were equal")
            self._curves.write(step.to_json())

    def _note_evaluation(self, event: Event | None, orders: Sequence[Action]) -> None:
        """What an evaluation beside the training has found, or why there was none."""
        rule, view = self._plan.limits.evaluation, self._view
        over = self._evaluations.hear(event, orders, rule)
        if over is not None:
            num_steps, name = len(self._meter.steps), f"version {over.version}"
            view.notice(f"after {counted(num_steps, 'step')}, {name} is evaluated: {over.describe()}")
            self._curves.write_evaluation(over, num_steps, self._hands.now)
        for order in [order for order in orders if isinstance(order, SkipEvaluation)]:
            view.notice(f"version {order.version} is not evaluated: version {order.under_way} still is")
        if isinstance(event, Published) and (awaited := describe_awaited(self._core.snapshot())):
            view.notice(awaited)

    def _check_invariants(self) -> None:
        """Recount the orchestrator's state once a step; a difference is a mistake of DORA's own."""
        broken = invariants.check(self._core.snapshot())
        assert not broken, "; ".join(broken)

    def _show(self, evaluation: Evaluation | None, when: str) -> None:
        if evaluation is None:
            return
        notice = self._view.notice
        notice(
            f"{when} training (version {evaluation.version}, "
            f"{counted(evaluation.num_prompts, 'held-out prompt')}): {evaluation.describe()}"
        )
        for prompt, answer, reward in evaluation.examples():
            notice(f"  {prompt} {answer}   reward {reward:g}")

    def _finish(self, stopped: str) -> dict[str, Any]:
        """End the processes and write the summary; also on the way out of an error."""
        self._calls.close()
        with contextlib.ExitStack() as closing:  # on a full disk each of them may raise
            curves = self._curves
            for close in (curves.close_file, curves.close_trackers, self._journal.close, self._hands.close):
                closing.callback(close)
        state = self._core.snapshot()
        summary = summarize(self._meter, state, self._before, self._evaluations.ended, self._after)
        if self._past is not None and (path := self._plan.out / folder.EVAL_BEFORE).is_file():
            first = json.loads(path.read_text())
            summary["evaluations"] = first.pop("evaluations", []) + summary["evaluations"]
            summary |= first
        wall_s = max(1e-9, self._meter.now_s - self._meter.began_s)
        summary["orchestration_share"] = round(self._core.busy_s / wall_s, 5)
        summary["cpu_s"] = round(self._cpu_s, 1)
        summary["stopped"] = stopped
        folder.write_summary(self._plan.out, summary)
        self._status.end(stopped)
        return summary
