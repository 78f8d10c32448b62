"""A short run by hand: a request moves twice, a move fails, an engine is lost, one leaves, a step fails."""

from __future__ import annotations

from pathlib import Path

from dora.core.actions import (
    Abort,
    Action,
    Admit,
    Commit,
    Dismiss,
    Fail,
    Fetch,
    Generate,
    Load,
    Migrate,
    Publish,
    ReportStall,
    Resume,
    Rush,
    Score,
    Stop,
    Train,
)
from dora.core.events import (
    DrainAsked,
    EngineJoined,
    EngineLeft,
    EngineLost,
    Event,
    GroupScored,
    Loaded,
    Migrated,
    MigrationFailed,
    Paused,
    PromptsFetched,
    Published,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    StepFailed,
    Trained,
)
from dora.core.records import Chunk, GroupId, Limits, RequestId
from dora.runtime.journal import Journal
from dora.stream.samples import SampleStore, Trajectory

LIMITS = Limits(num_steps=1, batch_size=1, group_size=2, max_staleness=0)
TRAINED, FAILED = GroupId(0, 4), GroupId(0, 2)
FIRST, SECOND = RequestId(*TRAINED, 0), RequestId(*TRAINED, 1)
REFUSED, GIVEN_UP = RequestId(*FAILED, 0), RequestId(*FAILED, 1)
DIGEST = "d" * 32


def finished(engine: int, request: RequestId) -> RequestFinished:
    return RequestFinished(engine, request, 0, 9, (Chunk(0, DIGEST, 9),), "stop")


# One fact (None: the start) and the orders it causes, a tenth of a second apart.
TURNS: list[tuple[Event | None, list[Action]]] = [
    (None, [Publish(0), Fetch(2)]),
    *[(EngineJoined(engine, 2, 1), []) for engine in (0, 1, 2)],
    (PromptsFetched(0, (FAILED, TRAINED)), []),
    (Published(0, DIGEST), [Load(engine, 0) for engine in (0, 1, 2)]),
    *[(Loaded(engine, 0, DIGEST), []) for engine in (1, 2)],
    (
        Loaded(0, 0, DIGEST),
        [
            Admit(FAILED, 0, 0, 0),
            Generate(0, 0, (REFUSED, GIVEN_UP)),
            Admit(TRAINED, 1, 0, 0),
            Generate(1, 0, (FIRST, SECOND)),
        ],
    ),
    (RequestFailed(0, REFUSED, "too long"), [Abort(0, (GIVEN_UP,)), Fail(FAILED, "too long")]),
    (RequestsAborted(0, (GIVEN_UP,), 3), [Migrate(FIRST, 1, 0, 0, "level running")]),
    (MigrationFailed(FIRST, 1, 0, "no free block"), [Migrate(FIRST, 1, 0, 0, "level running")]),
    (Migrated(FIRST, 1, 0, 5, 2_000_000, 0.004, 0.003), [Rush(0, (FIRST,))]),
    (EngineLost(1, "killed"), [Rush(0, ()), Generate(2, 0, (SECOND,))]),
    (DrainAsked(0), [Migrate(FIRST, 0, 2, 0, "drain")]),
    (Migrated(FIRST, 0, 2, 7, 2_000_000, 0.004, 0.003), [Dismiss(0)]),
    (EngineLeft(0), [ReportStall(0, TRAINED, (FIRST, SECOND), 0.9)]),
    (Paused(2), [Resume(2)]),
    (finished(2, FIRST), []),
    (finished(2, SECOND), [Score(TRAINED)]),
    (GroupScored(TRAINED, (1.0, 0.5)), [Commit(TRAINED, 0), Train(0, (TRAINED,))]),
    (StepFailed(0, "out of memory"), [Train(0, (TRAINED,))]),
    (Trained(0), [Publish(1)]),
    (Published(1, "e" * 32), [Stop()]),
]


def write_story(folder: Path, num_turns: int | None = None) -> Path:
    """The journal and samples of the story, or of its first turns; returns the folder."""
    folder.mkdir()
    journal = Journal(folder / "journal.jsonl", LIMITS, "digest of no file", 7)
    for number, (event, orders) in enumerate(TURNS[:num_turns]):
        journal.record(number / 10, event, orders)
    journal.close()
    store = SampleStore(folder / "samples.sqlite")
    for request in (FIRST, SECOND):
        store.put(Trajectory(request, 0, DIGEST, [1, 2], list(range(9)), [-0.5] * 9))
    store.score(TRAINED, (1.0, 0.5), [0.5, -0.5])
    store.mark([TRAINED], "trained", 0)
    store.close()
    return folder
