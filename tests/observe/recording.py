"""Runs in virtual time that leave the files of a real one: what `dora.observe` is tested on."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dora.core.actions import Action, Commit, Fail, Filter
from dora.core.events import Event, GroupScored, RequestFinished, Trained
from dora.core.orchestrator import Orchestrator
from dora.core.records import GroupId, Limits
from dora.runtime.drive import drive
from dora.runtime.journal import Journal
from dora.sim.models import WorldConfig
from dora.sim.world import World
from dora.stream.samples import SampleStore, Source, Trajectory

Record = dict[str, Any]


class StoppedEarlyError(Exception):
    """The run was stopped early."""


class RecordedWorld(World):
    """A simulated world which stores its trajectories; their tokens are 0, 1, 2, ..."""

    def __init__(self, config: WorldConfig, seed: int, store: SampleStore, max_facts: int | None) -> None:
        super().__init__(config, seed)
        self.store = store
        self.batch_of: dict[int, list[GroupId]] = {}
        self.num_facts_left = max_facts

    def perform(self, order: Action) -> None:
        super().perform(order)
        match order:
            case Commit(group, step):
                self.batch_of.setdefault(step, []).append(group)
                self.store.mark([group], "committed")
            case Filter(group) | Fail(group):
                self.store.mark([group], type(order).__name__.lower() + "ed")
            case _:
                pass

    def next_fact(self, until: float | None) -> Event | None:
        if self.num_facts_left is not None:
            self.num_facts_left -= 1
            if self.num_facts_left < 0:
                raise StoppedEarlyError
        event = super().next_fact(until)
        match event:
            case RequestFinished(_, request, _, num_tokens, chunks):
                tokens, logprobs = list(range(num_tokens)), [-0.5] * num_tokens
                version, digest, segments = Source.of(chunks)
                self.store.put(
                    Trajectory(request, version, digest, [1, 2], tokens, logprobs, segments=segments)
                )
            case GroupScored(group, rewards):
                self.store.score(group, rewards, [0.0] * len(rewards))
            case Trained(step):
                self.store.mark(self.batch_of[step], "trained", step)
            case _:
                pass
        return event


def world_config(**changes: Any) -> WorldConfig:
    """A small busy world with three engines that have all kinds of mishaps."""
    settings: dict[str, Any] = {
        "limits": Limits(num_steps=8, batch_size=3, group_size=2, max_staleness=2, filter_groups=True),
        "num_prompts": 7,
        "engines": ((4, 2), (6, 2), (3, 1)),
        "speeds": (0.01, 0.02, 0.015),
        "max_length": 64,
        "tail": 1.1,
        "reward_s": 0.01,
        "step_s": 0.3,
        "load_s": 0.01,
        "share_failed": 0.1,
        "share_refused": 0.02,
        "share_flat": 0.2,
        "loss_interval_s": 1.0,
        "return_s": 0.5,
    }
    return WorldConfig(**(settings | changes))


def record_run(folder: Path, config: WorldConfig, seed: int, max_facts: int | None = None) -> Path:
    """Drive a world to its end, or until `max_facts` facts were heard; returns `folder`."""
    folder.mkdir()
    store = SampleStore(folder / "samples.sqlite")
    journal = Journal(folder / "journal.jsonl", config.limits, "digest of no file", config.num_prompts)
    hands = RecordedWorld(config, seed, store, max_facts)
    with suppress(StoppedEarlyError):
        drive(Orchestrator(config.limits), hands, journal.record)
    journal.close()
    store.close()
    return folder


def tampered(run: Path, folder: Path, change: Callable[[list[Record]], object]) -> Path:
    """A copy of a run whose journal lines went through `change`; they are numbered anew."""
    shutil.copytree(run, folder)
    path = folder / "journal.jsonl"
    header, *lines = path.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    change(records)
    texts = [header, *(json.dumps(record | {"seq": seq}) for seq, record in enumerate(records))]
    path.write_text("\n".join(texts) + "\n")
    return folder


def tampered_samples(run: Path, folder: Path, sql: str) -> Path:
    """A copy of a run after `sql` was executed on its sample store; it must have changed something."""
    shutil.copytree(run, folder)
    connection = sqlite3.connect(folder / "samples.sqlite")
    assert connection.execute(sql).rowcount > 0
    connection.commit()
    connection.close()
    return folder
