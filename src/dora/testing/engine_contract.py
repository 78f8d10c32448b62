"""The contract of an inference engine as tests. docs/backends.md shows how to run them.

Each test checks one rule of `dora.engine.interface.InferenceEngine`. Tests of capabilities that an engine
does not claim are skipped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from dora.core.types import Chunk, RequestId
from dora.data.tokenizer import save_character_tokenizer
from dora.engine.decode_batch import PartialOutput
from dora.engine.engine import Engine
from dora.engine.interface import (
    Capabilities,
    InferenceEngine,
    InferenceFactory,
    RecomputesKV,
    required_members,
)
from dora.engine.kv_transfer.handoff import HandoffSlots
from dora.engine.messages import (
    ContinuesOutputs,
    ImportFinished,
    MigrationReply,
    ReserveMigration,
    StartExport,
    SupportsEpisodes,
    SupportsMigration,
    TurnFinished,
)
from dora.engine.request import Completion, EngineError, Request
from dora.model.pretrained import save_pretrained
from dora.model.weights import weight_digest
from dora.testing import (
    CONFIG,
    MAX_TOKENS,
    filtered_probs,
    make_request,
    next_token_probs,
    reference_logprobs,
    version_weights,
)

MAX_ROWS, MAX_CONTEXT = 4, 64
CHARACTERS = "abcdefghijklmnopqrstuvwxyz01"  # the texts of the tokens, in order; the last token is <eos>
BF16_TOLERANCE = 0.2  # of log-probs of this model in bf16 (nats): its distributions are sharp
MAX_ATTEMPTS = 8  # at a migration of a request that may finish first
MAX_STEPS = 10_000  # for a few short responses
POLL_S = 0.001  # between two polls of a migration


class InferenceContract:
    """Subclass it as `Test...`, with the engine's class as `factory`."""

    factory: ClassVar[InferenceFactory]
    device: ClassVar[str] = "cpu"
    tolerance: ClassVar[float] = 1e-4  # of log-probs against a plain forward pass in fp32 (nats)
    checks_greedy_tokens: ClassVar[bool] = True  # whether greedy tokens must be those of that forward pass

    @pytest.fixture
    def unloaded_engine(self, tmp_path: Path) -> InferenceEngine:
        """An engine of the tiny model, without a version."""
        return self._make(tmp_path, "float32")

    @pytest.fixture
    def engine(self, unloaded_engine: InferenceEngine) -> InferenceEngine:
        """An engine with version 0."""
        unloaded_engine.load(0, version_weights(0))
        return unloaded_engine

    @property
    def _capabilities(self) -> Capabilities:
        return self.factory.capabilities

    @property
    def _num_slots(self) -> int:
        return min(2, self._capabilities.max_versions or 2)

    def _require(self, **claims: bool) -> None:
        for name, is_claimed in claims.items():
            if not is_claimed:
                pytest.skip(f"the engine does not claim: {name}")

    def test_it_has_every_member_of_the_protocol(self, unloaded_engine: InferenceEngine) -> None:
        missing = [name for name in required_members(InferenceEngine) if not hasattr(unloaded_engine, name)]
        assert not missing, f"missing: {', '.join(missing)}; see dora.engine.interface.InferenceEngine"

    # versions

    def test_a_loaded_version_has_the_digest_of_the_published_bytes(
        self, unloaded_engine: InferenceEngine
    ) -> None:
        flat = version_weights(0)
        assert unloaded_engine.load(0, flat) == weight_digest(flat)
        assert dict(unloaded_engine.versions) == {0: weight_digest(flat)}

    def test_a_loaded_version_cannot_be_loaded_again(self, engine: InferenceEngine) -> None:
        with pytest.raises(EngineError):
            engine.load(0, version_weights(0))
        assert list(engine.versions) == [0]

    def test_weights_of_another_model_are_rejected(self, unloaded_engine: InferenceEngine) -> None:
        with pytest.raises(EngineError):
            unloaded_engine.load(0, torch.zeros(7))
        assert not unloaded_engine.versions

    def test_the_source_buffer_may_change_after_the_load(self, unloaded_engine: InferenceEngine) -> None:
        """A run uses one buffer for all versions."""
        buffer = version_weights(0)
        unloaded_engine.load(0, buffer)
        buffer.copy_(version_weights(1))
        (answer,) = self._run(unloaded_engine, [make_request(0)])
        assert self._max_difference(answer, make_request(0)) < self.tolerance

    def test_every_claimed_dtype_has_the_digest_of_its_own_bytes(self, tmp_path: Path) -> None:
        for dtype in self._capabilities.dtypes:
            flat = version_weights(0).to(getattr(torch, dtype))
            engine = self._make(tmp_path / dtype, dtype)
            assert engine.load(0, flat) == weight_digest(flat)
            request = make_request(0)
            (answer,) = self._run(engine, [request])
            tolerance = self.tolerance if dtype == "float32" else BF16_TOLERANCE
            assert self._max_difference(answer, request) < tolerance

    def test_a_version_without_a_free_slot_is_rejected_and_loaded_ones_stay(
        self, engine: InferenceEngine
    ) -> None:
        loaded = {0}
        if self._capabilities.max_versions != 1:
            engine.load(1, version_weights(1))
            loaded |= {1}
        with pytest.raises(EngineError):
            engine.load(2, version_weights(2))
        assert set(engine.versions) == loaded

    def test_a_dropped_version_frees_its_slot(self, engine: InferenceEngine) -> None:
        engine.drop(0)
        assert engine.load(1, version_weights(1)) == weight_digest(version_weights(1))
        (answer,) = self._run(engine, [make_request(0, version=1)])
        assert self._max_difference(answer, make_request(0, version=1)) < self.tolerance

    def test_a_version_with_unfinished_requests_cannot_be_dropped(self, engine: InferenceEngine) -> None:
        engine.submit([make_request(0)])
        with pytest.raises(EngineError):
            engine.drop(0)
        assert len(self._finish(engine, 1)) == 1

    def test_an_unknown_version_cannot_be_dropped(self, engine: InferenceEngine) -> None:
        with pytest.raises(EngineError):
            engine.drop(5)

    def test_an_answer_is_finished_by_the_version_that_began_it(self, engine: InferenceEngine) -> None:
        """C1: two versions generate side by side, and neither uses the other's KV."""
        self._require(several_versions=self._capabilities.max_versions != 1)
        engine.submit([make_request(0)])
        engine.step()
        engine.load(1, version_weights(1))
        engine.submit([make_request(1, version=1)])
        answers = {answer.id: answer for answer in self._finish(engine, 2)}
        for number, version in ((0, 0), (1, 1)):
            answer = answers[make_request(number).id]
            assert answer.version == version
            assert self._max_difference(answer, make_request(number, version=version)) < self.tolerance

    # responses

    def test_an_answer_has_consistent_tokens_log_probs_and_digests(self, engine: InferenceEngine) -> None:
        for answer in self._run(engine, [make_request(number) for number in range(3)]):
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
        requests = [make_request(number, temperature=temperature) for number in range(6)]
        for answer, request in zip(self._run(engine, requests), requests, strict=True):
            assert self._max_difference(answer, request) < self.tolerance

    def test_a_greedy_answer_has_the_likeliest_tokens(self, engine: InferenceEngine) -> None:
        self._require(equal_greedy_tokens=self.checks_greedy_tokens)
        request = make_request(0, temperature=0.0)
        (answer,) = self._run(engine, [request])
        token_ids = list(request.prompt_ids)
        for token in answer.token_ids:
            probs = next_token_probs(0, token_ids)
            assert token == max(range(CONFIG.vocab_size), key=probs.__getitem__)
            token_ids.append(token)

    def test_an_answer_ends_with_its_first_stop_token(self, engine: InferenceEngine) -> None:
        stops = tuple(range(0, CONFIG.vocab_size, 4))
        answers = self._run(engine, [make_request(number, stop_ids=stops) for number in range(8)])
        for answer in answers:
            is_stop = [token in stops for token in answer.token_ids]
            assert not any(is_stop[:-1])
            assert is_stop[-1] == (answer.finish_reason == "stop")
        assert any(answer.finish_reason == "stop" for answer in answers)

    def test_an_answer_is_never_longer_than_max_tokens(self, engine: InferenceEngine) -> None:
        requests = [make_request(number, max_tokens=1 + number) for number in range(5)]
        for answer in self._run(engine, requests):
            assert len(answer.token_ids) == 1 + answer.id.sibling
            assert answer.finish_reason == "length"

    def test_more_requests_than_rows_are_all_answered(self, engine: InferenceEngine) -> None:
        requests = [make_request(number) for number in range(3 * MAX_ROWS)]
        assert len(self._run(engine, requests)) == len(requests)
        assert not engine.can_step
        assert engine.num_decoded >= len(requests)
        assert engine.busy_row_s > 0

    def test_a_seed_determines_the_tokens_whatever_else_is_generated(self, engine: InferenceEngine) -> None:
        self._require(is_seeded=self._capabilities.is_seeded)
        (alone,) = self._run(engine, [make_request(0)])
        beside = self._run(engine, [make_request(number) for number in range(MAX_ROWS)])
        assert beside[0].token_ids.tolist() == alone.token_ids.tolist()

    def test_siblings_differ(self, engine: InferenceEngine) -> None:
        answers = self._run(engine, [make_request(number) for number in range(MAX_ROWS)])
        assert len({tuple(answer.token_ids) for answer in answers}) > 1

    @pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}], ids=str)
    def test_tokens_that_a_filter_excludes_are_never_sampled(
        self, engine: InferenceEngine, filters: dict[str, Any]
    ) -> None:
        """`logprobs` are of the filtered distribution, `unfiltered_logprobs` of the whole one. An engine that
        knows one of them reports it as both: the unfiltered ones, or with `eval_filters` the filtered ones.
        """
        is_trainable = self._capabilities.filters
        self._require(filters=is_trainable or self._capabilities.eval_filters)
        request = make_request(0, **filters)
        (answer,) = self._run(engine, [request])
        assert not is_trainable or self._max_difference(answer, request) < self.tolerance
        has_one = is_trainable and answer.logprobs.tolist() == answer.unfiltered_logprobs.tolist()
        for i, token in enumerate(answer.token_ids):
            probs = next_token_probs(0, [*request.prompt_ids, *answer.token_ids[:i]])
            passed = filtered_probs(probs, request.sampling)
            assert token in passed
            expected = math.log(passed[token] / sum(passed.values()))
            assert has_one or answer.logprobs[i] == pytest.approx(expected, abs=self.tolerance)

    def test_an_answer_ends_with_its_first_stop_string(self, engine: InferenceEngine) -> None:
        self._require(stop_strings=self._capabilities.stop_strings)
        stops = tuple(CHARACTERS[::4])
        answers = self._run(engine, [make_request(number, stop_strings=stops) for number in range(8)])
        for answer in answers:
            is_stop = [CHARACTERS[token : token + 1] in stops for token in answer.token_ids]
            assert not any(is_stop[:-1])
            assert is_stop[-1] == (answer.finish_reason == "stop")
        assert any(answer.finish_reason == "stop" for answer in answers)

    # requests

    def test_a_request_that_cannot_run_is_rejected_by_id_and_the_others_run(
        self, engine: InferenceEngine
    ) -> None:
        bad = [
            make_request(1, version=9),
            make_request(2, prompt_ids=(CONFIG.vocab_size,)),
            make_request(3, max_tokens=999),
        ]
        with pytest.raises(EngineError) as rejection:
            engine.submit([make_request(0), *bad])
        assert rejection.value.rejected.keys() == {request.id for request in bad}
        assert [answer.id for answer in self._finish(engine, 1)] == [make_request(0).id]

    def test_aborted_requests_are_not_answered(self, engine: InferenceEngine) -> None:
        engine.submit([make_request(0), make_request(1)])
        engine.step()
        aborted = engine.abort([make_request(0).id, RequestId(0, 99, 0)])
        assert aborted.keys() == {make_request(0).id}
        assert [answer.id for answer in self._finish(engine, 1)] == [make_request(1).id]

    def test_progress_lists_every_unfinished_request(self, engine: InferenceEngine) -> None:
        requests = [make_request(number) for number in range(2 * MAX_ROWS)]
        engine.submit(requests)
        assert engine.progress().keys() == {request.id for request in requests}
        engine.step()
        progress = engine.progress()
        assert all(0 <= num_tokens <= MAX_TOKENS for num_tokens in progress.values())
        finished = {answer.id for answer in self._finish(engine, len(progress))}
        assert progress.keys() == finished
        assert not engine.progress()

    def test_an_idle_engine_cannot_step(self, engine: InferenceEngine) -> None:
        assert not engine.can_step
        assert engine.step() == []
        assert 0.0 <= engine.kv_usage <= 1.0

    def test_a_paused_engine_generates_nothing_and_loses_nothing(self, engine: InferenceEngine) -> None:
        self._require(pauses=self._capabilities.pauses)
        engine.submit([make_request(0)])
        engine.step()
        engine.pause()
        before = engine.progress()
        assert engine.step() == []
        assert engine.progress() == before
        engine.resume()
        (answer,) = self._finish(engine, 1)
        assert self._max_difference(answer, make_request(0)) < self.tolerance

    def test_an_engine_that_decodes_everything_can_be_set_to_it_again(self, engine: InferenceEngine) -> None:
        """An evaluation does so on every engine, whatever the engine supports."""
        engine.submit([make_request(number) for number in range(MAX_ROWS)])
        engine.step()
        try:
            engine.resume()
            engine.decode_only(())
        except EngineError as error:
            pytest.fail(f"the engine decodes everything already, and must accept this: {error}")
        assert len(self._finish(engine, MAX_ROWS)) == MAX_ROWS

    def test_requests_in_decode_only_finish_first(self, engine: InferenceEngine) -> None:
        self._require(decode_only=0 < self._capabilities.decode_only <= self._num_slots)
        requests = [make_request(number) for number in range(MAX_ROWS)]
        engine.submit(requests)
        engine.step()
        engine.decode_only([requests[-1].id])
        answers = self._finish(engine, MAX_ROWS)
        assert answers[0].id == requests[-1].id

    @pytest.mark.parametrize("is_source", [True, False], ids=["as the source", "as the destination"])
    def test_a_running_request_migrates_to_and_from_doras_own_engine(
        self, engine: InferenceEngine, tmp_path: Path, is_source: bool
    ) -> None:
        """Tokens, log-probs and the version stay the same. The destination prefills the KV again."""
        self._require(migrates_without_kv=self._capabilities.migrates_without_kv)
        native = Engine(
            CONFIG, max_rows=MAX_ROWS, max_context=MAX_CONTEXT, version_slots=1, pool=tmp_path / "pool"
        )
        native.load(0, version_weights(0))
        source, destination = (engine, native) if is_source else (native, engine)
        driver = MigrationDriver(tmp_path)
        for number in range(MAX_ATTEMPTS):  # the request may finish before it migrates
            request = make_request(number, max_tokens=MAX_CONTEXT - 9)
            source.submit([request])
            driver.step_until_first_token(source, request)
            replies = driver.migrate(request, source, destination)
            answer = driver.finish(destination, request)
            if any(isinstance(reply, ImportFinished) for reply in replies):
                break
        (imported,) = (reply for reply in replies if isinstance(reply, ImportFinished))
        assert 0 < imported.num_tokens < MAX_CONTEXT - 9
        assert imported.num_bytes == 0
        assert imported.num_prefilled >= imported.num_tokens
        assert request.id not in source.progress()
        assert answer.chunks == (Chunk(0, weight_digest(version_weights(0)), len(answer.token_ids)),)
        assert self._max_difference(answer, request) < self.tolerance

    def test_a_running_request_migrates_with_its_kv_to_an_engine_of_its_kind(self, tmp_path: Path) -> None:
        """Several times, and nothing is prefilled again. Log-probs stay those of the weights."""
        self._require(kv_transfer=self._capabilities.kv_transfer)
        pools = [tmp_path / f"pool-{number}" for number in range(2)]
        engines = [self._make(tmp_path / "model", "float32", pool=pool) for pool in pools]
        for engine in engines:
            engine.load(0, version_weights(0))
        driver, num_imported = MigrationDriver(tmp_path), 0
        for number in range(MAX_ATTEMPTS):
            request, at = make_request(number, max_tokens=MAX_CONTEXT - 9), 0
            engines[0].submit([request])
            for _ in range(3):
                driver.step_until_first_token(engines[at], request)
                replies = driver.migrate(request, engines[at], engines[1 - at], pools[at])
                if not (done := [reply for reply in replies if isinstance(reply, ImportFinished)]):
                    break  # the request has finished first
                assert [(reply.num_prefilled, reply.num_bytes > 0) for reply in done] == [(0, True)]
                at, num_imported = 1 - at, num_imported + 1
                driver.step(engines[at])
            answer = driver.finish(engines[at], request)
            assert answer.chunks == (Chunk(0, weight_digest(version_weights(0)), len(answer.token_ids)),)
            assert self._max_difference(answer, request) < self.tolerance
        assert num_imported
        assert not any(engine.num_recomputed for engine in engines if isinstance(engine, RecomputesKV))

    def test_an_episode_reads_the_observations_between_its_turns(self, engine: InferenceEngine) -> None:
        self._require(episodes=self._capabilities.episodes)
        assert isinstance(engine, SupportsEpisodes)
        request, observation = make_request(0, max_turn_tokens=4), [7, 8, 9]
        observations = iter((observation, []))
        engine.submit([request])
        answers: list[Completion] = []
        while not answers:
            answers = engine.step()
            for turn in engine.pop_finished_turns():
                assert len(turn.token_ids) == 4
                if token_ids := next(observations):
                    engine.continue_episode(request.id, token_ids)
                else:
                    engine.end_episode(request.id)
        (answer,) = answers
        logprobs, is_observed = answer.unfiltered_logprobs, [False] * 4 + [True] * 3 + [False] * 4
        assert answer.token_ids[4:7].tolist() == observation
        assert [math.isnan(logprob) for logprob in logprobs] == is_observed
        expected = reference_logprobs(0, request.prompt_ids, answer.token_ids.tolist())
        assert logprobs == pytest.approx(
            [math.nan if observed else x for observed, x in zip(is_observed, expected, strict=True)],
            abs=self.tolerance,
            nan_ok=True,
        )

    def test_a_request_continues_the_output_of_a_lost_engine(self, engine: InferenceEngine) -> None:
        """Its tokens and log-probs stay to the bit, and the limits count from its first token."""
        self._require(continues_outputs=isinstance(engine, ContinuesOutputs))
        assert isinstance(engine, ContinuesOutputs)
        request, outputs = make_request(0, max_tokens=MAX_CONTEXT - 9), dict[RequestId, PartialOutput]()
        engine.submit([request])
        for _ in range(MAX_STEPS):
            assert engine.step() == []
            if outputs := engine.partial_outputs():
                break
        (output,) = outputs.values()
        num_kept = len(output.token_ids)
        assert output.chunks == (Chunk(0, engine.versions[0], num_kept),)
        for digest, num_continued in (("of other weights", 0), (engine.versions[0], num_kept)):
            engine.abort([request.id])
            engine.submit([request], {request.id: output._replace(chunks=(Chunk(0, digest, num_kept),))})
            assert engine.progress() == {request.id: num_continued}
        (answer,) = self._finish(engine, 1)
        assert answer.token_ids[:num_kept].tolist() == output.token_ids.tolist()
        columns = (answer.logprobs, answer.unfiltered_logprobs, answer.raw_logprobs)
        assert all(
            own[:num_kept].tobytes() == kept.tobytes()
            for own, kept in zip(columns, output.logprobs.T, strict=True)
        )
        assert answer.chunks == (Chunk(0, engine.versions[0], len(answer.token_ids)),)
        assert (len(answer.token_ids), answer.finish_reason) == (MAX_CONTEXT - 9, "length")
        assert self._max_difference(answer, request) < self.tolerance

    def test_an_episode_continues_after_the_loss_of_an_engine(self, engine: InferenceEngine) -> None:
        """A whole turn stays and waits for its observation."""
        self._require(
            episodes=self._capabilities.episodes, continues_outputs=isinstance(engine, ContinuesOutputs)
        )
        assert isinstance(engine, SupportsEpisodes)
        assert isinstance(engine, ContinuesOutputs)
        request, observation = make_request(0, max_turn_tokens=4), [7, 8, 9]
        engine.submit([request])
        first = self._next_turn(engine)
        outputs = engine.partial_outputs([request.id])
        engine.abort([request.id])
        engine.submit([request], outputs)
        assert (engine.progress(), engine.can_step) == ({request.id: 4}, False)
        engine.continue_episode(request.id, observation)
        second = self._next_turn(engine)
        outputs = engine.partial_outputs([request.id])
        assert outputs[request.id].token_ids.tolist() == [*first.token_ids, *observation, *second.token_ids]
        engine.abort([request.id])
        engine.submit([request], outputs)
        engine.end_episode(request.id)
        (answer,) = self._finish(engine, 1)
        assert answer.token_ids.tolist() == outputs[request.id].token_ids.tolist()
        assert answer.logprobs.tobytes() == outputs[request.id].logprobs[:, 0].tobytes()
        assert answer.finish_reason == "turn_length"

    def _next_turn(self, engine: Any) -> TurnFinished:
        """Step until a turn has finished."""
        for _ in range(MAX_STEPS):
            assert engine.step() == []
            for turn in engine.pop_finished_turns():
                assert isinstance(turn, TurnFinished)
                return turn
        raise AssertionError("no turn has finished")

    def _make(self, folder: Path, dtype: str, **options: Any) -> InferenceEngine:
        save_pretrained(folder, CONFIG, version_weights(0))
        save_character_tokenizer(folder, CHARACTERS)
        return self.factory(
            model=str(folder),
            max_rows=MAX_ROWS,
            max_context=MAX_CONTEXT,
            version_slots=self._num_slots,
            device=self.device,
            dtype=dtype,
            **options,
        )

    def _run(self, engine: InferenceEngine, requests: Sequence[Request]) -> list[Completion]:
        """Their responses, in order."""
        engine.submit(requests)
        answers = {answer.id: answer for answer in self._finish(engine, len(requests))}
        return [answers[request.id] for request in requests]

    def _finish(self, engine: InferenceEngine, num_answers: int) -> list[Completion]:
        """Step until the engine has given this many responses and is idle."""
        answers: list[Completion] = []
        for _ in range(MAX_STEPS):
            answers += engine.step()
            if len(answers) >= num_answers and not engine.can_step:
                break
        assert len({answer.id for answer in answers}) == len(answers) == num_answers
        return answers

    def _max_difference(self, answer: Completion, request: Request) -> float:
        """The largest difference of a log-prob from the plain forward pass (nats)."""
        temperature = request.sampling.temperature or 1.0
        ids = answer.token_ids.tolist()
        expected = reference_logprobs(answer.version, request.prompt_ids, ids, temperature)
        pairs = zip(answer.unfiltered_logprobs.tolist(), expected, strict=True)
        return float(max(abs(own - other) for own, other in pairs))


