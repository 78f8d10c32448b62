import random
from pathlib import Path

import pytest
import torch
from tests.engine.tiny import TINY, engine, full_logits, greedy_answer, request, run, tokens, weights

from dora.core.records import Chunk, GroupId, RequestId
from dora.engine.engine import Engine
from dora.engine.sequence import EngineError, Request, Sampling
from dora.handover.engine import MovingEngine
from dora.model.weights import weight_digest

KERNELS = ("eager", "numba")


@pytest.mark.parametrize("kernels", KERNELS)
def test_greedy_decode_is_the_naive_argmax_token_by_token(kernels: str) -> None:
    requests = [request(i, temperature=0.0, max_tokens=24, group_size=1) for i in range(12)]
    answers = run(engine(kernels), requests)
    for asked in requests:
        assert answers[asked.id].token_ids == greedy_answer(weights(), asked.prompt_ids, 24)


@pytest.mark.parametrize("kernels", KERNELS)
def test_logprobs_are_those_of_a_training_forward(kernels: str) -> None:
    requests = [request(i, temperature=0.5 + i % 3 / 2) for i in range(16)]
    answers = run(engine(kernels), requests)
    for asked in requests:
        answer = answers[asked.id]
        logits = full_logits(weights(), [*asked.prompt_ids, *answer.token_ids])
        behind_prompt = logits[len(asked.prompt_ids) - 1 : -1] / asked.sampling.temperature
        expected = behind_prompt.log_softmax(-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=0)


