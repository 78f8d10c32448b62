"""A whole run: check, start, train and evaluate, save.

Whether a run succeeds or fails, afterwards its processes have exited and its folder has a summary.
"""

from __future__ import annotations

import contextlib
import gc
import json
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console

from dora.config.schema import Config
from dora.config.toml import config_digest
from dora.core import codec, invariants
from dora.core.actions import Action, SkipEvaluation, StartEvaluation
from dora.core.events import DigestReported, Event, Published, RequestFinished, Trained, TrainerReplaced
from dora.core.types import GroupId
from dora.data.dataset import last_text
from dora.errors import InputError, RunError
from dora.full_disk import describe_full_disk, find_full_disk, is_full
from dora.journal.reader import JOURNAL_FILE
from dora.journal.writer import BEING_WRITTEN, JournalWriter, file_digest, seal
from dora.metrics.console import RunConsole, print_notice
from dora.metrics.evaluation import (
    EvaluationResult,
    EvaluationTracker,
    describe_pending_evaluation,
)
from dora.metrics.rollout import DRIFT_LIMIT, MigrationMetrics
from dora.metrics.run import RunMetrics, StepRecord, TimedOrchestrator
from dora.metrics.summary import summarize
from dora.metrics.writer import MetricsWriter, Trackers
from dora.runtime import run_dir
from dora.runtime.control.admin import ControlDir
from dora.runtime.control.failure_guard import FailureGuard
from dora.runtime.control.requests import Gateway, RequestQueue, check_gateway
from dora.runtime.control.status import TRAINING, StatusWriter
from dora.runtime.executor import LiveRun, ProcessExecutor
from dora.runtime.main_loop import run_main_loop
from dora.runtime.memory import check_gpu_memory
from dora.runtime.process import backends, resources
from dora.runtime.process.worker_process import cpu_s
from dora.runtime.recovery.journal_replay import PreviousRun, read_previous_run
from dora.runtime.recovery.resume import (
    check_not_begun,
    critic_digest,
    has_recorded_events,
    prepare_run_dir,
    read_recorded_journal,
    resumed_config,
)
from dora.runtime.run_dir import SAMPLES, remove_stale_files
from dora.runtime.run_setup import RunSetup
from dora.stream.sample_db import SampleStore
from dora.text import plural, step_number
from dora.trainer.checkpoint_folders import MANIFEST, KeptCheckpoints, find_best, prune_checkpoints

CHECKPOINTS = "checkpoints"
MAX_MISMATCH = 0.2  # nats, mean of a step; bfloat16 causes about 0.01
MIN_MISMATCH_TOKENS = 100  # of this mean
NUM_EXAMPLES = 2  # responses shown of the evaluations before and after training
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SWITCH_INTERVAL_S = (
    0.0005  # switch interval of Python's threads while training; the default is ten times as long
)


def train(
    config: Config,
    out: Path,
    console: Console,
    setup_type: type[RunSetup] = RunSetup,
    gateway: Gateway | None = None,
) -> dict[str, Any]:
    """Run to the end or to Ctrl-C; returns the summary, `stopped` included, without the audit's verdicts.

    `setup_type` may create other requests, as benchmarks with forced lengths do. A `gateway` accepts external
    requests.

    Raises InputError before anything is started. Raises RunError where the run cannot continue: what was
    recorded until then stays in `out`, with a summary.
    """
    resources.check_devices(config)
    backends.check_backends(config)
    check_gateway(config, gateway)
    print_notice(console, f"reading {_inputs(config)}")
    setup = setup_type.make(config, out)
    check_gpu_memory(setup)
    run_dir.claim(out, setup.config)
    try:
        with _control_of(setup) as control:
            return _run(setup, console, control, None, gateway)
    except InputError:
        if not has_recorded_events(out):
            run_dir.release(out)
        raise


