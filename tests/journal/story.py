"""A short run by hand.

A request migrates twice, a migration fails, an engine is lost, another is removed, a step fails.
"""

from __future__ import annotations

from pathlib import Path

from dora.core.actions import (
    Abort,
    Action,
    Admit,
    Commit,
    DecodeOnly,
    Fail,
    FetchPrompts,
    Generate,
    Load,
    Migrate,
    Publish,
    RemoveEngine,
    ReportStall,
    ResumeEngine,
    Score,
    Stop,
    Train,
)
from dora.core.events import (
    DrainRequested,
    EngineJoined,
    EngineLost,
    EnginePaused,
    EngineRemoved,
    Event,
    GroupScored,
    Loaded,
    Migrated,
    MigrationFailed,
    PromptsFetched,
    Published,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    StepFailed,
    Trained,
)
from dora.core.types import Chunk, GroupId, Limits, RequestId
from dora.journal.writer import JournalWriter
from dora.stream.sample_db import SampleStore, Trajectory

LIMITS = Limits(num_steps=1, batch_size=1, group_size=2, max_staleness=0)
TRAINED, FAILED = GroupId(0, 4), GroupId(0, 2)
FIRST, SECOND = RequestId(*TRAINED, 0), RequestId(*TRAINED, 1)
REJECTED, ABORTED = RequestId(*FAILED, 0), RequestId(*FAILED, 1)
DIGEST = "d" * 32


def finished(engine: int, request: RequestId) -> RequestFinished:
    return RequestFinished(engine, request, 0, 9, (Chunk(0, DIGEST, 9),), "stop")


# Each event (None: the start) with the actions that it causes, a tenth of a second apart.
EVENTS: list[tuple[Event | None, list[Action]]] = [
    (None, [Publish(0), FetchPrompts(2)]),
    *[(EngineJoined(engine, 2, 1), []) for engine in (0, 1, 2)],
    (PromptsFetched(0, (FAILED, TRAINED)), []),
    (Published(0, DIGEST), [Load(engine, 0) for engine in (0, 1, 2)]),
    *[(Loaded(engine, 0, DIGEST), []) for engine in (1, 2)],
    (
        Loaded(0, 0, DIGEST),
        [
            Admit(FAILED, 0, 0, 0),
            Generate(0, 0, (REJECTED, ABORTED)),
            Admit(TRAINED, 1, 0, 0),
            Generate(1, 0, (FIRST, SECOND)),
        ],
    ),
    (RequestFailed(0, REJECTED, "too long"), [Abort(0, (ABORTED,)), Fail(FAILED, "too long")]),
    (RequestsAborted(0, (ABORTED,), 3), [Migrate(FIRST, 1, 0, 0, "level running")]),
    (MigrationFailed(FIRST, 1, 0, "no free block"), [Migrate(FIRST, 1, 0, 0, "level running")]),
    (Migrated(FIRST, 1, 0, 5, 2_000_000, 0.004, 0.003), [DecodeOnly(0, (FIRST,))]),
    (EngineLost(1, "killed"), [DecodeOnly(0, ()), Generate(2, 0, (SECOND,))]),
    (DrainRequested(0), [Migrate(FIRST, 0, 2, 0, "drain")]),
    (Migrated(FIRST, 0, 2, 7, 2_000_000, 0.004, 0.003), [RemoveEngine(0)]),
    (EngineRemoved(0), [ReportStall(0, TRAINED, (FIRST, SECOND), 0.9)]),
    (EnginePaused(2), [ResumeEngine(2)]),
    (finished(2, FIRST), []),
    (finished(2, SECOND), [Score(TRAINED)]),
    (GroupScored(TRAINED, (1.0, 0.5)), [Commit(TRAINED, 0), Train(0, (TRAINED,))]),
    (StepFailed(0, "out of memory"), [Train(0, (TRAINED,))]),
    (Trained(0), [Publish(1)]),
    (Published(1, "e" * 32), [Stop()]),
]


def write_story(folder: Path, num_events: int | None = None) -> Path:
    """Write journal and samples of the story, or of its first `num_events`; returns the folder."""
    folder.mkdir()
    journal = JournalWriter(folder / "journal.jsonl", LIMITS, "", 7)
    for number, (event, actions) in enumerate(EVENTS[:num_events]):
        journal.record(number / 10, event, actions)
    journal.close()
    store = SampleStore(folder / "samples.sqlite")
    for request in (FIRST, SECOND):
        store.put(Trajectory(request, 0, DIGEST, [1, 2], list(range(9)), [-0.5] * 9))
    store.score(TRAINED, (1.0, 0.5), [0.5, -0.5])
    store.set_state([TRAINED], "trained", 0)
    store.close()
    return folder
