"""Simulated runs that leave the files of a real one."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora.core.actions import Action, Commit, Fail, Filter
from dora.core.events import Event, GroupScored, RequestFinished, Resumed, Trained
from dora.core.orchestrator import Orchestrator
from dora.core.state import State
from dora.core.types import BatchMember, GroupId, Limits
from dora.journal.writer import JournalWriter, chain_line
from dora.runtime.main_loop import run_main_loop
from dora.sim.random_config import WorldConfig
from dora.sim.world import World
from dora.stream.sample_db import SampleStore, Trajectory, answer_source

Record = dict[str, Any]
Edit = Callable[[list[Record]], object]  # of the records in a journal
FROM_STEP, NUM_REDONE = 3, 2  # of the resumed run


class RunStopped(Exception):
    """The run has reached its maximum of events."""


class RecordedWorld(World):
    """A simulated world that stores its trajectories; their tokens are 0, 1, 2, ..."""

    def __init__(self, config: WorldConfig, seed: int, store: SampleStore, max_events: int | None) -> None:
        super().__init__(config, seed)
        self.store = store
        self.batches: dict[int, list[GroupId]] = {}
        self.num_events_left = max_events

    def execute(self, action: Action) -> None:
        super().execute(action)
        match action:
            case Commit(group, step):
                self.batches.setdefault(step, []).append(group)
                self.store.set_state([group], "committed")
            case Filter(group) | Fail(group):
                self.store.set_state([group], type(action).__name__.lower() + "ed")
            case _:
                pass

    def next_event(self, until: float | None) -> Event | None:
        if self.num_events_left is not None:
            self.num_events_left -= 1
            if self.num_events_left < 0:
                raise RunStopped
        event = super().next_event(until)
        match event:
            case RequestFinished(_, request, _, num_tokens, chunks):
                tokens, logprobs = list(range(num_tokens)), [-0.5] * num_tokens
                version, digest, segments = answer_source(chunks)
                trajectory = Trajectory(request, version, digest, [1, 2], tokens, logprobs, segments=segments)
                return replace(event, payload=self.store.put(trajectory))
            case GroupScored(group, rewards):
                self.store.score(group, rewards, [0.0] * len(rewards))
            case Trained(step):
                self.store.set_state(self.batches[step], "trained", step)
            case _:
                pass
        return event


def world_config(**changes: Any) -> WorldConfig:
    """A small busy world with three engines and all kinds of failures."""
    settings: dict[str, Any] = {
        "limits": Limits(num_steps=8, batch_size=3, group_size=2, max_staleness=2, filter_groups=True),
        "num_prompts": 7,
        "engines": ((4, 2), (6, 2), (3, 1)),
        "seconds_per_token": (0.01, 0.02, 0.015),
        "max_length": 64,
        "tail": 1.1,
        "reward_s": 0.01,
        "step_s": 0.3,
        "load_s": 0.01,
        "scoring_failure_rate": 0.1,
        "request_failure_rate": 0.02,
        "equal_reward_rate": 0.2,
        "engine_loss_interval_s": 1.0,
        "engine_restart_s": 0.5,
    }
    return WorldConfig(**(settings | changes))


@contextmanager
def recording(
    folder: Path, config: WorldConfig, seed: int, max_events: int | None = None
) -> Iterator[tuple[Orchestrator, RecordedWorld, JournalWriter]]:
    """The orchestrator, the world and the journal of a run in a new folder."""
    folder.mkdir()
    store = SampleStore(folder / "samples.sqlite")
    journal = JournalWriter(folder / "journal.jsonl", config.limits, "", config.num_prompts)
    yield Orchestrator(config.limits), RecordedWorld(config, seed, store, max_events), journal
    journal.close()
    store.close()


def record_run(folder: Path, config: WorldConfig, seed: int, max_events: int | None = None) -> Path:
    """Simulate a run to its end, or to `max_events` events; returns `folder`."""
    with recording(folder, config, seed, max_events) as (core, world, journal), suppress(RunStopped):
        run_main_loop(core, world, journal.record)
    return folder


def record_resumed_run(folder: Path) -> Path:
    """All processes crash after `FROM_STEP + NUM_REDONE` steps; the run resumes after `FROM_STEP` of them."""
    config = world_config()
    with recording(folder, config, 0) as (core, world, journal):
        state, batches = core.snapshot(), list[tuple[BatchMember, ...]]()
        actions = core.start(world.now)
        journal.record(world.now, None, actions)
        while state.num_trained < (FROM_STEP + NUM_REDONE) * config.limits.batch_size:
            for action in actions:
                world.execute(action)
            event = world.next_event(core.next_wakeup())
            assert event is not None
            if isinstance(event, Trained):
                batches.append(_batch_of(state, event.step))
            actions = core.handle(event, world.now)
            journal.record(world.now, event, actions)
        world.restart(state.next_index, FROM_STEP)
        kept = tuple((v, digest) for v, digest in state.stored_versions.items() if v < FROM_STEP)
        run_main_loop(core, world, journal.record, Resumed(FROM_STEP, kept, tuple(batches[FROM_STEP:])))
    return folder


def _batch_of(state: State, step: int) -> tuple[BatchMember, ...]:
    groups = [state.groups[group] for group in state.batches[step]]
    return tuple(BatchMember(group.id, group.index, group.version) for group in groups)


def nth_of(records: list[Record], kind: str, nth: int = 0) -> Record:
    """The nth record of a kind; -1 is the last."""
    return [record for record in records if record["kind"] == kind][nth]


def edited(run: Path, folder: Path, edit: Edit) -> Path:
    """A copy of a run with edited journal lines, renumbered, and with a new hash chain."""
    shutil.copytree(run, folder)
    path = folder / "journal.jsonl"
    header, *records = [json.loads(line) for line in path.read_text().splitlines()]
    edit(records)
    write_chained(path, [header, *(record | {"seq": seq} for seq, record in enumerate(records))])
    return folder


def changed(kind: str, nth: int = 0, **fields: object) -> Edit:
    """The nth record of a kind has other values."""
    return _named(f"{kind} with {fields}", lambda records: nth_of(records, kind, nth).update(fields))


def removed(kind: str, nth: int = 0) -> Edit:
    return _named(f"no {kind}", lambda records: records.remove(nth_of(records, kind, nth)))


def repeated(kind: str) -> Edit:
    """The first record of a kind comes twice."""

    def edit(records: list[Record]) -> None:
        record = nth_of(records, kind)
        records.insert(records.index(record), dict(record))

    return _named(f"two {kind}", edit)


def _named(name: str, edit: Edit) -> Edit:
    edit.__name__ = name
    return edit


def with_edits(edits: Sequence[tuple[Edit, str, str]]) -> pytest.MarkDecorator:
    """A test for each edit, the guarantee that it breaks, and words of the finding."""
    ids = [f"{edit.__name__}: {words}" for edit, _, words in edits]
    return pytest.mark.parametrize(("edit", "guarantee", "words"), edits, ids=ids)


def write_chained(path: Path, lines: Sequence[Record]) -> None:
    """Write a journal whose lines have a correct hash chain, whatever they say."""
    texts, chain = [], ""
    for line in lines:
        text, chain = chain_line(json.dumps({k: v for k, v in line.items() if k != "chain"}), chain)
        texts.append(text + "\n")
    path.write_text("".join(texts))


def edited_samples(run: Path, folder: Path, sql: str) -> Path:
    """A copy of a run with the sample store changed by `sql`, which must change something."""
    shutil.copytree(run, folder)
    connection = sqlite3.connect(folder / "samples.sqlite")
    assert connection.execute(sql).rowcount > 0
    connection.commit()
    connection.close()
    return folder