def resume(
    run: Path,
    overrides: Sequence[str],
    console: Console,
    setup_type: type[RunSetup] = RunSetup,
    gateway: Gateway | None = None,
    given: Config | None = None,
) -> dict[str, Any]:
    """Continue a run that was stopped or killed; see `train`, and `resumed_config` for `given`.

    Raises InputError, with what was recorded unchanged, if it cannot continue. With `given`, a run that has
    finished trains no step again, whatever became of its checkpoints.
    """
    config = resumed_config(run, overrides, given)
    remove_stale_files(run)
    resources.check_devices(config)
    backends.check_backends(config)
    check_gateway(config, gateway)
    print_notice(console, f"reading {_inputs(config)}, and the files of {run}")
    setup = setup_type.make(config, run)
    check_gpu_memory(setup)
    with _control_of(setup) as control:  # from here on no other process drives the run
        if has_recorded_events(run):
            with _previous_run(setup, repeats_steps=given is None) as previous:
                setup = replace(setup, earlier_schedules=previous.earlier_schedules)
                return _run(setup, console, control, previous, gateway)
        check_not_begun(run)
        run_dir.reclaim(run, config)
        return _run(setup, console, control, None, gateway)


def _inputs(config: Config) -> str:
    """What takes long to read, if it is large."""
    data = f"data.path = {config.data.path!r}" if config.data.path is not None else "the sources"
    return f"model.path = {config.model.path!r} and {data}"


@contextlib.contextmanager
def _previous_run(setup: RunSetup, repeats_steps: bool) -> Iterator[PreviousRun]:
    """The state that the recorded files give. The journal, which may be long, is not kept in memory."""
    num_steps = setup.config.run.steps
    journal = read_recorded_journal(setup.out, setup.num_prompts, num_steps, repeats_steps=repeats_steps)
    path = setup.out / SAMPLES
    if not path.is_file():
        raise InputError(f"--resume {setup.out}: {path} is missing; restore it")
    store = SampleStore(path, fsync=setup.config.journal.fsync)
    with contextlib.closing(store) as samples:
        previous = read_previous_run(setup, journal, samples)
        del journal
        yield previous


@contextlib.contextmanager
def _control_of(setup: RunSetup) -> Iterator[ControlDir]:
    """The control folder, which makes this process the run's driver. A failed system call ends the run."""
    try:
        with contextlib.closing(ControlDir(setup.out)) as control:
            yield control
    except (OSError, sqlite3.Error) as error:
        raise _run_error(error, setup, {}) from error


def _run(
    setup: RunSetup,
    console: Console,
    control: ControlDir,
    previous: PreviousRun | None,
    gateway: Gateway | None,
) -> dict[str, Any]:
    with StopSignals() as signals:
        return _Session(setup, console, signals, control, previous, gateway).run()


def _run_error(error: Exception, setup: RunSetup, stored: Mapping[Path, int]) -> RunError:
    """The error that ends a run after a failed system call. `stored`: folders beside the run's, with the
    maximum that the run writes to them, in bytes.
    """
    remedy = f"resume the run: {setup.config.resume_command} {setup.out}"
    if not is_full(error):
        return RunError(f"the run cannot continue: {error}; remove the cause, and {remedy}")
    needed = {setup.out: setup.checkpoint_bytes, **stored, Path(tempfile.gettempdir()): setup.stored_bytes}
    folder = find_full_disk(error, [*needed])
    return RunError(f"the run cannot continue: {describe_full_disk(folder, needed[folder])}, and {remedy}")


def _why_no_gradient(metrics: Mapping[str, float]) -> str:
    """Why a step trained no token, from its metrics."""
    masked = metrics.get("actor/frac_masked_responses", 0.0)
    if masked == 1.0:
        return (
            "all responses were truncated, and algorithm.mask_truncated_responses leaves them out; raise "
            "sampling.max_response_length"
        )
    equal = "the rewards of each group were equal"
    return f"{equal}, or its responses truncated and masked" if masked else equal


