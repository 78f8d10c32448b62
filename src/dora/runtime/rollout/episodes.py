"""Multi-turn episodes in the driver, between the engines, which generate turns, and an `EpisodeRunner`.

An environment or an agent of the service replies to the turns; an `EpisodeRunner` connects it. For the
orchestrator an episode is an unfinished request. While it waits for the runner it is on the engine that
generated its last turn, or on none before its prompt is known.

If its engine is lost, or if it fails and may be retried, the orchestrator requests it again. After a failure
it restarts as another attempt. After a loss it continues: the runner is not asked again, and the other engine
gets all finished turns and observations, which the driver keeps (`PartialOutputs`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dora.core.actions import Abort, Generate, Migrate
from dora.core.events import (
    EngineLost,
    Event,
    Migrated,
    MigrationFailed,
    OutputsLost,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
)
from dora.core.types import Branch, GroupId, RequestId
from dora.engine.decode_batch import PartialOutput
from dora.engine.messages import TurnFinished
from dora.engine.request import Completion, Request
from dora.envs.episode import (
    EpisodeBranched,
    EpisodeEnded,
    EpisodeFailed,
    EpisodeId,
    EpisodeObservation,
    EpisodeReply,
    EpisodeStarted,
    PolicyTurn,
)
from dora.errors import RunError
from dora.runtime.process import messages as m
from dora.runtime.process.supervisor import DriverClock
from dora.runtime.rollout.engine_pool import EnginePool
from dora.runtime.rollout.partial_outputs import SavedEpisode
from dora.runtime.run_setup import RunSetup
from dora.runtime.sample_book import SampleBook
from dora.trainer.advantage import invalid_rewards_reason


class EpisodeRunner(Protocol):
    """The environments or agents of all episodes of a run. The driver calls its methods, which do not block.

    It puts its replies into the driver's messages as `(None, reply)`, from any thread.
    """

    def start(self, episode: EpisodeId, version: int, saved: SavedEpisode | None = None) -> None:
        """Start an episode, or restore a saved one; the reply is `EpisodeStarted` or `EpisodeFailed`."""

    def on_turn(self, turn: PolicyTurn) -> None:
        """Handle a turn; the reply is `EpisodeObservation`, `EpisodeEnded` or `EpisodeFailed`."""

    def release(self, episode: EpisodeId) -> None:
        """Forget an episode: it has finished or failed, its group has, or it restarts after a loss."""

    def check_deadlines(self) -> None:
        """Fail episodes that have timed out. The driver calls this a few times a second."""


class _Part(NamedTuple):
    """The tokens of one request of an episode with branches, and the branch that comes after it."""

    completion: Completion
    next: EpisodeBranched


@dataclass(eq=False)
class _Episode:
    """An unfinished episode. `engine` is where it was placed, or the engine that generated its last turn."""

    id: EpisodeId
    version: int
    engine: int
    request: Request | None = None  # None: its prompt is not known yet
    num_turns: int = 0
    num_tokens: int = 0  # of the request's finished turns and their observations
    max_turn_tokens: int | None = None
    num_left: int = 0  # tokens, after the last turn
    branch: EpisodeBranched | None = None  # until its request is submitted
    parts: list[_Part] = field(default_factory=list)  # the tree before the current request
    is_awaiting_reply: bool = True  # of the runner
    is_ending: bool = False  # the request ends with its last turn
    failure: str = ""  # why it fails, possibly after the turn in progress
    lost_at_s: float | None = None  # since when it has no engine


class Episodes:
    """Executes actions about requests. With a `runner` each request is an episode, else it has one turn."""

    def __init__(
        self,
        setup: RunSetup,
        runner: EpisodeRunner | None,
        engine_pool: EnginePool,
        events: deque[Event],
        sample_book: SampleBook,
        clock: DriverClock,
    ) -> None:
        self._setup, self._engine_pool, self._events, self._clock = setup, engine_pool, events, clock
        self._sample_book, self._partial_outputs = sample_book, sample_book.partial_outputs
        self.runner = runner
        self._episodes: dict[RequestId, _Episode] = {}
        self._aborted_while_migrating: set[RequestId] = set()  # until they are aborted on their new engine
        self._attempts = count()

    # actions of the orchestrator

    def generate(self, action: Generate) -> None:
        """Start requests from their prompts, or continue them after the loss of their engine."""
        if self.runner is None:
            requests = self._setup.requests(action.requests, action.version)
            self._submit(action.engine, requests, action.version)
            return
        for request in action.requests:
            known = self._episodes.get(request)
            if known is not None and self._can_continue(known, action):
                self._continue(known, action.engine)
            else:
                self._start(request, action, self.runner)

    def abort(self, action: Abort) -> None:
        """Abort requests whose groups have failed. Those without a prompt are on no engine and end at once.

        If such a request has migrated, the orchestrator aborts it on its new engine after `Migrated`.
        """
        aborted = [request for request in action.requests if request in self._aborted_while_migrating]
        self._aborted_while_migrating.difference_update(aborted)
        for episode in map(self._release, action.requests):
            if episode is not None and episode.request is None:
                if episode.engine == action.engine:
                    aborted.append(episode.id.request)
                else:
                    self._aborted_while_migrating.add(episode.id.request)
        if self._engine_pool.send(action.engine, m.AbortRequests(action.requests)) and aborted:
            self._events.append(RequestsAborted(action.engine, tuple(aborted), 0))

    def migrate(self, action: Migrate) -> None:
        """Migrate a request. An episode that waits for the runner migrates when it continues."""
        episode, engines = self._episodes.get(action.request), (action.source, action.destination)
        if self.runner is None:
            (request,) = self._setup.requests([action.request], action.version)
            self._engine_pool.migrate(action, request)
        elif episode is None:
            self._events.append(MigrationFailed(action.request, *engines, "it has finished on its source"))
        elif episode.request is not None:
            self._engine_pool.migrate(action, episode.request)
        elif self._engine_pool.workers.keys() >= {*engines}:  # without a prompt there is nothing to copy
            episode.engine = action.destination
            self._events.append(Migrated(action.request, *engines, 0, 0, 0.0, 0.0))
        else:
            self._events.appendleft(MigrationFailed(action.request, *engines, "an engine is lost"))

    def discard_group(self, group: GroupId) -> None:
        """Release the episodes of a failed group."""
        self._release_all([request for request in self._episodes if request.group == group])

    def on_event(self, event: Event) -> None:
        """Follow an event that the orchestrator is about to handle.

        Episodes of a lost engine wait for another one, except those that have failed.
        """
        match event:
            case Migrated(request, _, destination) if (episode := self._episodes.get(request)) is not None:
                episode.engine = destination
            case RequestFinished(_, request) | RequestFailed(_, request):
                self._partial_outputs.forget(request)
            case RequestsAborted(_, requests):
                for request in requests:
                    self._partial_outputs.forget(request)
                    self._sample_book.failed_episodes.discard(request)
            case EngineLost(engine):
                lost = [episode for episode in self._episodes.values() if episode.engine == engine]
                for episode in lost:
                    episode.lost_at_s = self._clock.now_s
                self._restart_all([episode for episode in lost if episode.failure])

    # messages of engines and of the runner

    def on_engine_message(self, engine: int, message: Any) -> Any:
        """Forward turns to the runner, and release requests that have finished or were rejected.

        Returns the message for the driver, in which an episode with branches is one completion.
        """
        if isinstance(message, m.OutputsReported):
            self._partial_outputs.add(message.parts)
            lengths = self._sample_book.progress.setdefault(engine, {})
            lengths |= {part.request: part.start + len(part.token_ids) for part in message.parts}
        if isinstance(message, m.RequestsCompleted):
            joined = [self._on_completion(engine, each) for each in message.completions]
            message = replace(message, completions=[each for each in joined if each is not None])
        match message:
            case m.TurnsCompleted(turns):
                for turn in turns:
                    self._on_turn(engine, turn)
            case m.RequestsCompleted(completions):
                self._release_all([completion.id for completion in completions])
            case m.RequestsRejected(reasons):
                self._release_all(reasons)
        return message

    def on_message(self, message: Any) -> None:
        """Handle a reply of the runner; other messages are ignored."""
        if isinstance(message, EpisodeReply):
            episode = self._episodes.get(message.episode.request)
            if episode is not None and episode.id == message.episode:
                self._on_reply(episode, message)

    def check_deadlines(self) -> None:
        for episode in [each for each in self._episodes.values() if each.branch and each.request is None]:
            self._submit_branch(episode)
        if self._setup.config.service.agents:
            self._restart_overdue()
        if self.runner is not None:
            self.runner.check_deadlines()

    def _start(self, request: RequestId, action: Generate, runner: EpisodeRunner) -> None:
        """Start another attempt at an episode; after a resume it continues if it was saved."""
        episode = _Episode(EpisodeId(request, next(self._attempts)), action.version, action.engine)
        saved = None if request in self._episodes else self._partial_outputs.saved(request)
        if saved is not None:
            episode.num_turns, episode.num_tokens = saved.num_turns, saved.num_tokens
        if saved is None or not self._can_continue(episode, action):
            self._restart(request)  # an earlier attempt
            saved, episode.num_turns, episode.num_tokens = None, 0, 0
        self._sample_book.forget_episode(request)
        self._sample_book.failed_episodes.discard(request)
        self._episodes[request] = episode
        runner.start(episode.id, action.version, saved)

    def _on_reply(self, episode: _Episode, reply: EpisodeReply) -> None:
        """A reply that the episode does not await is ignored, except for a failure."""
        request, is_awaited = episode.id.request, episode.is_awaiting_reply
        match reply:
            case EpisodeFailed(_, reason) if is_awaited or episode.lost_at_s is not None:
                self._fail(episode, reason)
            case EpisodeFailed(_, reason):
                episode.failure = reason
            case EpisodeStarted(_, prompt_ids, max_turn_tokens) if is_awaited and episode.request is None:
                episode.max_turn_tokens = max_turn_tokens
                episode.request = self._make_request(episode, prompt_ids, max_turn_tokens)
                self._save(episode, reply.state)
                episode.is_awaiting_reply = False
                self._submit(episode.engine, [episode.request], episode.version)
            case EpisodeObservation(_, turn, token_ids) if is_awaited and turn == episode.num_turns - 1:
                self._partial_outputs.add_observation(request, episode.num_tokens, token_ids)
                episode.num_tokens += len(token_ids)
                self._save(episode, reply.state)
                self._send(episode, m.ContinueEpisode(request, token_ids))
            case EpisodeBranched(_, turn) if is_awaited and turn == episode.num_turns - 1:
                episode.branch, episode.is_ending = reply, True
                self._send(episode, m.EndEpisode(request))
            case EpisodeEnded(_, turn) if is_awaited and turn == episode.num_turns - 1:
                if reason := invalid_rewards_reason(reply.turn_rewards):
                    self._fail(episode, f"turn {reason}")
                    return
                self._sample_book.end_episode(reply)
                episode.is_ending = True
                self._send(episode, m.EndEpisode(request))

    def _send(self, episode: _Episode, message: object) -> None:
        """Send the reply to the engine. If that is lost, the next engine gets it in `_continue`."""
        episode.is_awaiting_reply = False
        self._engine_pool.send(episode.engine, message)

    def _can_continue(self, episode: _Episode, action: Generate) -> bool:
        """Whether the engine can continue an episode that the orchestrator requests again: without finished
        turns, or with these from the weights of the same version.
        """
        if episode.version != action.version or not episode.num_tokens:
            return episode.version == action.version
        request = episode.id.request
        output = self._continuable_outputs(action.engine, [request], action.version).get(request)
        return output is not None and len(output.token_ids) >= episode.num_tokens

    def _continuable_outputs(
        self, engine: int, requests: Iterable[RequestId], version: int
    ) -> dict[RequestId, PartialOutput]:
        """What is kept of outputs of the version's weights, if the engine continues outputs."""
        if not self._engine_pool.continues_outputs(engine):
            return {}
        weights, kept = (version, self._engine_pool.digests.get(version)), self._partial_outputs.of(requests)
        return {request: output for request, output in kept.items() if output.chunks[0][:2] == weights}

    def _submit(self, engine: int, requests: Sequence[Request], version: int) -> None:
        """Submit requests with what is kept of their outputs; what the engine cannot continue is lost."""
        ids = [request.id for request in requests]
        outputs = self._continuable_outputs(engine, ids, version)
        if self._engine_pool.send(engine, m.SubmitRequests([*requests], outputs)):
            kept = self._partial_outputs.lengths(ids)
            self._lose_outputs(request for request, _ in kept if request not in outputs)

    def _lose_outputs(self, requests: Iterable[RequestId]) -> None:
        """Drop the kept outputs of requests that restart from their prompts, and report the loss."""
        if lost := tuple(request for request in requests if self._partial_outputs.restart(request)):
            self._events.append(OutputsLost(lost))

    def _continue(self, episode: _Episode, engine: int) -> None:
        """Submit an episode to another engine, as it was on the lost one."""
        episode.engine, episode.lost_at_s = engine, None
        if episode.request is None:  # its prompt is not known yet, or it continues with a branch
            self._submit_branch(episode)
            return
        self._submit(engine, [episode.request], episode.version)
        if episode.is_ending:
            self._engine_pool.send(engine, m.EndEpisode(episode.id.request))

    def _save(self, episode: _Episode, state: bytes) -> None:
        """Keep an episode for a resume of the run, if its environment can be restored."""
        if state and episode.request is not None:
            prompt_ids = episode.request.prompt_ids
            saved = SavedEpisode(prompt_ids, episode.num_turns, episode.num_tokens, state)
            self._partial_outputs.save(episode.id.request, saved)

    def _make_request(
        self, episode: _Episode, prompt_ids: tuple[int, ...], max_turn_tokens: int | None
    ) -> Request:
        (request,) = self._setup.requests([episode.id.request], episode.version)
        sampling = request.sampling
        if max_turn_tokens is not None:
            limit = min(max_turn_tokens, sampling.max_turn_tokens)
            sampling = replace(sampling, max_turn_tokens=limit)
        return replace(request, prompt_ids=prompt_ids, sampling=sampling)

    def _on_turn(self, engine: int, finished: TurnFinished) -> None:
        episode = self._episodes.get(finished.request_id)
        if episode is None:
            return  # its group has failed, and the engine is about to receive an abort
        episode.engine, episode.is_awaiting_reply = engine, True
        turn = PolicyTurn(
            episode.id, episode.num_turns, finished.token_ids, finished.finish_reason, finished.num_left,
            finished.logprobs,
        )  # fmt: skip
        episode.num_turns, episode.num_left = episode.num_turns + 1, finished.num_left
        if episode.request is not None:
            episode.num_tokens = episode.request.sampling.max_tokens - finished.num_left
            self._sample_book.progress.setdefault(engine, {})[finished.request_id] = episode.num_tokens
        if episode.failure:
            self._fail(episode, episode.failure)
        elif self.runner is not None:
            self.runner.on_turn(turn)

    def _on_completion(self, engine: int, completion: Completion) -> Completion | None:
        """The completion of a whole episode; None if the episode continues with a branch."""
        episode = self._episodes.get(completion.id)
        if episode is None:
            return completion
        if episode.branch is not None:
            episode.parts.append(_Part(completion, episode.branch))
            episode.request, episode.engine = None, engine
            self._submit_branch(episode)
            return None
        return _join(episode.parts, completion) if episode.parts else completion

    def _submit_branch(self, episode: _Episode) -> None:
        """Continue with a branch as a new request of the same name, where the last turn was.

        The core may still migrate the old request; the branch waits until that migration has failed.
        """
        branch, request = episode.branch, episode.id.request
        if branch is None or self._engine_pool.is_migrating(request):
            return
        new = self._make_request(episode, branch.prompt_ids, episode.max_turn_tokens)
        digest = blake2b(f"{new.seed}/{len(episode.parts)}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little", signed=True)
        max_tokens = episode.num_left - branch.num_new
        episode.request = replace(new, seed=seed, sampling=replace(new.sampling, max_tokens=max_tokens))
        episode.branch, episode.is_ending, episode.num_tokens = None, False, 0
        self._partial_outputs.forget(request)  # of the request before
        self._send(episode, m.SubmitRequests([episode.request]))

    def _fail(self, episode: _Episode, reason: str) -> None:
        """Fail the request on its engine; if that is lost, the episode restarts instead."""
        request, episode.failure = episode.id.request, reason
        if episode.lost_at_s is not None:
            self._restart(request)
            return
        if episode.engine not in self._engine_pool.workers:
            return  # until `EngineLost`, which restarts it
        self._partial_outputs.restart(request)  # `RequestFailed` will say that nothing is kept
        self._sample_book.failed_episodes.add(request)
        if episode.request is not None:
            self._send(episode, m.FailRequest(request, reason))
        else:
            self._release(request)
            self._events.append(self._sample_book.fail_request(episode.engine, request, reason))

    def _release_all(self, requests: Iterable[RequestId]) -> None:
        for request in requests:
            self._release(request)

    def _restart_all(self, episodes: Iterable[_Episode]) -> None:
        """Forget attempts at episodes, which restart once an engine has room for them."""
        for episode in episodes:
            self._restart(episode.id.request)

    def _restart_overdue(self) -> None:
        """Restart episodes that have had no engine for as long as a session without a request may last.

        Their sessions end, because an agent may have to open another one before an engine has room.
        """
        lost_s = self._clock.now_s - self._setup.config.service.session_timeout_s
        each_lost = [(each.lost_at_s, each) for each in self._episodes.values()]
        self._restart_all([each for at_s, each in each_lost if at_s is not None and at_s < lost_s])

    def _restart(self, request: RequestId) -> None:
        self._lose_outputs([request])
        self._release(request)

    def _release(self, request: RequestId) -> _Episode | None:
        """Forget an episode, here and in the runner."""
        self._partial_outputs.forget(request)
        episode = self._episodes.pop(request, None)
        if episode is not None and self.runner is not None:
            self.runner.release(episode.id)
        return episode


