"""A request continues a partial output of another engine, and ends as if nothing had happened."""

from functools import partial

import pytest
from tests.engine.tiny import all_close, make_engine, make_request, run

REQUESTS = [make_request(i, max_tokens=24) for i in range(12)]


@pytest.mark.parametrize("kernels", ["eager", "numba"])
@pytest.mark.parametrize("num_blocks", [None, 14])
def test_continued_outputs_equal_undisturbed_ones(kernels: str, num_blocks: int | None) -> None:
    expected = run(make_engine(kernels), REQUESTS)
    lost = make_engine(kernels, max_rows=8)  # some requests have no output yet
    lost.submit(REQUESTS)
    for _ in range(11):
        lost.step()
    outputs = lost.partial_outputs()
    num_kept = sum(len(output.token_ids) for output in outputs.values())
    engine = make_engine(kernels, max_rows=4, num_blocks=num_blocks)
    engine.submit(REQUESTS, outputs)
    assert engine.progress() == {
        r.id: len(outputs[r.id].token_ids) if r.id in outputs else 0 for r in REQUESTS
    }
    completions = run(engine, [])
    assert 0 < len(outputs) < len(REQUESTS)
    assert all_close(completions, expected)
    assert engine.num_decoded == sum(len(c.token_ids) for c in expected.values()) - num_kept
    for request_id, output in outputs.items():  # what was drawn stays drawn, to the bit
        kept = completions[request_id].logprobs[: len(output.token_ids)]
        assert kept.tobytes() == output.logprobs[:, 0].tobytes()


def test_a_continued_request_can_be_aborted_before_it_has_a_row() -> None:
    lost = make_engine()
    lost.submit(REQUESTS[:1])
    for _ in range(5):
        lost.step()
    engine = make_engine()
    engine.submit(REQUESTS[:1], lost.partial_outputs())
    assert engine.abort([REQUESTS[0].id]) == {REQUESTS[0].id: 5}
    engine.check()
    assert engine.is_idle


def test_exact_engines_continue_bit_for_bit() -> None:
    make_exact = partial(make_engine, "numba", exact=True)
    lost, engine = make_exact(max_rows=8), make_exact(max_rows=4)
    lost.submit(REQUESTS)
    for _ in range(11):
        lost.step()
    engine.submit(REQUESTS, lost.partial_outputs())
    assert run(engine, []) == run(make_exact(max_rows=16), REQUESTS)