def test_a_greedy_token_reports_its_logprob_at_temperature_one() -> None:
    asked = request(0, temperature=0.0, max_tokens=1)
    answer = run(engine(), [asked])[asked.id]
    expected = full_logits(weights(), list(asked.prompt_ids))[-1].log_softmax(-1).max()
    assert answer.logprobs == pytest.approx([float(expected)], abs=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_request_gets_the_same_tokens_alone_in_a_batch_reordered_and_elsewhere(kernels: str) -> None:
    requests = [request(i) for i in range(32)]
    together = tokens(run(engine(kernels), requests))
    shuffled = random.Random(0).sample(requests, len(requests))
    assert tokens(run(engine(kernels), shuffled)) == together
    few_rows = engine(kernels, max_rows=5)
    assert tokens(run(few_rows, requests)) == together
    for asked in requests[::5]:
        assert tokens(run(few_rows, [asked])) == {asked.id: together[asked.id]}
    assert len({tuple(answer) for answer in together.values()}) == 32


def test_numba_and_eager_kernels_draw_the_same_tokens() -> None:
    requests = [request(i, max_tokens=40) for i in range(32)]
    assert tokens(run(engine("numba"), requests)) == tokens(run(engine("eager"), requests))


@pytest.mark.parametrize("kernels", KERNELS)
def test_two_versions_side_by_side_answer_as_each_alone(kernels: str) -> None:
    requests = [request(i, version=i % 3 // 2) for i in range(24)]
    both = run(engine(kernels, num_versions=2), requests)
    for version in (0, 1):
        alone = Engine(TINY, max_rows=32, max_context=96, version_slots=1, kernels=kernels)
        digest = alone.load(version, weights(version))
        own = [asked for asked in requests if asked.version == version]
        assert tokens(run(alone, own)) == {asked.id: both[asked.id].token_ids for asked in own}
        for asked in own:
            assert both[asked.id].chunks == (Chunk(version, digest, 20),)
            assert both[asked.id].version == version


def test_versions_may_arrive_between_each_others_requests() -> None:
    requests = [request(i, version=version) for version in (0, 1) for i in range(version, 16, 2)]
    expected = tokens(run(engine(num_versions=2), requests))
    late = engine()
    late.submit([asked for asked in requests if asked.version == 0])
    answers = {completion.id: completion for _ in range(7) for completion in late.step()}
    late.load(1, weights(1))
    answers |= run(late, [asked for asked in requests if asked.version == 1])
    assert tokens(answers) == expected


def test_the_digest_is_of_the_bytes_in_the_slot() -> None:
    made = engine()
    source = weights(7)
    assert made.load(7, source) == weight_digest(source) == made.versions[7]
    source.zero_()
    assert run(made, [request(0, version=7)]) == run(made, [request(0, version=7)])


def test_chunks_name_the_weights_a_slot_really_held() -> None:
    made = engine()
    made.drop(0)
    digest = made.load(0, weights(5))
    asked = request(0, temperature=0.0)
    answer = run(made, [asked])[asked.id]
    assert answer.chunks == (Chunk(0, digest, 20),)
    assert answer.token_ids == greedy_answer(weights(5), asked.prompt_ids, 20)


def test_an_answer_ends_with_its_stop_token_or_at_its_length() -> None:
    free = run(engine(), [request(i, max_tokens=30) for i in range(16)])
    stopped = run(engine(), [request(i, max_tokens=30, stop_ids=(3, 11)) for i in range(16)])
    for request_id, answer in free.items():
        ends = [i for i, token in enumerate(answer.token_ids) if token in (3, 11)]
        expected = answer.token_ids[: ends[0] + 1] if ends else answer.token_ids
        assert stopped[request_id].token_ids == expected
        assert stopped[request_id].finish_reason == ("stop" if ends else "length")
        assert len(stopped[request_id].logprobs) == len(expected)
    assert {answer.finish_reason for answer in stopped.values()} == {"stop", "length"}


def test_prompts_of_a_group_are_computed_once() -> None:
    made = engine(max_rows=6)
    run(made, [request(i, group_size=8, prompt_length=21) for i in range(24)])
    assert made.num_prefilled == 3 * 20


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_prompt_that_begins_like_an_earlier_one_is_computed_from_where_they_part(kernels: str) -> None:
    made = engine(kernels, max_rows=2)
    beginning = tuple(range(20)) * 2
    prompts = [
        beginning[:33],
        (*beginning[:40], 7),
        (*beginning[:40], 8, 9, 8, 9, 8, 9),
        beginning[:32],
        beginning[:33],
    ]
    requests = [
        Request(RequestId(0, row, 0), GroupId(0, row), ids, 0, row, Sampling(0.0, 20))
        for row, ids in enumerate(prompts)
    ]
    answers = run(made, requests)
    assert made.num_prefilled == 32 + 8 + 13 + 15 + 0
    for asked in requests:
        assert answers[asked.id].token_ids == greedy_answer(weights(), asked.prompt_ids, 20)


def test_a_prompt_longer_than_a_tile_of_queries_is_computed_right() -> None:
    asked = request(0, temperature=0.0, prompt_length=75, group_size=1)
    assert run(engine(), [asked])[asked.id].token_ids == greedy_answer(weights(), asked.prompt_ids, 20)


def test_abort_gives_back_rows_and_blocks_and_counts_the_tokens_lost() -> None:
    made = engine(max_rows=4)
    requests = [request(i) for i in range(8)]
    expected = tokens(run(engine(), requests))
    made.submit(requests)
    for _ in range(5):
        made.step()
    unknown = RequestId(9, 9, 9)
    assert made.abort([requests[1].id, requests[7].id, unknown]) == {requests[1].id: 5, requests[7].id: 0}
    made.check()
    assert made.num_rows == 3
    answers = run(made, [])
    left = [asked.id for asked in requests if asked not in (requests[1], requests[7])]
    assert tokens(answers) == {request_id: expected[request_id] for request_id in left}


def test_progress_counts_the_tokens_of_running_and_waiting_requests() -> None:
    made = engine(max_rows=2)
    requests = [request(i) for i in range(3)]
    made.submit(requests)
    for _ in range(3):
        made.step()
    assert made.progress() == {requests[0].id: 3, requests[1].id: 3, requests[2].id: 0}
    assert (made.num_rows, made.num_waiting, made.idle) == (2, 1, False)


def test_rushed_requests_decode_alone_until_the_last_of_them_has_finished() -> None:
    made = engine()
    requests = [request(i, max_tokens=10) for i in range(6)]
    expected = tokens(run(engine(), requests))
    made.submit(requests)
    made.step()
    made.rush([requests[2].id, requests[4].id])
    for _ in range(4):
        made.step()
    lengths = [1, 1, 5, 1, 5, 1]
    assert made.progress() == {asked.id: length for asked, length in zip(requests, lengths, strict=True)}
    made.rush([])
    made.step()
    assert set(made.progress().values()) == {2, 6}
    made.rush([requests[0].id])
    answers = run(made, [])
    assert tokens(answers) == expected
    assert next(iter(answers)) == requests[0].id


def test_a_paused_engine_takes_orders_and_decodes_nothing() -> None:
    made = engine()
    requests = [request(i) for i in range(4)]
    made.submit(requests[:2])
    made.step()
    made.pause()
    made.submit(requests[2:])
    assert (made.step(), made.can_step, made.idle) == ([], False, False)
    assert list(made.progress().values()) == [1, 1, 0, 0]
    made.load(1, weights(1))
    assert made.abort([requests[0].id]) == {requests[0].id: 1}
    made.drop(1)
    made.resume()
    assert made.can_step
    expected = tokens(run(engine(), requests[1:]))
    assert tokens(run(made, [])) == expected
    assert not made.can_step


def test_a_version_with_unfinished_requests_is_not_dropped() -> None:
    made = engine(num_versions=2)
    made.submit([request(0)])
    with pytest.raises(EngineError, match="version 0 has 1 unfinished requests"):
        made.drop(0)
    made.step()
    with pytest.raises(EngineError, match="unfinished"):
        made.drop(0)
    made.drop(1)
    with pytest.raises(EngineError, match="version 1 is not held; held: \\[0\\]"):
        made.drop(1)
    run(made, [])
    made.drop(0)
    made.check()
    assert made.versions == {}


def test_versions_beyond_the_slots_twice_or_of_another_shape_are_refused() -> None:
    made = engine()
    with pytest.raises(EngineError, match="held already"):
        made.load(0, weights())
    with pytest.raises(EngineError, match=r"float64 \[3\], not float32"):
        made.load(1, torch.zeros(3, dtype=torch.float64))
    made.load(1, weights(1))
    with pytest.raises(EngineError, match="no free slot for version 2: \\[0, 1\\] are held"):
        made.load(2, weights(2))
    made.check()


def test_a_request_that_cannot_run_is_refused_and_the_others_go_on() -> None:
    made = engine()
    good = [request(i) for i in range(4)]
    bad = {
        r"90 \+ 20 tokens, over max_context = 96; shorten the prompt": request(8, prompt_length=90),
        "version 3 is not held": request(9, version=3),
        "here already": good[0],
        "prompt is empty": Request(RequestId(0, 5, 0), GroupId(0, 5), (), 0, 1, Sampling(1.0, 2)),
        "token ids outside 0..28": Request(RequestId(0, 5, 1), GroupId(0, 5), (29,), 0, 1, Sampling(1.0, 2)),
        "at most 8 are possible": request(11, stop_ids=tuple(range(9))),
    }
    made.submit(good[:2])
    for reason, asked in bad.items():
        with pytest.raises(EngineError, match=reason) as caught:
            made.submit([asked])
        assert list(caught.value.refused) == [asked.id]
    with pytest.raises(EngineError, match="1 of 3 requests refused"):
        made.submit([good[2], request(8, prompt_length=90), good[3]])
    assert tokens(run(made, [])) == tokens(run(engine(), good))


def test_a_request_larger_than_the_pool_is_refused() -> None:
    made, good = engine(num_blocks=3), request(1, prompt_length=20, max_tokens=12)
    with pytest.raises(EngineError, match="it may need 4 KV blocks and the engine has 3 in all; raise num_b"):
        made.submit([good, request(0, prompt_length=20, max_tokens=28)])
    assert tokens(run(made, [])) == tokens(run(engine(), [good]))


def test_a_pool_too_small_for_all_rows_delays_requests_but_changes_nothing() -> None:
    requests = [request(i) for i in range(32)]
    assert tokens(run(engine(num_blocks=9), requests)) == tokens(run(engine(), requests))


def test_impossible_settings_are_named() -> None:
    with pytest.raises(EngineError, match="max_context = 999"):
        Engine(TINY, max_rows=1, max_context=999, version_slots=1)
    with pytest.raises(EngineError, match="max_rows = 0"):
        Engine(TINY, max_rows=0, max_context=9, version_slots=1)
    with pytest.raises(EngineError, match="kernels = 'fast' must be one of auto, numba, eager"):
        engine("fast")
    with pytest.raises(EngineError, match="temperature = -1"):
        Sampling(-1.0, 4)
    with pytest.raises(EngineError, match="max_tokens = 0"):
        Sampling(1.0, 0)


def test_a_paced_step_takes_its_declared_time_and_keeps_its_tokens() -> None:
    paced = Engine(TINY, max_rows=4, max_context=96, version_slots=1, kernels="eager", pace_s=0.02)
    paced.load(0, weights())
    requests = [request(i, max_tokens=5) for i in range(4)]
    assert tokens(run(paced, requests)) == tokens(run(engine(), requests))
    assert paced.busy_row_s >= 4 * 5 * 0.02 - 1e-6  # what differences of clock readings lose


def test_a_pool_there_is_no_space_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no space for \d+ bytes of KV"):
        MovingEngine(TINY, max_rows=1, max_context=9, version_slots=1, num_blocks=2**40, pool=tmp_path / "kv")
    assert not (tmp_path / "kv").exists()


def test_the_share_of_kv_in_use_falls_to_nothing() -> None:
    made = engine(num_blocks=20)
    made.submit([request(0, prompt_length=33)])
    made.step()
    assert made.kv_share == pytest.approx(3 / 20)
    run(made, [])
    assert made.kv_share == 0


def test_an_idle_engine_does_nothing_and_every_block_is_free() -> None:
    made = engine()
    run(made, [request(i) for i in range(8)])
    before = made.busy_row_s
    assert made.step() == []
    assert made.busy_row_s == before
    made.check()
