"""Execute the orchestrator's actions with processes: engines, trainer, reward workers, environments.

Actions become messages to workers; messages of workers become events. An engine that exits or times out is an
event. The run ends with RunError once the last engine is lost and none is to be restarted.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dora.core import actions, events
from dora.core.state import State
from dora.core.types import GroupId, RequestId
from dora.core.wait_graph import ENGINES, REWARDS, TRAINER
from dora.errors import RunError, ServiceError
from dora.metrics.run import RunMetrics
from dora.runtime.control.failure_guard import IdleTimeout
from dora.runtime.memory import explain_slow_store
from dora.runtime.process import messages as m
from dora.runtime.process.launcher import make_launcher
from dora.runtime.process.storage_process import StorageProcess
from dora.runtime.process.supervisor import Supervisor
from dora.runtime.process.worker_process import Launcher, Worker, WorkerMessages, WorkerState
from dora.runtime.recovery.journal_replay import PreviousRun
from dora.runtime.rollout.agent_sessions import AgentSessions
from dora.runtime.rollout.engine_pool import ElasticEngines, EnginePool
from dora.runtime.rollout.env_pool import EnvPool
from dora.runtime.rollout.episodes import EpisodeRunner, Episodes
from dora.runtime.rollout.partial_outputs import FILE_NAME
from dora.runtime.rollout.prompts import PromptSource
from dora.runtime.run_dir import SAMPLES
from dora.runtime.run_setup import RunSetup
from dora.runtime.sample_book import SampleBook, TaskRewards
from dora.runtime.scoring.external import ExternalRewards
from dora.runtime.scoring.reward_manager import RewardManager, RewardTask, reward_tasks
from dora.runtime.scoring.reward_worker import encode_prompt_row
from dora.runtime.training.checkpoints import CheckpointManager
from dora.runtime.training.external import ExternalTrainer
from dora.runtime.training.trainer_ranks import TrainerRanks
from dora.stream.run_stream import RunStream, StorageSpec, StreamStorage, ThreadStorage
from dora.stream.sample_db import SampleStore
from dora.text import plural, step_number
from dora.trainer.checkpoint_folders import KeptCheckpoints
from dora.weights.store import STORE_PREFIX, WeightStore, make_store_folder

POLL_S = 0.2  # between two checks of the deadlines while no message arrives
MAX_ENGINES = 64  # of a run at a time: each is a process


class ProcessExecutor:
    """All workers of a run; `close` ends them."""

    def __init__(
        self,
        setup: RunSetup,
        notice: Callable[[str], None],
        previous: PreviousRun | None = None,
    ) -> None:
        """Start the workers; with a `previous` run, resume from its state. `notice` prints a line.

        After an error no worker is left: a worker ignores SIGTERM, and would keep this process from exiting.
        """
        self.setup, self.notice = setup, notice
        self._launcher = make_launcher(setup.config, setup.out.name, setup.pool_bytes, notice)
        self._clock_began_s = time.monotonic()  # earlier for a resumed run, once its workers are ready
        self.weights = WeightStore(make_store_folder(setup.stored_bytes), setup.config.engine.dtype)
        if slow := explain_slow_store(self.weights.folder, setup.stored_bytes):
            notice(slow)
        self._messages = WorkerMessages(self._launcher.start)
        self._supervisor = Supervisor(
            setup.config, setup.out, self._messages, self._on_own_message, self.check_weight_store
        )
        self.clock, self._started_s = self._supervisor.clock, self._supervisor.clock.now_s
        with contextlib.ExitStack() as on_error:
            for close in (self.weights.close, self._launcher.close, self._supervisor.close):
                on_error.callback(close)
            self._start_workers(previous)
            on_error.pop_all()

    def _start_workers(self, previous: PreviousRun | None) -> None:
        setup, notice = self.setup, self.notice
        fsync = setup.config.journal.fsync
        self.samples = previous.samples if previous else SampleStore(setup.out / SAMPLES, fsync=fsync)
        self.stream_folder = self.weights.folder / "stream"
        self.events: deque[events.Event] = deque()
        self.sample_book = previous.sample_book if previous else SampleBook(setup, self.samples)
        if previous is None:
            (setup.out / FILE_NAME).unlink(missing_ok=True)  # of a run whose other files were removed
        kept = previous.restore_versions(self.weights) if previous else {}
        self.prompts = PromptSource(setup, previous.orchestrator.snapshot().next_index if previous else 0)
        self._previous = previous
        self._checkpoints = CheckpointManager(setup, self.weights, notice)
        self.engine_pool = EnginePool(
            setup, self.weights.folder, self._supervisor, self.events, self.sample_book, notice
        )
        self._elastic = ElasticEngines(setup, self._launcher, self.engine_pool, self.events, notice)
        self.drain_rejections: dict[int, str] = {}  # engine -> reason, until it is drained again
        self.engine_pool.digests.update(kept)
        start = (previous.resumed.from_step, previous.checkpoint) if previous else (0, None)
        self.training = TrainerRanks(
            setup,
            (self.weights.folder, self.stream_folder),
            start,
            self._supervisor,
            self.events,
            self.sample_book,
            self._checkpoints,
            self._on_published,
            notice,
            self._launcher.host,
        )
        tasks = reward_tasks(setup.config, setup.columns, setup.missing_columns)
        self._stream = _make_stream(
            setup, self.stream_folder, tasks, self._launcher, self._supervisor, notice
        )
        self.storage = storage if isinstance(storage := self._stream.storage, StorageProcess) else None
        self.samples.subscribe(self._stream)
        idle_timeout_s = setup.config.service.idle_timeout_s
        self._idle_timeout = IdleTimeout(idle_timeout_s, self.clock, self.awaited_inputs, self.missing_agents)
        self.is_paused = False  # no event is delivered, so no action follows
        self.rewards = RewardManager(
            tasks, self._stream, self._supervisor, self.samples.finished, self._report_score, notice
        )
        self.episode_runner = _make_episode_runner(setup, self._supervisor, notice)
        self.episodes = Episodes(
            setup,
            self.episode_runner,
            self.engine_pool,
            self.events,
            self.sample_book,
            self.clock,
        )
        self.engine_pool.on_engine_message = self.episodes.on_engine_message

    # the contract of the main loop

    @property
    def now(self) -> float:
        """Seconds since the workers were started; a resumed run continues the clock of its journal."""
        return time.monotonic() - self._clock_began_s

    def next_event(self, until: float | None) -> events.Event | None:
        """The next event; None if none arrives within POLL_S, or once `now` has reached `until`.

        Raises RunError if the run cannot continue.
        """
        if not self.events or self.is_paused:
            self.engine_pool.check_not_empty()
            self.poll(POLL_S if until is None or self.is_paused else min(POLL_S, until - self.now))
        if not self.events or self.is_paused:
            return None
        self.samples.commit_payload()  # it is durable before the event that names it
        event = self.events.popleft()
        self.episodes.on_event(event)
        return event

    def poll(self, timeout_s: float = POLL_S) -> None:
        """Wait for messages, turn them into events, and check the deadlines. Raises RunError."""
        self.engine_pool.flush()
        self._supervisor.poll(max(0.0, timeout_s))
        self.check_weight_store()
        self.samples.commit()  # readers of the store need not wait for an event
        self._elastic.scale()
        if self.storage is not None and self.storage.take_replaced():
            self._refill_storage()
        self._idle_timeout.check(bool(self.events) or self.is_paused)
        self.rewards.check_deadlines()
        self.training.check_deadlines()
        self.episodes.check_deadlines()

    def send_to_engines(self) -> None:
        """Send the queued messages to engines, unless there are events, which may add more of them."""
        if not self.events:
            self.engine_pool.flush()

    def execute(self, action: actions.Action) -> None:
        """Execute an action. Its outcome arrives as an event; some actions are for the journal only."""
        match action:
            case actions.FetchPrompts(count):
                self.events.extend(self.prompts.fetch(count))
            case actions.Generate():
                self.episodes.generate(action)
            case actions.Abort():
                self.episodes.abort(action)
            case actions.Migrate():
                self.episodes.migrate(action)
            case actions.DecodeOnly(engine, requests):
                self.engine_pool.send(engine, m.SetDecodeOnly(requests))
            case actions.PauseEngine(engine):
                self.engine_pool.send(engine, m.PauseDecoding())
            case actions.ResumeEngine(engine):
                self.engine_pool.send(engine, m.ResumeDecoding())
            case actions.RemoveEngine(engine):
                self.engine_pool.remove(engine)
            case actions.RejectDrain(engine, reason):
                self.drain_rejections[engine] = reason
                self.notice(f"engine {engine} is not drained: {reason}")
            case actions.Load(engine, version):
                self.engine_pool.send(engine, m.LoadWeights(version))
            case actions.Drop(engine, version):
                self.engine_pool.send(engine, m.DropWeights(version))
            case actions.Score(group):
                self._score(group)
            case actions.Filter(group, reason):
                self.sample_book.discard_group(group, f"filtered: {reason}")
            case actions.Fail(group, reason):
                self.episodes.discard_group(group)
                self.sample_book.discard_group(group, f"failed: {reason}")
                self.notice(f"group {group} failed: {reason}")
            case actions.Commit(group, step):
                self.accumulate(step, [group])
                self.samples.set_state([group], "committed")
            case actions.Train(step, groups):
                self.samples.commit()
                self.sample_book.batch = groups
                self.training.send(m.TrainStep(step, groups))
            case actions.Publish(version):
                self.training.send(m.PublishWeights(version))
            case actions.ReportDigest(version):
                self.training.send(m.PublishWeights(version, is_stored=False))
            case actions.Retire(version):
                self.weights.drop(version)
            case actions.ReportStall():
                self._report_stall(action)

    # start, stop and checkpoints

    def not_started(self) -> list[str]:
        """Names of the workers that have not started yet. Raises RunError once they are overdue."""
        missing = self._supervisor.not_started()
        timeout_s = self.setup.config.runtime.start_timeout_s
        if missing and self.clock.now_s > self._started_s + timeout_s:
            raise RunError(
                f"{', '.join(missing)} did not start within runtime.start_timeout_s = {timeout_s:g} s; "
                "raise it for a slow start"
            )
        return missing

    def begin_clock(self) -> None:
        """Start the clock once all workers have started; a resumed run continues the clock of its journal."""
        self._supervisor.check_starts()
        if self._previous is not None:
            self._clock_began_s = time.monotonic() - self._previous.now_s

    def join_all(self) -> None:
        """Report the ready engines as joined; engines that are ready later join without another call."""
        self.engine_pool.join_all()
        self.training.can_restart = True

    def accumulate(self, step: int, groups: Sequence[GroupId]) -> None:
        """Have the trainer work on groups committed to a step, if it need not wait for the whole batch."""
        if self.setup.config.streams_gradients or self.setup.aux_columns:
            self.samples.commit()  # so that the trainer can read them
            for group in groups:
                self.training.send(m.AccumulateGroup(step, group))

    def save(self, core: str, versions: Sequence[int], kept: KeptCheckpoints) -> None:
        """Have the trainer write a checkpoint after the work it already has.

        `core` is the orchestrator's snapshot as JSON; `versions` are older versions that may still be needed.
        The checkpoints `kept` stay.
        """
        self.check_weight_store()
        self.training.send(self._checkpoints.request(core, versions, kept))

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._checkpoints.num_pending > 0

    def take_saved(self) -> list[Path]:
        """The checkpoints that were written since the last call."""
        saved, self._checkpoints.saved = self._checkpoints.saved, []
        return saved

    def saved_checkpoint(self) -> Path | None:
        """The folder of the last checkpoint that was written; the trainer may exit now. Raises RunError if
        writing failed.
        """
        newest = self._checkpoints.newest()
        self.training.ignore_exit()
        return newest

    @property
    def is_in_step(self) -> bool:
        """Whether a step may finish soon; that of an external trainer only once its weights have arrived."""
        trainer = self.trainer
        return trainer.is_installing if isinstance(trainer, ExternalTrainer) else self.training.is_in_step

    def check_weight_store(self) -> None:
        """Raises RunError if it was removed: no worker can go on, and no replacement can start."""
        if not self.weights.folder.exists():
            raise RunError(
                f"the weight store {self.weights.folder} was removed during the run; leave folders named "
                f"{STORE_PREFIX}* alone while a run uses them. Resume the run: "
                f"{self.setup.config.resume_command} {self.setup.out}"
            )

    def wake_up(self) -> None:
        """End the driver's wait for messages, from any thread."""
        self._messages.put((None, None))

    def close(self) -> None:
        """End every worker and remove the versions from memory."""
        self.rewards.close()
        self._supervisor.close()
        self.sample_book.partial_outputs.close()
        self.samples.subscribe(None)
        self._stream.close()
        self._launcher.close()
        self.weights.close()
        self.samples.close()  # last, because it raises if the disk is full

    # what status, administration and the service read or change

    @property
    def trainer(self) -> Worker:
        """The first process of the current trainer."""
        return self.training.rank0

    @property
    def engine_ends(self) -> dict[int, str | None]:
        """See `EngineControl`."""
        pool = self.engine_pool
        return {engine: pool.end_states.get(engine) for engine in sorted({*pool.workers, *pool.end_states})}

    @property
    def joined_engines(self) -> Set[int]:
        return self.engine_pool.joined

    def add_engines(self, count: int) -> list[int]:
        """Start engines; returns their numbers. Raises ServiceError without room for them."""
        if len(self.engine_pool.workers) + count > MAX_ENGINES:
            raise ServiceError(409, f"a run has at most {MAX_ENGINES} engines at a time; drain others first")
        free, needed = shutil.disk_usage(self.weights.folder).free, count * self.setup.pool_bytes
        if free < needed:
            raise ServiceError(
                409,
                f"no room for {plural(count, 'more engine')}: {needed / 1e6:.0f} MB needed for KV, "
                f"{free / 1e6:.0f} MB free",
            )
        if shortage := self._launcher.find_shortage(count + self.engine_pool.num_restarting):
            raise ServiceError(409, f"no place for {plural(count, 'more engine')}: {shortage}")
        return [self.engine_pool.start() for _ in range(count)]

    def drain_engine(self, engine: int) -> None:
        """See `EngineControl`."""
        self.drain_rejections.pop(engine, None)
        self.events.append(events.DrainRequested(engine))  # a second request changes nothing

    def awaited_inputs(self) -> list[str]:
        """External inputs for which the run waits or may have to wait."""
        inputs = []
        if isinstance(self.trainer, ExternalTrainer) and self.trainer.due_step is not None:
            inputs.append(f"the weights of version {self.trainer.due_step + 1}")
        if self.prompts.num_wanted:
            inputs.append(plural(self.prompts.num_wanted, "prompt"))
        if self.setup.config.service.agents:
            inputs.append("agents")
        return inputs

    @property
    def agent_sessions(self) -> AgentSessions | None:
        """The sessions of a run with agents."""
        return self.episode_runner if isinstance(self.episode_runner, AgentSessions) else None

    def agent_waits(self) -> dict[RequestId, str]:
        """Requests whose episodes wait for an agent -> what the agent has to do."""
        return {} if self.agent_sessions is None else self.agent_sessions.waits()

    def missing_agents(self) -> str:
        """That episodes wait and no agent has a session, and what an agent has to do; else ""."""
        return "" if self.agent_sessions is None else self.agent_sessions.missing

    def worker_states(self) -> list[WorkerState]:
        """The state of each process."""
        states = [state for states in self.workers_by_role().values() for state in states]
        return states if self.storage is None else [*states, *self.storage.states()]

    def workers_by_role(self) -> dict[str, list[WorkerState]]:
        """The same, by the names that the wait-for graph uses."""
        engines, trainer = self._supervisor.states(self.engine_pool), self.training.worker_states()
        return {ENGINES: engines, TRAINER: trainer, REWARDS: self.rewards.worker_states()}

    def restart_times(self) -> dict[str, float]:
        """Seconds until each lost worker is restarted, by its name."""
        return self._supervisor.restarts()

    # actions with more to do than a message

    def _score(self, group: GroupId) -> None:
        if (rewards := self.sample_book.rewards.get(group)) is not None:  # scored before a restart
            self.sample_book.pop_held_out_answers(group)
            self.events.append(events.GroupScored(group, rewards))
        elif (event := self.sample_book.score_from_episodes(group)) is not None:
            self.events.append(event)
        else:
            source = self.setup.source_of(group)
            prompt_row = encode_prompt_row(source.prompt(group.row), source.fields(group.row))
            self.rewards.submit(group, prompt_row, self.sample_book.pop_held_out_answers(group))

    def _report_stall(self, action: actions.ReportStall) -> None:
        step, needed = step_number(action.step), self.agent_waits()
        causes = [f"{each} needs {needed[each]}" if each in needed else f"{each}" for each in action.requests]
        what = f"{action.group} ({', '.join(causes) or 'its rewards'})"
        self.notice(f"step {step} waits for group {what} since {action.since_s:.1f} s")

    # messages of workers

    def _on_own_message(self, message: Any) -> None:
        """Handle a reply to an episode."""
        self.episodes.on_message(message)

    def _report_score(
        self, event: events.GroupScored | events.ScoringFailed, task_rewards: TaskRewards
    ) -> None:
        self.events.append(self.sample_book.record_scores(event, task_rewards))

    def _on_published(self, version: int, digest: str) -> None:
        if self._previous is not None:
            self._previous.check_published(version, digest, self.setup)
        self.engine_pool.on_published(version, digest)

    def _refill_storage(self) -> None:
        """Fill a new storage process, which is empty."""
        self.training.on_storage_replaced()  # first: aux workers fill the columns that they find empty
        self._stream.reconnect()
        self.samples.subscribe(self._stream)
        self.rewards.on_storage_replaced()


