"""The contract of an inference engine, as tests: see docs/adapters.md for how to run them.

`dora.runtime.stations` has the words; each test holds one promise. What an engine does not say that it
can do is not asked of it: those tests are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from dora.contract.asking import CONFIG, MAX_TOKENS, distribution, kept, logprobs_of, request, weights
from dora.contract.moving import Table
from dora.core.records import Chunk, RequestId
from dora.data.tokenizer import save_character_tokenizer
from dora.engine.sequence import Completion, EngineError, Request
from dora.handover.engine import MovingEngine
from dora.handover.moves import Received
from dora.model.folder import save_folder
from dora.model.weights import weight_digest
from dora.runtime.stations import Capabilities, InferenceEngine, InferenceFactory, members
from dora.turns.words import TurnTaking

MAX_ROWS, MAX_CONTEXT = 4, 64
CHARACTERS = "abcdefghijklmnopqrstuvwxyz01"  # what the tokens stand for, in order; the last one is <eos>
ROUGHLY = 0.2  # how far log-probs in bf16 may be off in a model as sharp as this one (nats)
MAX_ATTEMPTS = 8  # at a move of a request that may finish before
MAX_STEPS = 10_000  # an engine that needs more of them for a few short answers does not get anywhere


class InferenceContract:
    """Subclass it as `Test...`, with the engine's class as `factory`."""

    factory: ClassVar[InferenceFactory]
    device: ClassVar[str] = "cpu"
    tolerance: ClassVar[float] = 1e-4  # of log-probs against a plain forward pass in fp32 (nats)
    is_greedy_equal: ClassVar[bool] = True  # whether likeliest tokens must be the plain forward pass's, too

    @pytest.fixture
    def made(self, tmp_path: Path) -> InferenceEngine:
        """An engine of a tiny model that holds no version."""
        return self._make(tmp_path, "float32")

    @pytest.fixture
    def engine(self, made: InferenceEngine) -> InferenceEngine:
        """One that holds version 0."""
        made.load(0, weights(0))
        return made

    @property
    def _can(self) -> Capabilities:
        return self.factory.capabilities

    def _needs(self, **asked: bool) -> None:
        for name, is_there in asked.items():
            if not is_there:
                pytest.skip(f"the engine does not claim it: {name}")

    def test_it_has_all_that_is_asked_for(self, made: InferenceEngine) -> None:
        missing = [name for name in members(InferenceEngine) if not hasattr(made, name)]
        assert not missing, f"it has no {', '.join(missing)}; see dora.runtime.stations.InferenceEngine"

    # versions

    def test_a_version_held_has_the_digest_of_the_bytes_that_were_published(
        self, made: InferenceEngine
    ) -> None:
        flat = weights(0)
        assert made.load(0, flat) == weight_digest(flat)
        assert dict(made.versions) == {0: weight_digest(flat)}

    def test_a_version_is_loaded_once(self, engine: InferenceEngine) -> None:
        with pytest.raises(EngineError):
            engine.load(0, weights(0))
        assert list(engine.versions) == [0]

    def test_weights_of_another_model_are_refused(self, made: InferenceEngine) -> None:
        with pytest.raises(EngineError):
            made.load(0, torch.zeros(7))
        assert not made.versions

    def test_what_was_given_may_change_once_it_is_loaded(self, made: InferenceEngine) -> None:
        """The run keeps one buffer for the versions to come."""
        buffer = weights(0)
        made.load(0, buffer)
        buffer.copy_(weights(1))
        (answer,) = self._run(made, [request(0)])
        assert self._gap(answer, request(0)) < self.tolerance

    def test_every_dtype_it_knows_is_attested_by_its_own_bytes(self, tmp_path: Path) -> None:
        for dtype in self._can.dtypes:
            flat = weights(0).to(getattr(torch, dtype))
            engine = self._make(tmp_path / dtype, dtype)
            assert engine.load(0, flat) == weight_digest(flat)
            asked = request(0)
            (answer,) = self._run(engine, [asked])
            assert self._gap(answer, asked) < (self.tolerance if dtype == "float32" else ROUGHLY)

    def test_a_version_without_a_place_is_refused_and_those_held_stay(self, engine: InferenceEngine) -> None:
        held = {0}
        if self._can.max_versions != 1:
            engine.load(1, weights(1))
            held |= {1}
        with pytest.raises(EngineError):
            engine.load(2, weights(2))
        assert set(engine.versions) == held

    def test_a_version_that_is_dropped_makes_room(self, engine: InferenceEngine) -> None:
        engine.drop(0)
        assert engine.load(1, weights(1)) == weight_digest(weights(1))
        (answer,) = self._run(engine, [request(0, version=1)])
        assert self._gap(answer, request(0, version=1)) < self.tolerance

    def test_a_version_with_unfinished_requests_is_not_dropped(self, engine: InferenceEngine) -> None:
        engine.submit([request(0)])
        with pytest.raises(EngineError):
            engine.drop(0)
        assert len(self._finish(engine, 1)) == 1

    def test_an_unknown_version_is_not_dropped(self, engine: InferenceEngine) -> None:
        with pytest.raises(EngineError):
            engine.drop(5)

    def test_an_answer_is_finished_by_the_version_that_began_it(self, engine: InferenceEngine) -> None:
        """C1: two versions generate side by side, and neither reads the other's KV."""
        self._needs(several_versions=self._can.max_versions != 1)
        engine.submit([request(0)])
        engine.step()
        engine.load(1, weights(1))
        engine.submit([request(1, version=1)])
        answers = {answer.id: answer for answer in self._finish(engine, 2)}
        for number, version in ((0, 0), (1, 1)):
            answer = answers[request(number).id]
            assert answer.version == version
            assert self._gap(answer, request(number, version=version)) < self.tolerance

    # answers

    def test_an_answer_says_how_it_was_made(self, engine: InferenceEngine) -> None:
        for answer in self._run(engine, [request(number) for number in range(3)]):
            assert 1 <= len(answer.token_ids) <= MAX_TOKENS
            assert all(0 <= token < CONFIG.vocab_size for token in answer.token_ids)
            assert len(answer.logprobs) == len(answer.unfiltered_logprobs) == len(answer.token_ids)
            assert all(math.isfinite(p) and p <= 1e-6 for p in answer.logprobs)
            assert answer.finish_reason in ("stop", "length")
            assert {chunk.version for chunk in answer.chunks} == {0}
            assert {chunk.digest for chunk in answer.chunks} == {engine.versions[0]}
            assert sum(chunk.num_tokens for chunk in answer.chunks) == len(answer.token_ids)

    @pytest.mark.parametrize("temperature", [1.0, 0.5])
    def test_log_probs_are_those_of_the_weights(self, engine: InferenceEngine, temperature: float) -> None:
        asked = [request(number, temperature=temperature) for number in range(6)]
        for answer, one in zip(self._run(engine, asked), asked, strict=True):
            assert self._gap(answer, one) < self.tolerance

    def test_a_greedy_answer_has_the_likeliest_tokens(self, engine: InferenceEngine) -> None:
        self._needs(equal_greedy_tokens=self.is_greedy_equal)
        asked = request(0, temperature=0.0)
        (answer,) = self._run(engine, [asked])
        known = list(asked.prompt_ids)
        for token in answer.token_ids:
            told = distribution(0, known)
            assert token == max(range(CONFIG.vocab_size), key=told.__getitem__)
            known.append(token)

    def test_an_answer_ends_with_its_first_stop_token(self, engine: InferenceEngine) -> None:
        stops = tuple(range(0, CONFIG.vocab_size, 4))
        answers = self._run(engine, [request(number, stop_ids=stops) for number in range(8)])
        for answer in answers:
            is_stop = [token in stops for token in answer.token_ids]
            assert not any(is_stop[:-1])
            assert is_stop[-1] == (answer.finish_reason == "stop")
        assert any(answer.finish_reason == "stop" for answer in answers)

    def test_an_answer_is_never_longer_than_asked(self, engine: InferenceEngine) -> None:
        for answer in self._run(engine, [request(number, max_tokens=1 + number) for number in range(5)]):
            assert len(answer.token_ids) == 1 + answer.id.sibling
            assert answer.finish_reason == "length"

    def test_more_requests_than_rows_are_all_answered(self, engine: InferenceEngine) -> None:
        asked = [request(number) for number in range(3 * MAX_ROWS)]
        assert len(self._run(engine, asked)) == len(asked)
        assert not engine.can_step
        assert engine.num_decoded >= len(asked)
        assert engine.busy_row_s > 0

    def test_a_seed_decides_the_tokens_whatever_else_is_generated(self, engine: InferenceEngine) -> None:
        self._needs(is_seeded=self._can.is_seeded)
        (alone,) = self._run(engine, [request(0)])
        beside = self._run(engine, [request(number) for number in range(MAX_ROWS)])
        assert beside[0].token_ids == alone.token_ids

    def test_siblings_differ(self, engine: InferenceEngine) -> None:
        answers = self._run(engine, [request(number) for number in range(MAX_ROWS)])
        assert len({tuple(answer.token_ids) for answer in answers}) > 1

    @pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}], ids=str)
    def test_what_is_filtered_out_is_not_drawn(
        self, engine: InferenceEngine, filters: dict[str, Any]
    ) -> None:
        """Log-probs are those of what is left, and unfiltered ones those of everything."""
        self._needs(filters=self._can.filters)
        asked = request(0, **filters)
        (answer,) = self._run(engine, [asked])
        assert self._gap(answer, asked) < self.tolerance
        for i, token in enumerate(answer.token_ids):
            left = kept(distribution(0, [*asked.prompt_ids, *answer.token_ids[:i]]), asked.sampling)
            assert token in left
            expected = math.log(left[token] / sum(left.values()))
            assert answer.logprobs[i] == pytest.approx(expected, abs=self.tolerance)

    def test_a_text_that_ends_an_answer_is_its_last(self, engine: InferenceEngine) -> None:
        self._needs(stop_strings=self._can.stop_strings)
        stops = tuple(CHARACTERS[::4])
        answers = self._run(engine, [request(number, stop_strings=stops) for number in range(8)])
        for answer in answers:
            is_stop = [CHARACTERS[token : token + 1] in stops for token in answer.token_ids]
            assert not any(is_stop[:-1])
            assert is_stop[-1] == (answer.finish_reason == "stop")
        assert any(answer.finish_reason == "stop" for answer in answers)

    # orders

    def test_a_request_that_cannot_run_is_refused_by_name_and_the_others_go_on(
        self, engine: InferenceEngine
    ) -> None:
        bad = [request(1, version=9), request(2, prompt_ids=(CONFIG.vocab_size,)), request(3, max_tokens=999)]
        with pytest.raises(EngineError) as refusal:
            engine.submit([request(0), *bad])
        assert refusal.value.refused.keys() == {one.id for one in bad}
        assert [answer.id for answer in self._finish(engine, 1)] == [request(0).id]

    def test_requests_that_are_given_up_are_gone(self, engine: InferenceEngine) -> None:
        engine.submit([request(0), request(1)])
        engine.step()
        given_up = engine.abort([request(0).id, RequestId(0, 99, 0)])
        assert given_up.keys() == {request(0).id}
        assert [answer.id for answer in self._finish(engine, 1)] == [request(1).id]

    def test_progress_names_every_unfinished_request(self, engine: InferenceEngine) -> None:
        asked = [request(number) for number in range(2 * MAX_ROWS)]
        engine.submit(asked)
        assert engine.progress().keys() == {one.id for one in asked}
        engine.step()
        progress = engine.progress()
        assert all(0 <= num_tokens <= MAX_TOKENS for num_tokens in progress.values())
        finished = {answer.id for answer in self._finish(engine, len(progress))}
        assert progress.keys() == finished
        assert not engine.progress()

    def test_an_engine_without_work_says_so(self, engine: InferenceEngine) -> None:
        assert not engine.can_step
        assert engine.step() == []
        assert 0.0 <= engine.kv_share <= 1.0

    def test_a_paused_engine_stands_still_and_loses_nothing(self, engine: InferenceEngine) -> None:
        self._needs(pauses=self._can.pauses)
        engine.submit([request(0)])
        engine.step()
        engine.pause()
        before = engine.progress()
        assert engine.step() == []
        assert engine.progress() == before
        engine.resume()
        (answer,) = self._finish(engine, 1)
        assert self._gap(answer, request(0)) < self.tolerance

    def test_requests_that_are_rushed_finish_first(self, engine: InferenceEngine) -> None:
        self._needs(rushes=self._can.rushes)
        asked = [request(number) for number in range(MAX_ROWS)]
        engine.submit(asked)
        engine.step()
        engine.rush([asked[-1].id])
        answers = self._finish(engine, MAX_ROWS)
        assert answers[0].id == asked[-1].id

    @pytest.mark.parametrize("goes_out", [True, False], ids=["to another", "from another"])
    def test_a_running_request_changes_hands_between_it_and_doras_own_engine(
        self, engine: InferenceEngine, tmp_path: Path, goes_out: bool
    ) -> None:
        """Tokens and log-probs stay, the version is the same, and only KV is computed again."""
        self._needs(reprefills=self._can.reprefills)
        own = MovingEngine(
            CONFIG, max_rows=MAX_ROWS, max_context=MAX_CONTEXT, version_slots=1, pool=tmp_path / "pool"
        )
        own.load(0, weights(0))
        table, (source, destination) = Table(tmp_path), (engine, own) if goes_out else (own, engine)
        for number in range(MAX_ATTEMPTS):  # one may finish before it moves
            asked = request(number, max_tokens=MAX_CONTEXT - 9)
            source.submit([asked])
            table.draw(source, asked)
            answers = table.move(asked, source, destination)
            answer = table.finish(destination, asked)
            if any(isinstance(word, Received) for word in answers):
                break
        (word,) = (word for word in answers if isinstance(word, Received))
        assert 0 < word.num_tokens < MAX_CONTEXT - 9
        assert word.num_bytes == 0
        assert word.num_prefilled >= word.num_tokens
        assert asked.id not in source.progress()
        assert answer.chunks == (Chunk(0, weight_digest(weights(0)), len(answer.token_ids)),)
        assert self._gap(answer, asked) < self.tolerance

    def test_an_episode_reads_what_is_said_between_its_turns(self, engine: InferenceEngine) -> None:
        self._needs(episodes=self._can.episodes)
        assert isinstance(engine, TurnTaking)
        asked, said, words = request(0, max_turn_tokens=4), [7, 8, 9], iter(([7, 8, 9], []))
        engine.submit([asked])
        answers: list[Completion] = []
        while not answers:
            answers = engine.step()
            for turn in engine.take_turns():
                assert len(turn.token_ids) == 4
                if reply := next(words):
                    engine.observe(asked.id, reply)
                else:
                    engine.finish(asked.id)
        (answer,) = answers
        told, is_read = answer.unfiltered_logprobs, [False] * 4 + [True] * 3 + [False] * 4
        assert answer.token_ids[4:7] == said
        assert [math.isnan(own) for own in told] == is_read
        expected = logprobs_of(0, asked.prompt_ids, answer.token_ids)
        assert told == pytest.approx(
            [math.nan if read else x for read, x in zip(is_read, expected, strict=True)],
            abs=self.tolerance,
            nan_ok=True,
        )

    # how the tests do it

    def _make(self, folder: Path, dtype: str) -> InferenceEngine:
        save_folder(folder, CONFIG, weights(0))
        save_character_tokenizer(folder, CHARACTERS)
        slots = min(2, self._can.max_versions or 2)
        return self.factory(
            model=str(folder),
            max_rows=MAX_ROWS,
            max_context=MAX_CONTEXT,
            version_slots=slots,
            device=self.device,
            dtype=dtype,
        )

    def _run(self, engine: InferenceEngine, requests: Sequence[Request]) -> list[Completion]:
        """Their answers, in order."""
        engine.submit(requests)
        answers = {answer.id: answer for answer in self._finish(engine, len(requests))}
        return [answers[one.id] for one in requests]

    def _finish(self, engine: InferenceEngine, num_answers: int) -> list[Completion]:
        """Step until so many answers are there, each once, and nothing is left."""
        answers: list[Completion] = []
        for _ in range(MAX_STEPS):
            answers += engine.step()
            if len(answers) >= num_answers and not engine.can_step:
                break
        assert len({answer.id for answer in answers}) == len(answers) == num_answers
        return answers

    def _gap(self, answer: Completion, asked: Request) -> float:
        """Largest difference to log-probs of a plain forward pass (nats)."""
        temperature = asked.sampling.temperature or 1.0
        expected = logprobs_of(answer.version, asked.prompt_ids, answer.token_ids, temperature)
        told = answer.unfiltered_logprobs
        return max(abs(a - b) for a, b in zip(told, expected, strict=True))