class _Session:
    """One run from its first process to its summary."""

    def __init__(
        self,
        setup: RunSetup,
        console: Console,
        signals: StopSignals,
        control: ControlDir,
        previous: PreviousRun | None,
        gateway: Gateway | None,
    ) -> None:
        config = setup.config
        self._setup, self._signals, self._control = setup, signals, control
        self._previous, self._gateway = previous, gateway
        self._console = RunConsole(console, config.run.steps)
        self._console.notice(f"starting {self._workers(plural(config.num_engines, 'engine'))}")
        self._orchestrator = previous.orchestrator if previous else TimedOrchestrator(setup.limits)
        self._cpu_s = 0.0  # of training; while that runs, without the current `cpu_s()`
        self._counts_cpu = False
        self._is_saved = False
        self._shown_warnings: set[str] = set()  # kinds
        finished = previous.evaluations.finished if previous and config.logs_evaluations else ()
        known = (previous.resumed.from_step, finished, previous.now_s) if previous else ()
        trackers = Trackers(
            config.metrics.report_to,
            setup.out,
            config.metrics.project,
            config.model_dump(),
            self._console.notice,
            previous.resumed.from_step if previous else None,
        )
        self._metrics_writer = MetricsWriter(setup.out, trackers, *known)
        if previous is not None:  # all checks have passed: from here on the folder changes
            for warning in previous.warnings:
                self._console.notice(f"warning: {warning}")
            previous.repair_samples()
            prepare_run_dir(setup.out, previous.resumed.from_step)
        self._journal = JournalWriter(
            setup.out / JOURNAL_FILE,
            setup.limits,
            config_digest(config),
            setup.num_prompts,
            source_rows=setup.source_rows,
            critic_digest=None if previous else critic_digest(config),
            seq=previous.next_seq if previous else None,
            fsync=config.journal.fsync,
        )
        if copies := run_dir.copy_code(setup.out, config):
            self._journal.record_files(copies)
        self._has_begun = False
        self._finished_steps: list[StepRecord] = []  # not written to metrics.jsonl yet
        self._due_checkpoint: str | None = None  # the orchestrator's snapshot to save
        self._executor = ProcessExecutor(setup, self._console.notice, previous)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._executor.close)
            book, state = self._executor.sample_book, self._orchestrator.snapshot
            self._failure_guard = FailureGuard(config, state())
            threshold = config.reward.pass_threshold
            of_tracker = config.eval.greedy, setup.held_out_sources, book.task_rewards, threshold
            self._evaluations = previous.evaluations if previous else EvaluationTracker(*of_tracker)
            migrations = MigrationMetrics(lambda group: len(setup.prompt_ids(group)))
            self._metrics = previous.metrics if previous else RunMetrics(setup.limits, book, migrations)
            self._live = LiveRun(setup, self._executor, state, self._metrics)
            self._requests = RequestQueue(self._live, self._executor.wake_up)
            more = self._console.notice, config.run.steps, config.resume_command
            self._status = StatusWriter(setup.out, self._executor, state, *more)
            on_error.pop_all()

    def run(self) -> dict[str, Any]:
        stopped = "an error"
        try:
            self._train_until_stopped()
            stopped = ""
        except Stopped as error:
            stopped = str(error)
            self._console.notice(f"stopped by {stopped}")
            if (error_of_save := self._save_what_was_trained()) is not None:
                lost = "the last steps have no checkpoint, so that a resume trains them again"
                self._console.notice(f"{lost}: {error_of_save}")
        except RunError as error:
            self._status.fail(error)
            self._save_what_was_trained()
            raise
        except (OSError, sqlite3.Error) as error:
            self._executor.check_weight_store()
            stored = {self._executor.weights.folder: self._setup.stored_bytes}
            failure = _run_error(error, self._setup, stored)
            self._status.fail(failure)
            raise failure from error
        finally:
            self._signals.ignore()
            try:
                summary = self._finish(stopped)
            finally:
                if self._gateway is not None:
                    self._gateway.close(self._signals.is_urgent)
        return summary

    def _train_until_stopped(self) -> None:
        """As `_train`. An error after a signal counts as its consequence: workers and Ray may have got it as
        well, so that a lost worker cannot be replaced.
        """
        try:
            self._train()
        except RunError as error:
            if self._signals.is_pending:
                self._console.notice(f"while the run stopped: {error}")
            self._signals.check()
            raise

    def _train(self) -> None:
        executor, config = self._executor, self._setup.config
        self._start_workers()
        if self._previous is None:
            if config.trainer.continue_from is not None:
                self._console.notice(
                    f"weights and optimizer are those of {config.trainer.continue_from}; steps, "
                    "learning-rate schedule and dataset start from their beginning"
                )
            self._metrics.start(executor.now)
        else:
            self._report_resumed(self._previous)
        first_event = self._previous.resumed if self._previous else None
        executor.join_all()
        self._count_cpu(True)
        self._has_begun = self._live.is_training = True
        self._status.enter(TRAINING)
        try:
            with self._console, low_latency():
                run_main_loop(self._orchestrator, executor, self._record, first_event, self._between_events)
                self._write_finished_steps()
                self._console.close(self._metrics, self._orchestrator.snapshot())
        except Stopped:
            self._metrics.stop(executor.now)
            raise
        finally:
            self._live.is_training = self._executor.is_paused = False
            self._count_cpu(False)
        self._warn_of_length_drift()
        self._status.enter("saving")
        self._wait_until_saved()

    def _start_workers(self) -> None:
        executor = self._executor
        self._status.update()
        if self._gateway is not None:
            address = self._gateway.open(self._requests, self._console.notice)
            if address is not None and (sessions := executor.agent_sessions) is not None:
                sessions.instructions = address.for_agents
        while executor.not_started():
            self._between_events()
            executor.poll()
        executor.begin_clock()
        kernels = ", ".join(executor.engine_pool.kernels)
        engines = f"{plural(len(executor.engine_pool.active), 'engine')} ({kernels})"
        self._console.notice(f"ready: {self._workers(engines)}")
        for notice in self._setup.notices:
            self._console.notice(notice)
        config = self._setup.config
        if config.run.steps and (reason := config.why_not_streaming) is not None:
            self._console.notice(f"gradients wait for the whole batch: {reason}")

    def _workers(self, engines: str) -> str:
        config = self._setup.config
        trainer = ["1 trainer"] if config.run.steps else []
        return ", ".join([engines, *trainer, plural(config.num_reward_workers, "reward worker")])

    def _between_events(self) -> None:
        """Everything but training, while no action is half done. Raises Stopped after Ctrl-C or SIGTERM."""
        self._executor.send_to_engines()
        self._write_finished_steps()
        if self._due_checkpoint is not None:
            self._save(self._due_checkpoint)
            self._due_checkpoint = None
        self._record_checkpoints()
        self._signals.check()
        self._requests.process()
        self._status.update()
        if self._live.is_training:
            self._control.process(self._requests)

    # every event passes here, before its actions are executed

    def _record(self, now: float, event: Event | None, actions: Sequence[Action]) -> None:
        self._note(now, event, actions)
        if isinstance(event, Trained) and self._is_checkpoint_due(event.step + 1):
            self._due_checkpoint = self._snapshot()
        if isinstance(event, TrainerReplaced):
            state = self._orchestrator.snapshot()
            batches = (*event.redone, *state.batches.values(), state.committed)
            self._executor.samples.resend([group for batch in batches for group in batch])
            self._send_commitments()
        state = self._orchestrator.snapshot()
        self._count_cpu(not state.is_only_evaluating)
        self._failure_guard.check(event, actions, state, self._executor.rewards.first_failure)

    def _count_cpu(self, is_training: bool) -> None:
        """Count CPU time from now on, or no longer."""
        if is_training != self._counts_cpu:
            self._counts_cpu = is_training
            self._cpu_s += -cpu_s() if is_training else cpu_s()

    def _note(self, now: float, event: Event | None, actions: Sequence[Action]) -> None:
        self._journal.record(now, event, actions)
        if isinstance(event, RequestFinished):
            self._executor.sample_book.unrecorded.discard(event.request)
        self._status.on_event(event)
        state = self._orchestrator.snapshot()
        if (step := self._metrics.update(now, event, actions, state)) is not None:
            self._finished_steps.append(step)
        if isinstance(event, Published | DigestReported):
            self._warn_of_other_weights(event)
        self._note_evaluation(event, actions)
        self._console.update(self._metrics, state)

    def _warn_of_other_weights(self, event: Published | DigestReported) -> None:
        """Warn if redone steps give other weights, which on the CPU of one machine they should not."""
        if event.digest != (before := self._metrics.digests[event.version]):
            self._console.notice(
                f"warning: version {event.version} was recomputed and has another digest ({event.digest}, "
                f"before: {before}). On the CPU of one machine this means that the optimizer state, the "
                "samples, the code, or trainer keys that change the rounding have changed"
            )

    def _note_evaluation(self, event: Event | None, actions: Sequence[Action]) -> None:
        """Report the start and the result of an evaluation, or why there is none."""
        rule, view = self._setup.limits.evaluation, self._console
        finished = self._evaluations.update(event, actions, rule)
        if finished is not None:
            self._show(finished)
            if self._setup.config.logs_evaluations:
                self._metrics_writer.write_evaluation(finished, len(self._metrics.steps), self._executor.now)
        for action in actions:
            match action:
                case StartEvaluation(version) if rule is not None and version in self._ends:
                    prompts = plural(rule.num_prompts, "held-out prompt")
                    view.notice(f"evaluating version {version} on {prompts}")
                case SkipEvaluation(version, running):
                    view.notice(
                        f"evaluation of version {version} skipped: that of version {running} is still running"
                    )
                case _:
                    pass
        if isinstance(event, Published) and (
            overdue := describe_pending_evaluation(self._orchestrator.snapshot())
        ):
            view.notice(overdue)

    def _is_checkpoint_due(self, step: int) -> bool:
        """Whether to save after this many steps: always after the last one, before its evaluation."""
        save_freq, steps = self._setup.config.trainer.save_freq, self._setup.config.run.steps
        return step == steps or (save_freq > 0 and step % save_freq == 0)

    def _write_finished_steps(self) -> None:
        """Called after the next step's actions have been executed, because the trainer waits for those."""
        steps, self._finished_steps = self._finished_steps, []
        for step in steps:
            broken = invariants.check(self._orchestrator.snapshot())
            assert not broken, "; ".join(broken)
            gc.collect(1)  # cycles made since the last step; nothing older is scanned
            self._warn_once(step)
            self._metrics_writer.write(step.to_json())

    def _warn_once(self, step: StepRecord) -> None:
        """Report each kind of problem at the first step that has it."""
        warnings, metrics = {}, step.others
        if metrics.get("actor/num_tokens") == 0:
            warnings["gradient"] = f"had no gradient: {_why_no_gradient(metrics)}"
        nats = metrics.get("mismatch/logprob_abs_diff_mean", 0.0)
        if nats > MAX_MISMATCH and metrics.get("mismatch/num_tokens", 0) >= MIN_MISMATCH_TOKENS:
            warnings["mismatch"] = (
                f"has log-probs of engines and trainer that differ by {nats:.2g} in the mean: they probably "
                f"compute different models. Check the run with dora audit --deep 8 {self._setup.out}"
            )
        for kind, warning in warnings.items():
            if kind not in self._shown_warnings:
                self._shown_warnings.add(kind)
                self._console.notice(f"step {step_number(step.step)} {warning}")

    # resuming and saving

    def _report_resumed(self, previous: PreviousRun) -> None:
        """Record the actions that the previous process did not write, and log where this process starts."""
        self._journal.record(previous.now_s, None, previous.unrecorded_actions)
        self._send_commitments()
        self._console.notice(
            f"resumed from {previous.checkpoint or 'the start'}: "
            f"{plural(previous.resumed.from_step, 'trained step')} kept, "
            f"{len(previous.resumed.redone)} redone"
        )
        if (num_steps := previous.resumed.num_steps) is not None:
            before = self._orchestrator.snapshot().limits.num_steps
            self._console.notice(f"the run has {num_steps} steps from now on, {before} before")

    def _send_commitments(self) -> None:
        """Send a new trainer the groups committed to its next steps."""
        state = self._orchestrator.snapshot()
        for step, groups in (*state.batches.items(), (state.next_step, state.committed)):
            self._executor.accumulate(step, groups)

    def _snapshot(self) -> str:
        """The orchestrator's state as JSON, and the length of the journal that led to it."""
        state = codec.state_to_json(self._orchestrator.snapshot())
        return json.dumps({"seq": self._journal.seq, "state": state})

    def _save(self, core: str) -> None:
        """Have a checkpoint written, with the versions that unfinished requests may still need."""
        state = self._orchestrator.snapshot()
        num_trained = state.num_trained // state.limits.batch_size
        # A crash after the checkpoint was written, and before its digest is, leaves one that counts.
        self._journal.record_files({f"{CHECKPOINTS}/step-{num_trained}/{MANIFEST}": BEING_WRITTEN})
        versions = [version for version in sorted(state.stored_versions) if version < num_trained]
        self._executor.save(core, versions, self._kept_checkpoints())

    def _kept_checkpoints(self) -> KeptCheckpoints:
        trainer, running = self._setup.config.trainer, self._orchestrator.snapshot().evaluation
        if not trainer.keep_best:
            return KeptCheckpoints(trainer.keep_last)
        best_first = self._evaluations.best_first()
        return KeptCheckpoints(trainer.keep_last, best_first, None if running is None else running.version)

    def _record_checkpoints(self) -> None:
        """Record the manifests of the new checkpoints in the journal."""
        if saved := self._executor.take_saved():
            self._record_files(*(folder / MANIFEST for folder in saved))

    def _record_files(self, *files: Path) -> None:
        out = self._setup.out
        digests = {file.relative_to(out).as_posix(): file_digest(file) for file in files if file.is_file()}
        self._journal.record_files(digests)  # a newer checkpoint may have replaced one

    def _wait_until_saved(self) -> None:
        self._wait_for_trainer(lambda: not self._executor.is_saving, "save a checkpoint")
        self._record_checkpoints()
        saved = self._executor.saved_checkpoint()
        self._is_saved = True
        if self._setup.config.trainer.keep_best:  # evaluations have finished since the last one was written
            prune_checkpoints(self._setup.out / CHECKPOINTS, self._kept_checkpoints())
        if saved is not None:  # else the run was resumed after its last step
            self._console.notice(f"saved {saved}")

    def _wait_for_trainer(self, is_done: Callable[[], bool], what: str) -> None:
        executor, timeout_s = self._executor, self._setup.config.runtime.trainer_timeout_s
        deadline_s = time.monotonic() + timeout_s
        executor.training.can_restart = False  # from now on its loss ends the run
        while not is_done():
            if not executor.trainer.process.is_alive:
                raise RunError(f"the trainer exited before it could {what}: {executor.trainer.exit_reason}")
            if time.monotonic() > deadline_s:
                raise RunError(
                    f"the trainer did not {what} within runtime.trainer_timeout_s = {timeout_s:g} s"
                )
            self._between_events()
            executor.poll()

    def _save_what_was_trained(self) -> Exception | None:
        """After a stop or an error: save a checkpoint; if that fails, return its error."""
        self._signals.ignore()
        if not (self._has_begun and self._metrics.steps) or self._is_saved:
            return None
        executor = self._executor
        try:
            self._wait_for_trainer(lambda: not executor.is_in_step, "finish its step")
            for event in [event for event in executor.events if isinstance(event, Trained)]:
                now = executor.now
                self._note(now, event, self._orchestrator.handle(event, now))
            self._write_finished_steps()
            self._save(self._snapshot())
            self._wait_until_saved()
        except (RunError, OSError, sqlite3.Error) as error:
            return error
        return None

    @property
    def _ends(self) -> tuple[int, int]:
        """The versions that are evaluated before and after training."""
        return 0, self._setup.config.run.steps

    def _show(self, evaluation: EvaluationResult) -> None:
        """Print the result of an evaluation, before and after training with a few responses."""
        notice, version = self._console.notice, evaluation.version
        if version not in self._ends:
            at = f"now at step {len(self._metrics.steps)}"
            notice(f"evaluation of version {version} ({at}): {evaluation.describe()}")
            return
        prompts = plural(evaluation.num_prompts, "held-out prompt")
        when = f"{'after' if version else 'before'} training (version {version}, {prompts})"
        notice(f"{when if self._setup.config.run.steps else prompts}: {evaluation.describe()}")
        setup, sibling = self._setup, evaluation.shown_sibling
        for group in (GroupId(-1 - version, row) for row in range(NUM_EXAMPLES)):
            if (rewards := evaluation.rewards.get(group)) is not None:
                answer = setup.tokenizer.decode(self._executor.samples.finished(group)[sibling].token_ids)
                prompt = last_text(setup.source_of(group).prompt(group.row))
                notice(f"  {prompt} {answer}   reward {rewards[sibling]:g}")

    def _warn_of_length_drift(self) -> None:
        """Warn if trained responses are longer or shorter than generated ones."""
        drift = self._metrics.lengths.drift()
        if drift is not None and abs(drift) > DRIFT_LIMIT:
            self._console.notice(
                f"trained responses are on average {abs(drift):.0%} {'longer' if drift > 0 else 'shorter'} "
                "than generated ones, because groups of equal rewards were filtered; see summary.json"
            )

    def _finish(self, stopped: str) -> dict[str, Any]:
        """End the workers and write the summary, also after an error."""
        end = self._status.how_ended(stopped)
        closes: list[Callable[[], None]] = [self._delete_unrecorded, partial(self._requests.close, end)]
        if self._gateway is not None:
            closes.append(partial(self._gateway.end, end))
        closes += [self._executor.close, self._journal.close]
        closes += [self._metrics_writer.close_trackers, self._metrics_writer.close_file]
        with contextlib.ExitStack() as closing:  # each of them may raise if the disk is full
            for close in reversed(closes):
                closing.callback(close)
        state = self._orchestrator.snapshot()
        summary = summarize(self._metrics, state, self._evaluations.finished)
        wall_s = max(1e-9, self._metrics.now_s - self._metrics.started_s)
        summary["orchestrator_time_ratio"] = round(self._orchestrator.handling_s / wall_s, 5)
        summary["cpu_s"] = round(self._cpu_s, 1)
        summary |= self._best_checkpoint()
        summary["stopped"] = stopped
        run_dir.write_summary(self._setup.out, summary)
        seal(self._setup.out / JOURNAL_FILE)
        self._status.end(end.state, stopped)
        return summary

    def _best_checkpoint(self) -> dict[str, Any]:
        """The keys of the summary about `trainer.keep_best`; null without it."""
        version = None
        if self._setup.config.trainer.keep_best:
            version = find_best(self._setup.out / CHECKPOINTS, self._evaluations.best_first())
        path = None if version is None else f"{CHECKPOINTS}/step-{version}"
        return {"best_version": version, "best_checkpoint": path}

    def _delete_unrecorded(self) -> None:
        """Delete stored responses whose event will not be handled any more."""
        for request in self._executor.sample_book.unrecorded:
            self._executor.samples.delete(request)


