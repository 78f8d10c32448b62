"""Preemption and chunked prefill change no completion."""

import random
from functools import partial

import pytest
from tests.engine.engine_cluster import EngineCluster
from tests.engine.test_migration import BLOCK_BYTES
from tests.engine.tiny import all_close, make_engine, make_request, output_tokens, run

from dora.core.types import RequestId
from dora.engine.engine import Engine
from dora.engine.messages import ExportFailed, ExportFinished, ImportFailed, ImportFinished
from dora.engine.request import Completion, EngineError, Request
from dora.engine.scheduler import RequestStatus

KERNELS = ("eager", "numba")
LONG = make_request(0, group_size=1, prompt_length=1, max_tokens=90)  # it needs six blocks
make_small_engine = partial(make_engine, max_rows=8)


def swapped(engine: Engine, requests: list[Request]) -> list[Request]:
    return [request for request in requests if engine.status_of(request.id) is RequestStatus.SWAPPED]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("prefill_budget", [1, 7, 16, 40])
def test_chunked_prefill_gives_the_same_completions(kernels: str, prefill_budget: int) -> None:
    requests = [make_request(i, max_tokens=12) for i in range(20)]
    requests += [make_request(i, prompt_length=75, max_tokens=12) for i in range(20, 24)]
    expected = run(make_small_engine(kernels, max_rows=32), requests)
    engine = make_small_engine(kernels, max_rows=32, prefill_budget=prefill_budget)
    completions = run(engine, requests)
    assert output_tokens(completions) == output_tokens(expected)
    for request_id, completion in completions.items():
        assert completion.logprobs == pytest.approx(expected[request_id].logprobs, abs=1e-5)
    assert engine.num_prefilled == num_prompt_tokens(requests)


def num_prompt_tokens(requests: list[Request]) -> int:
    """Prompt tokens without the last of each prompt, once per group."""
    return sum({request.prompt_key: request.num_prefill_tokens for request in requests}.values())


def test_rows_keep_decoding_while_a_long_prompt_is_prefilled() -> None:
    engine = make_small_engine(prefill_budget=10)
    first, second = make_request(0), make_request(4, prompt_length=76)
    engine.submit([first])
    engine.step()
    before = engine.num_prefilled
    engine.submit([second])
    for num_steps in range(1, 8):
        assert engine.status_of(second.id) is (
            RequestStatus.WAITING if num_steps == 1 else RequestStatus.PREFILL
        )
        engine.step()
        engine.check()
        assert engine.num_prefilled == before + 10 * num_steps
        assert engine.progress() == {first.id: 1 + num_steps, second.id: 0}
    engine.step()
    assert engine.progress() == {first.id: 9, second.id: 1}
    assert engine.status_of(second.id) is RequestStatus.RUNNING


