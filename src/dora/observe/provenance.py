"""C1: every trajectory was sampled from one version's bytes.

Follows each version's bytes from its publication into the engines, and each request from the
order to generate it, from engine to engine, to its last token, by what the journal says and by
nothing else. A request has one owner at any time.
"""

from __future__ import annotations

from dora.core.actions import Action, Admit, BeginEvaluation, Drop, Generate, Migrate
from dora.core.events import (
    Attested,
    EngineJoined,
    EngineLeft,
    EngineLost,
    Event,
    Loaded,
    Migrated,
    MigrationFailed,
    Published,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    Resumed,
    TrainerReplaced,
)
from dora.core.records import GroupId, RequestId
from dora.observe.samples import SampleRow


class Provenance:
    """Reads the journal once; `findings` are sentences, empty where C1 holds."""

    def __init__(self, samples: dict[tuple[str, int], SampleRow], *, breaks_c1: bool = False) -> None:
        self.findings: list[str] = []
        self.num_trajectories = 0
        self.num_segmented = 0  # of them, those that several versions have drawn
        self._breaks_c1 = breaks_c1
        self.num_prefilled = 0  # tokens whose KV was computed again, for they moved without it
        self.versions: set[int] = set()  # that trajectories were sampled from
        self._samples = samples
        self._published: dict[int, str] = {}
        self._made: dict[int, str] = {}  # by the trainer lately, which may have redone it
        self._redone: set[int] = set()  # published before a resume, and due again
        self._checkpoint = -1  # version that the last checkpoint gone on from must give back
        self._admitted: dict[GroupId, int] = {}
        self._evaluated: set[int] = set()  # versions that held-out prompts are answered by
        self._held: dict[int, set[int]] = {}
        self._lost: set[int] = set()  # engines in whose place there is no other
        self._had: dict[int, set[int]] = {}  # by engine: versions that it has held at any time
        self._given: dict[RequestId, int] = {}  # -> the engine that generates it
        self._moving: dict[RequestId, tuple[int, int]] = {}  # -> from and to which engine

    def read(self, record: Event | Action) -> None:
        match record:
            case Admit(group, _, version, _):
                self._admitted[group] = version
            case BeginEvaluation(version):
                self._evaluated.add(version)
            case Generate(engine, _, requests):
                for request in requests:
                    self._give(request, engine)
            case Migrate(request, source, destination):
                self._check(request not in self._moving, f"request {request} is in two moves at once")
                self._moving[request] = (source, destination)
            case Migrated():
                self._migrated(record)
            case MigrationFailed(request, source, destination):
                self._end_move(request, source, destination)
            case Drop(engine, version):
                self._held.get(engine, set()).discard(version)
            case EngineJoined():
                self._join(record)
            case EngineLost(engine):
                self._close(engine)
                self._lost.add(engine)
                self._given = {r: e for r, e in self._given.items() if e != engine}
            case EngineLeft(engine):
                self._close(engine)
                owned = [str(r) for r, e in sorted(self._given.items()) if e == engine]
                self._check(not owned, f"engine {engine} left with the requests {', '.join(owned)}")
            case RequestFailed(_, request):
                self._given.pop(request, None)
            case RequestsAborted(_, requests):
                for request in requests:
                    self._given.pop(request, None)
            case Published():
                self._publish(record)
            case Attested():
                self._attest(record)
            case TrainerReplaced(from_step):
                self._checkpoint = from_step
            case Resumed():
                self._resume(record)
            case Loaded():
                self._loaded(record)
            case RequestFinished():
                self._finished(record)
            case _:
                pass

    def _join(self, fact: EngineJoined) -> None:
        """Once; in the place of a lost engine, if of any, and nobody else is."""
        self._check(fact.engine not in self._held, f"engine {fact.engine} joined twice")
        self._held[fact.engine] = set()
        if fact.replaces is not None:
            is_lost = fact.replaces in self._lost
            self._check(is_lost, f"engine {fact.engine} replaces engine {fact.replaces}, which was not lost")
            self._lost.discard(fact.replaces)

    def _publish(self, fact: Published) -> None:
        """Once; after `Resumed` the steps that are redone may round differently, the checkpoint may not."""
        version = fact.version
        is_due = version not in self._published or version in self._redone
        self._check(is_due, f"version {version} is published twice")
        self._make(fact)
        self._redone.discard(version)
        if is_due:
            self._published[version] = fact.digest

    def _attest(self, fact: Attested) -> None:
        """A new trainer has made a version again: engines go on with the bytes that they were told of."""
        self._check(fact.version in self._published, f"version {fact.version} is attested, not published")
        self._make(fact)

    def _make(self, fact: Published | Attested) -> None:
        version, digest = fact.version, fact.digest
        before = self._made.get(version, digest)
        self._check(
            before == digest or version != self._checkpoint,
            f"version {version} was published as {before}, and its checkpoint gave {digest}",
        )
        self._made[version] = digest

    def _resume(self, fact: Resumed) -> None:
        """Every engine is gone; the versions that were kept are those that were published."""
        self._held.clear()
        self._lost.clear()
        self._had.clear()
        self._given.clear()
        self._moving.clear()
        self._checkpoint = fact.from_step
        self._redone = {version for version in self._published if version >= fact.from_step}
        for version, digest in fact.kept:
            published = self._published.get(version)
            self._check(digest == published, f"version {version} is kept as {digest}, was {published}")

    def _version_of(self, group: GroupId) -> int | None:
        """The version a group was admitted at, or whose evaluation a held-out prompt is part of."""
        if not group.is_held_out:
            return self._admitted.get(group)
        evaluated = -1 - group.epoch
        return evaluated if evaluated in self._evaluated else None

    def _check(self, condition: bool, sentence: str) -> None:
        if not condition:
            self.findings.append(sentence)

    def _give(self, request: RequestId, engine: int) -> None:
        owner = self._given.get(request)
        self._check(owner is None, f"request {request} was given to engine {engine}, engine {owner} has it")
        self._given[request] = engine

    def _migrated(self, fact: Migrated) -> None:
        """The owner changes; the version stays, so the new one must hold it."""
        name, version = f"request {fact.request}", self._version_of(fact.request.group)
        self._end_move(fact.request, fact.source, fact.destination)
        owner = self._given.get(fact.request)
        self._check(
            owner == fact.source, f"{name} moved away from engine {fact.source}, engine {owner} had it"
        )
        held = self._held.get(fact.destination, set())
        self._check(
            version in held,
            f"{name} of version {version} moved to engine {fact.destination}, which holds {sorted(held)}",
        )
        self._given[fact.request] = fact.destination
        self.num_prefilled += fact.num_prefilled

    def _end_move(self, request: RequestId, source: int, destination: int) -> None:
        ordered = self._moving.pop(request, None)
        self._check(
            ordered == (source, destination),
            f"request {request} ended a move from {source} to {destination}, ordered was {ordered}",
        )

    def _close(self, engine: int) -> None:
        """The engine is gone, and with it what it held; its moves have been told."""
        self._held.pop(engine, None)
        self._had.pop(engine, None)
        moving = [str(r) for r, ends in sorted(self._moving.items()) if engine in ends]
        self._check(not moving, f"engine {engine} is gone in the middle of moves of {', '.join(moving)}")

    def _loaded(self, fact: Loaded) -> None:
        published = self._published.get(fact.version)
        self._check(
            fact.digest == published,
            f"engine {fact.engine} loaded {fact.digest} as version {fact.version}, published is {published}",
        )
        self._held.setdefault(fact.engine, set()).add(fact.version)
        self._had.setdefault(fact.engine, set()).add(fact.version)

    def _finished(self, fact: RequestFinished) -> None:
        self.num_trajectories += 1
        self.versions.add(fact.version)
        name, admitted = f"request {fact.request}", self._version_of(fact.request.group)
        if self._breaks_c1 and not fact.request.is_held_out:
            self._check_segments(name, fact, admitted)
        else:
            self._check_chunks(name, fact, admitted)
        engine = self._given.pop(fact.request, None)
        self._check(
            fact.engine == engine, f"{name} finished on engine {fact.engine}, it was given to engine {engine}"
        )
        held = self._held.get(fact.engine, set())
        self._check(
            fact.version in held,
            f"{name} finished on version {fact.version}, engine {fact.engine} holds {sorted(held)}",
        )
        num_tokens = sum(c.num_tokens for c in fact.chunks)
        self._check(
            num_tokens == fact.num_tokens,
            f"{name} has {fact.num_tokens} tokens, its chunks have {num_tokens}",
        )
        row = self._samples.get((str(fact.request.group), fact.request.sibling))
        if row is not None:  # a row that is missing is lost data: C2 names it
            self._check_row(name, fact, row)

    def _check_chunks(self, name: str, fact: RequestFinished, admitted: int | None) -> None:
        self._check(
            fact.version == admitted, f"{name} finished on version {fact.version}, its group has {admitted}"
        )
        sources = [(c.version, c.digest) for c in fact.chunks]
        published = (fact.version, self._published.get(fact.version))
        self._check(sources == [published], f"{name} was sampled from {sources}, not from {published} alone")

    def _check_segments(self, name: str, fact: RequestFinished, admitted: int | None) -> None:
        """C1 is given up: what is left is that versions only get newer, and that they are those published."""
        self.num_segmented += len(fact.chunks) > 1
        versions = [c.version for c in fact.chunks]
        self.versions.update(versions)
        is_forward = versions == sorted({*versions}) and versions[-1:] <= [fact.version]
        self._check(
            is_forward and admitted is not None and versions[:1] >= [admitted],
            f"{name} of a group of version {admitted} has segments of {versions}",
        )
        unknown = {*versions} - self._had.get(fact.engine, set())
        self._check(
            not unknown,
            f"{name} has segments of {sorted(unknown)}, which engine {fact.engine} has never loaded",
        )
        for version, digest, _ in fact.chunks:
            published = self._published.get(version)
            self._check(
                digest == published,
                f"{name} has a segment of version {version} from {digest}, published is {published}",
            )

    def _check_row(self, name: str, fact: RequestFinished, row: SampleRow) -> None:
        num_masked = fact.num_tokens if row.num_masked is None else row.num_masked
        self._check(
            num_masked == fact.num_tokens,
            f"{name} has {fact.num_tokens} tokens, its sample says of {num_masked} whether they were drawn",
        )
        self._check(
            row.num_token_ids == fact.num_tokens == row.num_logprobs,
            f"{name} has {fact.num_tokens} tokens, its sample stores {row.num_token_ids:g} "
            f"and {row.num_logprobs:g} log-probs",
        )
        stored = (row.version, row.weight_digest)
        if len(fact.chunks) > 1 and self._breaks_c1:
            told = (fact.chunks[0].version, "+".join(c.digest for c in fact.chunks))
            segments = tuple((c.version, c.num_tokens) for c in fact.chunks)
        else:
            version = fact.chunks[0].version if fact.chunks else fact.version
            told, segments = (version, self._published.get(version, "")), ()
        self._check(
            row.segments == segments, f"{name} is stored with segments {row.segments}, not {segments}"
        )
        self._check(stored == told, f"{name} is stored as sampled from {stored}, not from {told}")