def _join(parts: Sequence[_Part], last: Completion) -> Completion:
    """One completion of all requests of an episode, whose tokens are an append-only tree.

    The new tokens before a branch have log-probs of NaN, as observations do.
    """
    completions = [*(part.completion for part in parts), last]
    new = [[], *([*part.next.prompt_ids[len(part.next.prompt_ids) - part.next.num_new :]] for part in parts)]
    first, num_tokens = completions[0], 0
    branches = []
    for k, completion in enumerate(completions):
        if k:
            branches.append(Branch(len(first.prompt_ids) + num_tokens, parts[k - 1].next.parent))
        num_tokens += len(new[k]) + len(completion.token_ids)
    sources = {(chunk.version, chunk.digest) for each in completions for chunk in each.chunks}
    if len(sources) != 1:
        raise RunError(f"request {last.id}: its branches have the versions {sorted(sources)}; expected one")
    observed = [np.full(len(ids), np.nan, np.float32) for ids in new]

    def column(name: str) -> NDArray[np.float32]:
        pairs = zip(observed, (getattr(each, name) for each in completions), strict=True)
        return np.concatenate([x for nans, values in pairs for x in ((nans, values) if len(values) else ())])

    return replace(
        last,
        prompt_ids=first.prompt_ids,
        token_ids=np.concatenate([x for k, c in enumerate(completions) for x in (new[k], c.token_ids)]),
        logprobs=column("logprobs") if len(last.logprobs) else last.logprobs,
        unfiltered_logprobs=column("unfiltered_logprobs"),
        raw_logprobs=column("raw_logprobs") if len(last.raw_logprobs) else last.raw_logprobs,
        chunks=(last.chunks[0]._replace(num_tokens=num_tokens),),
        branches=tuple(branches),
    )