@pytest.mark.parametrize("num_steps", range(1, 18))
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_request_swapped_out_at_any_offset_of_a_block_continues_bit_for_bit(
    kernels: str, num_steps: int
) -> None:
    """`decode_only` pauses the first request, and the other one needs its blocks, so each decodes alone."""
    request = make_request(1, group_size=1, max_tokens=40)
    expected = {a.id: run(make_small_engine(kernels), [a])[a.id] for a in (request, LONG)}
    engine = make_small_engine(kernels, num_blocks=6, max_rows=2)
    engine.submit([request])
    for _ in range(num_steps):
        engine.step()
    num_prefilled = engine.num_prefilled
    engine.submit([LONG])
    engine.decode_only([LONG.id])
    completions: dict[RequestId, Completion] = {}
    while engine.status_of(request.id) is not RequestStatus.SWAPPED:
        completions |= {completion.id: completion for completion in engine.step()}
    assert engine.progress()[request.id] == num_steps
    assert engine.swapped_bytes == -(-(len(request.prompt_ids) + num_steps - 1) // 16) * BLOCK_BYTES
    completions |= run(engine, [])
    assert completions == expected
    assert (engine.num_swapped, engine.num_prefilled, engine.kv_usage) == (1, num_prefilled, 0)


@pytest.mark.parametrize("num_blocks", [7, 8, 9, 11, 14, 20])
@pytest.mark.parametrize("kernels", KERNELS)
def test_pools_too_small_for_all_rows_change_no_completion(kernels: str, num_blocks: int) -> None:
    requests = [make_request(i, version=i % 8 // 4, max_tokens=45) for i in range(32)]
    expected = run(make_small_engine(kernels, max_rows=32, num_versions=2), requests)
    engine = make_small_engine(kernels, num_blocks=num_blocks, num_versions=2, prefill_budget=30)
    assert all_close(run(engine, requests), expected)
    assert engine.num_swapped > 0
    assert engine.kv_usage == 0


def test_the_default_pool_never_preempts() -> None:
    engine = make_small_engine(max_rows=4)
    run(engine, [make_request(i, prompt_length=1 + i * 11 % 50, max_tokens=46) for i in range(16)])
    assert engine.num_swapped == 0


def test_aborting_a_request_in_any_state_leaks_nothing() -> None:
    source = random.Random(0)
    requests = [make_request(i, prompt_length=1 + i // 4 * 13 % 50, max_tokens=45) for i in range(32)]
    expected = run(make_small_engine(max_rows=32), requests)
    engine = make_small_engine(num_blocks=9, prefill_budget=6)
    engine.submit(requests)
    completions: dict[RequestId, Completion] = {}
    chances = {
        RequestStatus.SWAPPED: 0.2,
        RequestStatus.PREFILL: 0.3,
        RequestStatus.WAITING: 0.04,
        RequestStatus.RUNNING: 0.01,
    }
    seen: set[RequestStatus] = set()
    aborted: list[Request] = []
    while not engine.is_idle:
        completions |= {completion.id: completion for completion in engine.step()}
        engine.check()
        for state, chance in chances.items():
            candidates = [request for request in requests if engine.status_of(request.id) is state]
            if candidates and source.random() < chance:
                aborted.append(source.choice(candidates))
                before = engine.progress()[aborted[-1].id]
                assert engine.abort([aborted[-1].id]) == {aborted[-1].id: before}
                assert engine.status_of(aborted[-1].id) is RequestStatus.ABSENT
                seen.add(state)
                engine.check()
    assert seen == chances.keys()
    assert engine.kv_usage == 0
    assert all_close(completions, {a.id: expected[a.id] for a in requests if a not in aborted})


def crowded(engine: Engine) -> list[Request]:
    """Run eight requests until some of them are swapped out."""
    requests = [make_request(i, group_size=1, max_tokens=40) for i in range(8)]
    engine.submit(requests)
    while not swapped(engine, requests):
        engine.step()
    return requests


def test_a_request_swapped_out_is_unfinished() -> None:
    engine = make_small_engine(num_blocks=12)
    requests = crowded(engine)
    request = swapped(engine, requests)[0]
    assert engine.progress()[request.id] > 0
    assert engine.num_running + engine.num_waiting == 8
    with pytest.raises(EngineError, match="has this request already"):
        engine.submit([request])
    engine.abort([other.id for other in requests if other != request])
    with pytest.raises(EngineError, match="version 0 has 1 unfinished requests"):
        engine.drop(0)
    assert not engine.is_idle
    assert engine.can_step
    assert len(run(engine, [])) == 1


def test_requests_migrate_while_others_are_swapped_out(cluster: EngineCluster) -> None:
    source = cluster.add_engine("a", num_blocks=12)
    cluster.add_engine("b")
    source.submit(requests := [make_request(i, group_size=1, max_tokens=40) for i in range(8)])
    while not swapped(source, requests):
        cluster.step("a")
    migrating = next(request for request in requests if source.status_of(request.id) is RequestStatus.RUNNING)
    cluster.migrate(migrating, "a", "b")
    waited = swapped(source, requests)[-1]
    migration_id = cluster.start_migration(waited, "a", "b")  # as soon as it has a row again
    cluster.check_answers(requests)
    assert cluster.reply_of("a", migration_id) == ExportFinished(migration_id)
    assert isinstance(cluster.reply_of("b", migration_id), ImportFinished)


def test_a_request_that_is_swapped_out_during_its_migration_stays(cluster: EngineCluster) -> None:
    request = make_request(1, group_size=1, max_tokens=40)
    source = cluster.add_engine("a", num_blocks=6, max_rows=2)
    cluster.add_engine("b")
    source.submit([request])
    cluster.step("a", 12)
    migration_id = cluster.start_migration(request, "a", "b")
    source.submit([LONG])
    source.decode_only([LONG.id])
    while source.status_of(request.id) is not RequestStatus.SWAPPED:
        cluster.step("a")
    cluster.poll("a")
    assert cluster.reply_of("a", migration_id) == ExportFailed(
        migration_id, "the request was swapped out: too few KV blocks are free"
    )
    cluster.engines["b"].cancel_migration(migration_id)
    cluster.check_answers([request, LONG])


def test_a_destination_without_free_blocks_fails_the_import(cluster: EngineCluster) -> None:
    request = make_request(1, group_size=1, max_tokens=80)
    cluster.add_engine("a").submit([request])
    cluster.add_engine("b", num_blocks=7).submit([LONG])
    cluster.step("a", 60)
    cluster.step("b", 60)
    migration_id = cluster.start_migration(request, "a", "b")
    cluster.poll("a")
    cluster.poll("b")
    assert cluster.reply_of("b", migration_id) == ImportFailed(migration_id, "too few KV blocks are free")
    cluster.engines["a"].cancel_migration(migration_id)
    cluster.check_answers([request, LONG])


def test_a_migrating_request_grows_at_its_destination(cluster: EngineCluster) -> None:
    """The destination reserves a few blocks, and allocates more while the source publishes full ones."""
    request = make_request(1, group_size=1, max_tokens=80)
    cluster.add_engine("a").submit([request])
    cluster.add_engine("b", num_blocks=7)
    cluster.step("a", 70)
    cluster.migrate(request, "a", "b")
    cluster.check_bits(request)
