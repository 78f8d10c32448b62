"""Lengths of answers: their mean, their tail, the correlation of siblings, and traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dora.errors import InputError
from dora.planner.lengths import LengthDistribution, read_trace


@pytest.mark.parametrize(("family", "tail"), [("lognormal", 0.5), ("lognormal", 1.3), ("pareto", 1.6)])
def test_the_mean_is_that_of_truncated_answers(family: str, tail: float) -> None:
    lengths = LengthDistribution(30_000, 2000.0, family, tail)
    drawn = np.concatenate([np.array(lengths.draw(chunk, 16, 8)).ravel() for chunk in range(8)])
    assert drawn.mean() == pytest.approx(2000, rel=0.04)
    assert drawn.max() <= 30_000
    assert drawn.min() >= 1


def test_a_mean_near_the_limit_is_met_with_a_heavy_tail() -> None:
    lengths = LengthDistribution(30_720, 29_000.0, tail=3.0)
    assert lengths.sample.mean() == pytest.approx(29_000, rel=0.02)


def test_the_heaviest_tail_cannot_become_heavier() -> None:
    lengths = LengthDistribution(10**6, 500.0, tail=29.9)
    assert lengths.with_heavier_tail().tail == 30.0


def test_siblings_have_the_given_correlation() -> None:
    def correlation(given: float) -> float:
        lengths = LengthDistribution(10**6, 500.0, tail=0.8, correlation=given)
        drawn = np.log(np.array(lengths.draw(0, 2, 8), float))
        return float(np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1])

    assert correlation(0.0) == pytest.approx(0.0, abs=0.1)
    assert correlation(0.6) == pytest.approx(0.6, abs=0.06)


def test_a_group_has_the_same_lengths_for_any_batch_size_and_growth_makes_later_ones_longer() -> None:
    lengths = LengthDistribution(1000, 100.0)
    assert lengths.draw(3, 4, 8) == lengths.draw(3, 4, 64)
    constant, grown = (
        np.array(LengthDistribution(10**6, 100.0, growth=growth).draw(1, 4, 8)).mean()
        for growth in (0.0, 0.01)
    )
    assert grown == pytest.approx(constant * (1 + 0.01 * 192), rel=0.02)


def test_answers_are_drawn_from_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,10\ny,2,20\nz,3,70\n")
    lengths = LengthDistribution(100, family="trace", trace=read_trace(path))
    drawn = np.array(lengths.draw(0, 16, 8))
    assert set(drawn.ravel().tolist()) == {10, 20, 70}
    assert drawn.mean() == pytest.approx(100 / 3, rel=0.03)


def test_a_trace_may_begin_with_the_byte_order_mark_of_a_spreadsheet(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("GeneratedTokens\n70\n", encoding="utf-8-sig")
    assert read_trace(path) == (70,)


def test_an_invalid_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="no column 'GeneratedTokens'; its columns are a, b"):
        read_trace(path)
    path.write_text("GeneratedTokens\n12\n-3\n")
    with pytest.raises(InputError, match="line 3: '-3' must be a number of tokens"):
        read_trace(path)
    path.write_text("GeneratedTokens\n\u00b2\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 2: '\u00b2' must be a number of tokens"):
        read_trace(path)
    path.write_text("GeneratedTokens\n" + "1" * 5000 + "\n")
    with pytest.raises(InputError, match=r"line 2: '1+' must be a number of tokens"):
        read_trace(path)
    path.write_text("GeneratedTokens\n" + "1" * 200_000 + "\n")
    with pytest.raises(InputError, match=r"cannot read .* as CSV"):
        read_trace(path)


def test_lengths_beyond_a_limit_are_refused() -> None:
    with pytest.raises(InputError, match=r"longest response of the trace has 70 tokens, above the limit 50"):
        LengthDistribution(50, family="trace", trace=(70,))
    with pytest.raises(InputError, match=r"prompt 128 \+ limit 900 = 1028 tokens exceed the context of 1000"):
        LengthDistribution(900, 100.0).check_context(1000)
    with pytest.raises(InputError, match="mean length 1000 must be at least 1 and below the limit 900"):
        LengthDistribution(900, 1000)


def test_a_prompt_is_that_of_the_row_of_the_first_response(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [(7, 40), (9, 20), (8, 30)]
    path.write_text("ContextTokens,GeneratedTokens\n" + "".join(f"{p},{g}\n" for p, g in rows))
    lengths = LengthDistribution(
        50, family="trace", trace=read_trace(path), prompts=read_trace(path, "ContextTokens")
    )
    prompts, responses = lengths.draw_prompts(0, 4), lengths.draw(0, 4, 1)
    assert {(prompt, group[0]) for prompt, group in zip(prompts, responses, strict=True)} == {*rows}
    assert (lengths.mean_prompt, lengths.max_prompt) == (8.0, 9)
    assert lengths.with_heavier_tail().prompts == lengths.prompts
    with pytest.raises(InputError, match=r"prompt 9 \+ limit 50 = 59 tokens exceed the context of 58"):
        lengths.check_context(58)
    with pytest.raises(InputError, match="the trace has 3 responses and 1 prompts"):
        replace(lengths, prompts=(1,))