class MigrationDriver:
    """Starts migrations between engines, token-only or from the `pool` of the source, and collects responses.

    `folder` gets the file of the migrations.
    """

    def __init__(self, folder: Path, lease_s: float = 30.0) -> None:
        self._slots, self._lease_s = HandoffSlots(folder), lease_s
        self.num_migrations = 0
        self.finished: dict[RequestId, Completion] = {}

    def step_until_first_token(self, engine: InferenceEngine, request: Request) -> None:
        """Step until a request has a token or is finished."""
        for _ in range(MAX_STEPS):
            self.step(engine)
            if engine.progress().get(request.id, 1):
                return

    def step(self, engine: InferenceEngine) -> None:
        self.finished |= {answer.id: answer for answer in engine.step()}

    def start(
        self,
        request: Request,
        source: InferenceEngine,
        destination: InferenceEngine,
        pool: Path | None = None,
    ) -> list[MigrationReply]:
        """Start a migration on both sides. Returns the failure if a side rejects it."""
        assert isinstance(source, SupportsMigration)
        assert isinstance(destination, SupportsMigration)
        self.num_migrations += 1
        slot = self._slots.allocate(self.num_migrations, request)
        reservation = ReserveMigration(self.num_migrations, request, pool, slot, self._lease_s)
        if (rejected := destination.reserve_migration(reservation)) is not None:
            return [rejected]
        export = StartExport(
            self.num_migrations, request.id, slot, self._lease_s, carries_kv=pool is not None
        )
        failure = source.start_export(export)
        return [] if failure is None else [failure]

    def migrate(
        self,
        request: Request,
        source: InferenceEngine,
        destination: InferenceEngine,
        pool: Path | None = None,
    ) -> list[MigrationReply]:
        """The replies of both sides to a whole migration. The source decodes meanwhile."""
        replies = self.start(request, source, destination, pool)
        for _ in range(MAX_STEPS):
            if len(replies) >= 2:
                break
            replies += self.poll(source) + self.poll(destination)
            self.step(source)
            time.sleep(POLL_S)  # another process may be at work
        return replies

    def poll(self, engine: InferenceEngine) -> list[MigrationReply]:
        assert isinstance(engine, SupportsMigration)
        return engine.poll_migrations()

    def finish(self, engine: InferenceEngine, request: Request) -> Completion:
        """Step the engine until the request is finished. Returns its response."""
        for _ in range(MAX_STEPS):
            if request.id in self.finished:
                break
            self.step(engine)
        return self.finished[request.id]
