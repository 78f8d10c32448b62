"""An engine for multi-turn episodes: the model's turns and the observations between them are one sequence.

Observations are prefilled like a part of a prompt, at most `prefill_budget` tokens per step, so that other
rows keep decoding. Sampling depends only on the position of a token, so the same observations lead to the
same tokens whenever they arrive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from dora.core.types import RequestId
from dora.engine.block_manager import num_blocks_for
from dora.engine.engine import Engine
from dora.engine.messages import TurnFinished
from dora.engine.request import Completion, EngineError, PromptKey, Request, Sequence
from dora.engine.scheduler import PrefillChunk, SchedulerOutput
from dora.model.config import ModelConfig


class EpisodeEngine(Engine):
    """An Engine that accepts requests with `max_turn_tokens`; `settings` are those of Engine.

    At the end of a turn such a request is paused until `continue_episode` or `end_episode`.
    """

    def __init__(self, config: ModelConfig, *, prefill_budget: int = 512, **settings: Any) -> None:
        super().__init__(config, prefill_budget=prefill_budget, **settings)
        self._prefill_budget = prefill_budget
        self._observations: dict[RequestId, list[int]] = {}  # left to append; empty: the episode has ended
        self._finished_turns: list[TurnFinished] = []

    @property
    def can_step(self) -> bool:
        """See Engine; also true if an observation or the end of an episode has arrived."""
        has_observation = not self._scheduler.running.keys().isdisjoint(self._observations)
        return super().can_step or (has_observation and not self._is_paused)

    def pop_finished_turns(self) -> list[TurnFinished]:
        """The turns that have finished since the last call."""
        finished, self._finished_turns = self._finished_turns, []
        return finished

    def continue_episode(self, request_id: RequestId, token_ids: Collection[int]) -> None:
        """Append an observation, after which the request generates its next turn.

        Raises EngineError if the request does not wait for an observation here, or the observation is empty,
        too long or has unknown token ids.
        """
        request = self._request_between_turns(request_id)
        num_left = request.sampling.max_tokens - self.progress()[request_id]
        if not 1 <= len(token_ids) < num_left:
            raise EngineError(
                f"request {request_id}: an observation has {len(token_ids)} tokens; it needs from 1 to "
                f"{num_left - 1}, because {num_left} of max_tokens are left for it and another turn; end the "
                "episode or raise max_tokens"
            )
        if not 0 <= min(token_ids) <= max(token_ids) < self._config.vocab_size:
            last = self._config.vocab_size - 1
            raise EngineError(
                f"request {request_id}: an observation has token ids outside 0..{last}; "
                "use the model's own tokenizer"
            )
        self._set_observation(request_id, token_ids)

    def end_episode(self, request_id: RequestId) -> None:
        """Complete the request with the turns so far, in a later step.

        Raises EngineError if the request does not wait for an observation here.
        """
        self._request_between_turns(request_id)
        self._set_observation(request_id, ())

    def abort(self, ids: Iterable[RequestId]) -> dict[RequestId, int]:
        lost = super().abort(ids)
        for request_id in lost:
            self._observations.pop(request_id, None)
        return lost

    def step(self) -> list[Completion]:
        """See Engine; also returns the completions of episodes that have ended."""
        return [] if self._is_paused else self._collect_ended() + super().step()

    def _request_between_turns(self, request_id: RequestId) -> Request:
        request = self._scheduler.request(request_id)
        if request is None or self._scheduler.between_turns.get(request_id) is not False:
            raise EngineError(f"request {request_id} does not wait for an observation; nothing was appended")
        return request

    def _set_observation(self, request_id: RequestId, token_ids: Collection[int]) -> None:
        self._observations[request_id] = [*token_ids]
        self._scheduler.between_turns[request_id] = True

    def _collect_ended(self) -> list[Completion]:
        """The completions of ended episodes that have a row."""
        running = self._scheduler.running
        ended = [running[i] for i, tokens in self._observations.items() if not tokens and i in running]
        for sequence in ended:
            del self._observations[sequence.request.id]
        return super()._collect(ended)

    def _collect(self, done: list[Sequence]) -> list[Completion]:
        """See Engine; an episode whose turn has finished keeps its row."""
        episodes = [sequence for sequence in done if sequence.request.sampling.max_turn_tokens]
        for sequence in episodes:
            request_id = sequence.request.id
            num_left = sequence.request.sampling.max_tokens - self._batch.num_output_tokens(sequence)
            turn = self._batch.turn_token_ids(sequence.row).tolist()
            reason = self._batch.finish_reason(sequence)
            self._finished_turns.append(TurnFinished(request_id, turn, reason, num_left))
            self._scheduler.between_turns[request_id] = False
        if episodes:
            self._update_batch()
        return super()._collect([sequence for sequence in done if sequence not in episodes])

    def _observation_chunks(self) -> Iterator[tuple[Sequence, list[int], int]]:
        """Observation tokens for the next step, first come, first served, and the blocks that they miss."""
        budget = self._prefill_budget
        for request_id, tokens in self._observations.items():
            sequence = self._scheduler.running.get(request_id)
            if sequence is not None and (chunk := tokens[:budget]):
                budget -= len(chunk)
                # One more for the next decode input.
                num_tokens = self._batch.num_computed_tokens(sequence) + len(chunk) + 1
                yield sequence, chunk, num_blocks_for(num_tokens) - len(sequence.block_table)

    def _missing_blocks(self) -> dict[Sequence, int]:
        for_observations = {sequence: num for sequence, _, num in self._observation_chunks() if num > 0}
        return super()._missing_blocks() | for_observations

    def _schedule(self) -> SchedulerOutput:
        """See Engine; observations are prefilled with the prompts."""
        scheduled = super()._schedule()
        for sequence, chunk, num_missing in list(self._observation_chunks()):
            if num_missing <= 0:
                scheduled.prefills.append(self._append_observation(sequence, chunk))
        return scheduled

    def _append_observation(self, sequence: Sequence, chunk: list[int]) -> PrefillChunk:
        """Append tokens to the output; returns what to prefill. The last token is a decode input."""
        request, start = sequence.request, self._batch.num_computed_tokens(sequence)
        weights_id = self._slot_weights_ids[self._loaded[request.version].slot]
        self._batch.append_observation(sequence, chunk, int(weights_id))
        del self._observations[request.id][: len(chunk)]
        if not self._observations[request.id]:
            del self._observations[request.id], self._scheduler.between_turns[request.id]
        tokens = (*request.prompt_ids, *self._batch.partial_output(sequence).token_ids.tolist())
        key = PromptKey(request.group, request.version, tokens)
        return PrefillChunk(key, sequence.block_table, start, start + len(chunk))

    def _prefill(self, scheduled: SchedulerOutput) -> None:
        """See Engine; sequences with a complete observation decode from now on."""
        super()._prefill(scheduled)
        if scheduled.prefills:
            self._update_batch()
