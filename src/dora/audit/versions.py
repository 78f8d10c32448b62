"""C1: every trajectory was sampled from the weights of one version.

The check follows each version's digest from its publication into the engines, and each request from its
`Generate` action through its migrations to its last token. A request has one owner at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dora.core import actions, events
from dora.core.types import GroupId, RequestId
from dora.journal.reader import SampleKey, SampleRow


class VersionAudit:
    """Follows events and actions in their order; appends a sentence to `findings` for each that breaks C1."""

    def __init__(
        self, findings: list[str], samples: Mapping[SampleKey, SampleRow], *, breaks_c1: bool = False
    ) -> None:
        self.notes: list[str] = []  # about versions that were trained again and have other weights
        self.num_trajectories = 0
        self.num_segmented = 0  # trajectories that several versions sampled
        self.num_losses = 0  # of an engine, or of the whole run
        self.num_kept_tokens = self.num_lost_tokens = 0  # of the requests that lost their engine
        self.num_restarted = 0  # of these requests, without any token
        self._num_tokens: dict[RequestId, int] = {}  # of unfinished responses, as last reported
        self._num_kept: dict[RequestId, int] = {}  # of requests without an engine, until one reports tokens
        self._aborting: set[RequestId] = set()
        self.num_prefilled = 0  # tokens recomputed because their request migrated without KV
        self.versions: set[int] = set()  # that sampled trajectories
        self.held: dict[int, set[int]] = {}  # engine -> versions
        self.owners: dict[RequestId, int] = {}  # -> engine
        self.migrations: dict[RequestId, tuple[int, int]] = {}  # in progress: -> source, destination
        self._findings = findings
        self._breaks_c1 = breaks_c1
        self._samples = samples
        self._published: dict[int, str] = {}  # version -> digest
        self._latest_digest: dict[int, str] = {}  # version -> digest of its last training, which may redo it
        self._redone: set[int] = set()  # published before a resume and due again
        self._checkpoint = -1  # version of the last checkpoint resumed from: its digest may not change
        self._admitted: dict[GroupId, int] = {}  # -> version
        self._evaluated: set[int] = set()
        self._ever_held: dict[int, set[int]] = {}  # engine -> versions that it has loaded at any time
        self._lost: set[int] = set()  # engines without a replacement

    def observe(self, record: events.Event | actions.Action) -> None:
        match record:
            case actions.Admit(group, _, version, _):
                self._admitted[group] = version
            case actions.StartEvaluation(version):
                self._evaluated.add(version)
            case actions.Generate():
                self._on_generate(record)
            case actions.Migrate():
                self._on_migrate(record)
            case events.Migrated():
                self._on_migrated(record)
            case events.MigrationFailed(request, source, destination):
                self._end_migration(request, source, destination)
            case actions.Drop(engine, version):
                held = self.held.get(engine, set())
                self._check(
                    version in held, f"engine {engine} drops version {version}, it holds {sorted(held)}"
                )
                held.discard(version)
            case events.EngineJoined():
                self._on_joined(record)
            case events.EngineLost():
                self._on_lost(record)
            case events.EngineRemoved(engine):
                self._close_engine(engine)
                owned = [str(r) for r, e in sorted(self.owners.items()) if e == engine]
                self._check(not owned, f"engine {engine} was removed with the requests {', '.join(owned)}")
            case events.OutputsLost(requests):
                self._lose_kept(requests)
            case events.ProgressReported(engine, lengths):
                self._on_progress(engine, lengths)
            case events.RequestFailed(_, request):
                self.owners.pop(request, None)
                self._lose_kept([request])
                self._forget_tokens(request)
            case actions.Fail(group):
                for request in [request for request in self._num_kept if request.group == group]:
                    self._forget_tokens(request)
            case events.RequestsAborted(_, requests):
                for request in requests:
                    self.owners.pop(request, None)
                    self._aborting.discard(request)
            case actions.Abort(_, requests):  # they will not be generated again
                for request in requests:
                    self._forget_tokens(request)
                    self._aborting.add(request)
            case events.Published():
                self._on_published(record)
            case events.DigestReported():
                self._on_digest_reported(record)
            case events.TrainerReplaced(from_step):
                self._checkpoint = from_step
            case events.Resumed():
                self._on_resumed(record)
            case events.Loaded():
                self._on_loaded(record)
            case events.RequestFinished():
                self._on_finished(record)
            case _:
                pass

    def _check(self, condition: bool, sentence: str) -> None:
        if not condition:
            self._findings.append(f"C1: {sentence}")

    # --- engines

    def _on_joined(self, event: events.EngineJoined) -> None:
        """An engine number joins once, and replaces a lost engine at most once."""
        self._check(event.engine not in self.held, f"engine {event.engine} joined twice")
        self.held[event.engine] = set()
        if event.replaces is not None:
            is_lost = event.replaces in self._lost
            self._check(
                is_lost, f"engine {event.engine} replaces engine {event.replaces}, which was not lost"
            )
            self._lost.discard(event.replaces)

    def _on_lost(self, event: events.EngineLost) -> None:
        self.num_losses += 1
        kept_tokens = dict(event.kept_tokens)
        for request in [request for request, engine in self.owners.items() if engine == event.engine]:
            self._count_kept(request, kept_tokens.get(request, 0))
            self._aborting.discard(request)
        self._close_engine(event.engine)
        self._lost.add(event.engine)
        self.owners = {r: engine for r, engine in self.owners.items() if engine != event.engine}

    def _close_engine(self, engine: int) -> None:
        """The versions of a lost or removed engine are dropped; its migrations must have ended before."""
        self.held.pop(engine, None)
        self._ever_held.pop(engine, None)
        open_ = [str(r) for r, ends in sorted(self.migrations.items()) if engine in ends]
        self._check(not open_, f"engine {engine} left during the migrations of {', '.join(open_)}")

    # --- versions

    def _on_published(self, event: events.Published) -> None:
        """A version is published once; steps redone after `Resumed` may round differently."""
        version = event.version
        is_due = version not in self._published or version in self._redone
        self._check(is_due, f"version {version} is published twice")
        self._record_digest(event)
        self._redone.discard(version)
        if is_due:
            self._published[version] = event.digest

    def _on_digest_reported(self, event: events.DigestReported) -> None:
        """A replaced trainer has redone a version; engines keep the weights that were published first."""
        is_published = event.version in self._published
        self._check(
            is_published,
            f"a digest of version {event.version} is reported, but the version was not published",
        )
        self._record_digest(event)

    def _record_digest(self, event: events.Published | events.DigestReported) -> None:
        version, digest = event.version, event.digest
        before = self._latest_digest.get(version, digest)
        self._check(
            before == digest or version != self._checkpoint,
            f"version {version} was published as {before}, and its checkpoint has {digest}",
        )
        if before != digest:
            self.notes.append(
                f"version {version} was trained again and has the digest {digest}, before {before}; on the "
                "CPU of one machine this means that the optimizer state, the samples, the code, or trainer "
                "keys that change the rounding have changed"
            )
        self._latest_digest[version] = digest

    def _count_kept(self, request: RequestId, num_kept: int) -> None:
        """A request without an engine keeps so many tokens; those reported or counted beyond are lost."""
        if request in self._aborting:
            return
        num_before = self._num_kept.pop(request, 0)
        num_known = max(num_before, self._num_tokens.pop(request, 0))
        self.num_kept_tokens += num_kept - num_before
        self.num_lost_tokens += max(0, num_known - num_kept)
        self.num_restarted += num_known > 0 and not num_kept
        if num_kept:
            self._num_kept[request] = num_kept

    def _lose_kept(self, requests: Iterable[RequestId]) -> None:
        """Requests restart from their prompts; tokens that were counted as kept are lost."""
        for request in requests:
            if request in self._num_kept:
                self._count_kept(request, 0)

    def _on_progress(self, engine: int, lengths: Iterable[tuple[RequestId, int]]) -> None:
        for request, num_tokens in lengths:
            if self.owners.get(request) == engine and num_tokens:
                self._num_tokens[request] = num_tokens
                self._num_kept.pop(request, None)

    def _forget_tokens(self, request: RequestId) -> None:
        self._num_tokens.pop(request, None)
        self._num_kept.pop(request, None)

    def _on_resumed(self, event: events.Resumed) -> None:
        """All engines are new; the versions that were kept must be those that were published."""
        self.num_losses += 1
        kept_tokens = dict(event.kept_tokens)
        for request in {**self.owners, **self._num_kept, **kept_tokens}:
            self._count_kept(request, kept_tokens.get(request, 0))
        self._aborting.clear()
        self.held.clear()
        self._ever_held.clear()
        self._lost.clear()
        self.owners.clear()
        self.migrations.clear()
        self._checkpoint = event.from_step
        self._redone = {version for version in self._published if version >= event.from_step}
        for version, digest in event.kept_versions:
            published = self._published.get(version)
            self._check(
                digest == published,
                f"version {version} is kept as {digest}, expected the published {published}",
            )

    def _on_loaded(self, event: events.Loaded) -> None:
        published = self._published.get(event.version)
        self._check(
            event.digest == published,
            f"engine {event.engine} loaded {event.digest} as version {event.version}, "
            f"expected the published {published}",
        )
        self.held.setdefault(event.engine, set()).add(event.version)
        self._ever_held.setdefault(event.engine, set()).add(event.version)

    # --- requests

    def _on_generate(self, action: actions.Generate) -> None:
        engine, version = action.engine, action.version
        held = self.held.get(engine, set())
        self._check(
            version in held, f"engine {engine} generates on version {version}, it holds {sorted(held)}"
        )
        for request in action.requests:
            self._check_version(request, version, "is generated")
            owner = self.owners.get(request)
            self._check(
                owner is None,
                f"request {request} was assigned to engine {engine}, its owner is engine {owner}",
            )
            self.owners[request] = engine

    def _on_migrate(self, action: actions.Migrate) -> None:
        request, source = action.request, action.source
        owner = self.owners.get(request)
        self._check(
            owner == source, f"request {request} migrates from engine {source}, its owner is engine {owner}"
        )
        self._check(request not in self.migrations, f"request {request} is in two migrations at once")
        self._check_version(request, action.version, "migrates")
        self.migrations[request] = (source, action.destination)

    def _check_version(self, request: RequestId, version: int, verb: str) -> None:
        """A request has the version of its group; without C1, also a newer one."""
        admitted = self._version_of(request.group)
        may_update = self._breaks_c1 and not request.is_held_out
        is_kept = admitted is not None and (version >= admitted if may_update else version == admitted)
        self._check(is_kept, f"request {request} {verb} on version {version}, its group has {admitted}")

    def _on_migrated(self, event: events.Migrated) -> None:
        """The owner changes and the version stays, so the destination must hold the version."""
        name, version = f"request {event.request}", self._version_of(event.request.group)
        self._end_migration(event.request, event.source, event.destination)
        self._num_tokens[event.request] = event.num_tokens
        self._num_kept.pop(event.request, None)
        owner = self.owners.get(event.request)
        self._check(
            owner == event.source, f"{name} migrated from engine {event.source}, its owner was engine {owner}"
        )
        held = self.held.get(event.destination, set())
        self._check(
            version in held,
            f"{name} of version {version} migrated to engine {event.destination}, which holds {sorted(held)}",
        )
        self.owners[event.request] = event.destination
        self.num_prefilled += event.num_prefilled

    def _end_migration(self, request: RequestId, source: int, destination: int) -> None:
        expected = self.migrations.pop(request, None)
        self._check(
            expected == (source, destination),
            f"request {request} ended a migration from {source} to {destination}, expected {expected}",
        )

    def _on_finished(self, event: events.RequestFinished) -> None:
        self._forget_tokens(event.request)
        self.num_trajectories += 1
        self.versions.add(event.version)
        name, admitted = f"request {event.request}", self._version_of(event.request.group)
        if self._breaks_c1 and not event.request.is_held_out:
            self._check_segments(name, event, admitted)
        else:
            self._check_chunks(name, event, admitted)
        owner = self.owners.pop(event.request, None)
        self._check(
            event.engine == owner, f"{name} finished on engine {event.engine}, its owner was engine {owner}"
        )
        held = self.held.get(event.engine, set())
        self._check(
            event.version in held,
            f"{name} finished on version {event.version}, engine {event.engine} holds {sorted(held)}",
        )
        num_tokens = sum(c.num_tokens for c in event.chunks)
        self._check(
            num_tokens == event.num_tokens,
            f"{name} has {event.num_tokens} tokens, its chunks have {num_tokens}",
        )
        row = self._samples.get((str(event.request.group), event.request.sibling))
        if row is not None:  # a missing row is a finding against C2
            self._check_row(name, event, row)

    def _version_of(self, group: GroupId) -> int | None:
        """The version at which a group was admitted, or whose evaluation has the held-out prompt."""
        if not group.is_held_out:
            return self._admitted.get(group)
        evaluated = -1 - group.epoch
        return evaluated if evaluated in self._evaluated else None

    def _check_chunks(self, name: str, event: events.RequestFinished, admitted: int | None) -> None:
        self._check(
            event.version == admitted, f"{name} finished on version {event.version}, its group has {admitted}"
        )
        sources = [(c.version, c.digest) for c in event.chunks]
        published = (event.version, self._published.get(event.version))
        self._check(sources == [published], f"{name} was sampled from {sources}, not from {published} alone")

    def _check_segments(self, name: str, event: events.RequestFinished, admitted: int | None) -> None:
        """Without C1 the versions of the segments must still increase and have been published and loaded."""
        self.num_segmented += len(event.chunks) > 1
        versions = [c.version for c in event.chunks]
        self.versions.update(versions)
        is_increasing = versions == sorted({*versions}) and versions[-1:] <= [event.version]
        self._check(
            is_increasing and admitted is not None and versions[:1] >= [admitted],
            f"{name} of a group of version {admitted} has segments of {versions}",
        )
        unknown = {*versions} - self._ever_held.get(event.engine, set())
        self._check(
            not unknown,
            f"{name} has segments of {sorted(unknown)}, which engine {event.engine} has never loaded",
        )
        for version, digest, _ in event.chunks:
            published = self._published.get(version)
            self._check(
                digest == published,
                f"{name} has a segment of version {version} from {digest}, "
                f"expected the published {published}",
            )

    def _check_row(self, name: str, event: events.RequestFinished, row: SampleRow) -> None:
        mask_length = event.num_tokens if row.loss_mask_length is None else row.loss_mask_length
        self._check(
            mask_length == event.num_tokens,
            f"{name} has {event.num_tokens} tokens, its sample stores a loss mask of {mask_length}",
        )
        self._check(
            row.num_token_ids == event.num_tokens == row.num_logprobs,
            f"{name} has {event.num_tokens} tokens, its sample stores {row.num_token_ids:g} "
            f"and {row.num_logprobs:g} log-probs",
        )
        stored = (row.version, row.weight_digest)
        if len(event.chunks) > 1 and self._breaks_c1:
            expected = (event.chunks[0].version, "+".join(c.digest for c in event.chunks))
            segments = tuple((c.version, c.num_tokens) for c in event.chunks)
        else:
            version = event.chunks[0].version if event.chunks else event.version
            expected, segments = (version, self._published.get(version, "")), ()
        self._check(
            row.segments == segments, f"{name} is stored with segments {row.segments}, not {segments}"
        )
        self._check(stored == expected, f"{name} is stored as sampled from {stored}, not from {expected}")
