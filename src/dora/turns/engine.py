"""An engine whose answers may be episodes: turns of the model, and what it reads in between.

What is read is computed like a part of a prompt, at most `prefill_budget` tokens in a step, so that others
decode on meanwhile. A token's random number depends on its place alone: so whenever the other side answers,
the same words lead to the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dora.core.records import RequestId
from dora.engine.blocks import num_blocks_for
from dora.engine.engine import Engine
from dora.engine.plan import Plan, Prefill
from dora.engine.sequence import Completion, EngineError, PromptKey, Request
from dora.engine.sequence import Sequence as Seated
from dora.model.config import ModelConfig
from dora.turns.words import TurnEnded


class TurnTakingEngine(Engine):
    """An Engine that knows requests whose sampling has `max_turn_tokens`; see there for `settings`.

    At the end of a turn such a request waits for `observe` or `finish`, and stands still.
    """

    def __init__(self, config: ModelConfig, *, prefill_budget: int = 512, **settings: Any) -> None:
        super().__init__(config, prefill_budget=prefill_budget, **settings)
        self._prefill_budget = prefill_budget
        self._unread: dict[RequestId, list[int]] = {}  # of answered turns; nothing: the answer is over
        self._ended: list[TurnEnded] = []

    @property
    def can_step(self) -> bool:
        """See Engine; also where turns have been answered."""
        has_news = not self._scheduler.running.keys().isdisjoint(self._unread)
        return super().can_step or (has_news and not self._is_paused)

    def take_turns(self) -> list[TurnEnded]:
        """The turns that have ended since this was last asked."""
        ended, self._ended = self._ended, []
        return ended

    def observe(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        """What the other side says to a turn: it is read, and the request writes its next turn.

        Raises EngineError if the request does not wait for an answer here, or cannot have this one.
        """
        request = self._waiting(request_id)
        num_left = request.sampling.max_tokens - self.progress()[request_id]
        if not 1 <= len(token_ids) < num_left:
            raise EngineError(
                f"{len(token_ids)} observed tokens: at least 1 is needed, and {num_left} are left of "
                "max_tokens for these and another turn; end the episode, or raise max_tokens"
            )
        if not 0 <= min(token_ids) <= max(token_ids) < self._config.vocab_size:
            last = self._config.vocab_size - 1
            raise EngineError(f"observed token ids are outside 0..{last}; use the model's own tokenizer")
        self._answer(request_id, token_ids)

    def finish(self, request_id: RequestId) -> None:
        """The answer ends with its last turn, and a step gives it back. Raises EngineError as `observe`."""
        self._waiting(request_id)
        self._answer(request_id, ())

    def abort(self, ids: Iterable[RequestId]) -> dict[RequestId, int]:
        """See Engine."""
        thrown_away = super().abort(ids)
        for request_id in thrown_away:
            self._unread.pop(request_id, None)
        return thrown_away

    def step(self) -> list[Completion]:
        """See Engine; episodes that are over are among the answers."""
        return [] if self._is_paused else self._take_leave() + super().step()

    def _waiting(self, request_id: RequestId) -> Request:
        """A request whose turn has not been answered."""
        request = self._scheduler.request(request_id)
        if request is None or self._scheduler.still.get(request_id) is not False:
            raise EngineError(f"request {request_id} does not wait for an answer; nothing was read")
        return request

    def _answer(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        self._unread[request_id] = [*token_ids]
        self._scheduler.still[request_id] = True

    def _take_leave(self) -> list[Completion]:
        """The answers of episodes that are over, once they are in a row."""
        running = self._scheduler.running
        over = [running[i] for i, unread in self._unread.items() if not unread and i in running]
        for sequence in over:
            del self._unread[sequence.request.id]
        return super()._collect(over)

    def _collect(self, done: list[Seated]) -> list[Completion]:
        """See Engine; those whose turn is over stay where they are."""
        episodes = [sequence for sequence in done if sequence.request.sampling.max_turn_tokens]
        for sequence in episodes:
            request_id, row = sequence.request.id, sequence.row
            num_left = sequence.request.sampling.max_tokens - self._rows.num_tokens(sequence)
            reason, turn = self._rows.finish_reason(sequence), self._rows.turn(row).tolist()
            self._ended.append(TurnEnded(request_id, turn, reason, num_left))
            self._scheduler.still[request_id] = False
        if episodes:
            self._arrange()
        return super()._collect([sequence for sequence in done if sequence not in episodes])

    def _portions(self) -> Iterator[tuple[Seated, list[int], int]]:
        """Who reads what in the next step, first come, first served, and the blocks lacking for it."""
        budget = self._prefill_budget
        for request_id, unread in self._unread.items():
            sequence = self._scheduler.running.get(request_id)
            if sequence is not None and (portion := unread[:budget]):
                budget -= len(portion)
                num_places = self._rows.num_computed(sequence) + len(portion) + 1  # one for the next input
                yield sequence, portion, num_blocks_for(num_places) - len(sequence.blocks)

    def _lacking(self) -> dict[Seated, int]:
        """See Engine."""
        return super()._lacking() | {sequence: num for sequence, _, num in self._portions() if num > 0}

    def _schedule(self) -> Plan:
        """See Engine; what is read now is computed with the prompts."""
        plan = super()._schedule()
        for sequence, portion, num_lacking in list(self._portions()):
            if num_lacking <= 0:
                plan.prefills.append(self._read(sequence, portion))
        return plan

    def _read(self, sequence: Seated, portion: list[int]) -> Prefill:
        """Tokens become part of the answer; what is to be computed now. The last one is a decode input."""
        request, start = sequence.request, self._rows.num_computed(sequence)
        stamp = self._slot_stamps[self._held[request.version].slot]
        self._rows.read(sequence, portion, int(stamp))
        del self._unread[request.id][: len(portion)]
        if not self._unread[request.id]:
            del self._unread[request.id], self._scheduler.still[request.id]
        tokens = (*request.prompt_ids, *self._rows.draft(sequence).token_ids.tolist())
        key = PromptKey(request.group, request.version, tokens)
        return Prefill(key, sequence.blocks, start, start + len(portion))

    def _prefill(self, plan: Plan) -> None:
        """See Engine; those who have read all decode from now on."""
        super()._prefill(plan)
        if plan.prefills:
            self._arrange()