class Stopped(Exception):
    """The run was asked to end early; the text is the signal's name."""


class StopSignals:
    """Turns Ctrl-C and SIGTERM into the exception `Stopped`, raised by `check` where no work is half done."""

    def __init__(self) -> None:
        self._received = ""
        self._num_received = self._num_raised = 0
        self._is_ignored = False

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def is_pending(self) -> bool:
        """Whether `check` would raise Stopped."""
        return bool(self._received) and not self._is_ignored

    def check(self) -> None:
        """Raises Stopped if a signal has arrived."""
        if self.is_pending:
            self._num_raised = self._num_received
            raise Stopped(self._received)

    def ignore(self) -> None:
        """Raise nothing from here on: the run is ending."""
        self._is_ignored = True

    def is_urgent(self) -> bool:
        """Whether a signal has arrived that `check` has not raised: the user wants the end now."""
        return self._num_received > self._num_raised

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(number).name
        self._num_received += 1


@contextlib.contextmanager
def low_latency() -> Iterator[None]:
    """Keep Python from pausing the main loop: no full garbage collection, and short turns for other threads.

    With a million requests a full collection scans the orchestrator's state, which has no cycles, for
    seconds. A thread that sends to a worker would otherwise wait 5 ms for its turn.
    """
    switch_interval_s = sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    gc.disable()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(switch_interval_s)
        gc.enable()
        gc.unfreeze()