@dataclass
class LiveRun:
    """A run as the service sees it: implements `dora.service.context.RunContext`."""

    setup: RunSetup
    executor: ProcessExecutor
    state: Callable[[], State]
    metrics: RunMetrics
    is_training: bool = False  # the orchestrator runs: engines may be added and drained

    def __post_init__(self) -> None:
        self.engines = executor = self.executor
        self.prompts, self.agent_sessions = executor.prompts, executor.agent_sessions
        self.stream_dir, self.weights_dir = executor.stream_folder, executor.weights.folder
        self.external_rewards: Mapping[str, ExternalRewards] = executor.rewards.external

    @property
    def is_paused(self) -> bool:
        return self.executor.is_paused

    @property
    def now_s(self) -> float:
        return self.executor.now

    @property
    def external_trainer(self) -> ExternalTrainer | None:
        trainer = self.executor.trainer
        return trainer if isinstance(trainer, ExternalTrainer) else None

    def check_training(self) -> None:
        """Raises ServiceError while the run starts, saves or ends."""
        if not self.is_training:
            raise ServiceError(409, "the run is starting or saving; try again while it trains")

    def put_prompts(self, first: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """See `PromptSource.append`."""
        self.executor.events.extend(self.executor.prompts.append(first, rows))

    def awaited_inputs(self) -> list[str]:
        return self.executor.awaited_inputs()

    def pause(self) -> None:
        """Pause the whole run: deliver no events, and pause decoding. A training step in progress finishes,
        and workers' deadlines still apply. Raises ServiceError unless the run trains.
        """
        self.check_training()
        if not self.executor.is_paused:
            self.executor.is_paused = True
            for engine in self._decoding_engines():
                self.executor.engine_pool.pause_unreported(engine)

    def resume(self) -> None:
        """End a pause."""
        if self.executor.is_paused:
            self.executor.is_paused = False
            for engine in self._decoding_engines():
                self.executor.engine_pool.send(engine, m.ResumeDecoding())

    def _decoding_engines(self) -> list[int]:
        """Engines that the orchestrator has not paused itself; the set does not change during a pause."""
        return [each.id for each in self.state().engines.values() if not (each.is_pausing or each.is_paused)]


def _make_episode_runner(
    setup: RunSetup, supervisor: Supervisor, notice: Callable[[str], None]
) -> EpisodeRunner | None:
    """Environments, or agents through the service; None: requests have one turn."""
    if setup.config.env.has_environments:
        return EnvPool(setup, supervisor, notice)
    if setup.config.service.agents:
        return AgentSessions(setup, supervisor.messages, supervisor.clock, notice)
    return None


def _make_stream(
    setup: RunSetup,
    folder: Path,
    tasks: Sequence[RewardTask],
    launcher: Launcher,
    supervisor: Supervisor,
    notice: Callable[[str], None],
) -> RunStream:
    """The sample stream. On Ray its storage is an actor on the driver's node, else a thread of the driver."""
    config, is_multi_node = setup.config, launcher.host is not None
    leases = {task.name: task.lease_s(is_multi_node) for task in tasks if not task.is_external}
    serve: Callable[[StorageSpec], StreamStorage] = ThreadStorage
    if config.runtime.kind == "ray":
        serve = partial(StorageProcess, supervisor=supervisor, config=config, notice=notice)
    return RunStream(folder, setup.limits.group_size, setup.aux_columns, leases, launcher.host, serve)
