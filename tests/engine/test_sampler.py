import numpy as np

from dora.engine.sampler import sample, uniform

NUM = 50_000


def test_random_numbers_are_uniform_and_uncorrelated_over_positions_and_seeds() -> None:
    one, counter = np.ones(NUM, np.uint64), np.arange(NUM)
    for numbers in (uniform(one, counter), uniform(counter.astype(np.uint64), np.ones(NUM, np.int64))):
        assert (numbers >= 0).all()
        assert (numbers < 1).all()
        assert abs(numbers.mean() - 1 / 2) < 0.005
        assert abs(numbers.var() - 1 / 12) < 0.002
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.02


def test_a_number_depends_only_on_its_own_seed_and_position() -> None:
    seeds, positions = np.arange(9, dtype=np.uint64), np.arange(9) * 3
    whole = uniform(seeds, positions)
    assert [float(uniform(seeds[i : i + 1], positions[i : i + 1])[0]) for i in range(9)] == whole.tolist()
    assert len(set(whole.tolist())) == 9


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    logits = np.array([0.0, 1.0, -1.0, 2.0, -np.inf], np.float32)
    temperature = 0.7
    tokens, logprobs = sample(
        np.tile(logits, (NUM, 1)),
        np.full(NUM, 3, np.uint64),
        np.arange(NUM),
        np.full(NUM, temperature, np.float32),
    )
    odds = np.exp(logits.astype(np.float64) / temperature)
    expected = odds / odds.sum()
    assert np.abs(np.bincount(tokens, minlength=5) / NUM - expected).max() < 0.01
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-6)
    assert 4 not in tokens


def test_greedy_rows_take_the_first_largest_logit_beside_sampled_ones() -> None:
    logits = np.array([[0.0, 5.0, 5.0], [1.0, 0.0, -1.0]], np.float32)
    seeds, positions = np.array([1, 2], np.uint64), np.array([4, 4])
    tokens, logprobs = sample(logits, seeds, positions, np.array([0.0, 1.0], np.float32))
    assert tokens[0] == 1
    expected = logits[0].astype(np.float64)
    np.testing.assert_allclose(logprobs[0], expected[1] - np.log(np.exp(expected).sum()), atol=1e-6)
    alone, _ = sample(logits[1:], seeds[1:], positions[1:], np.ones(1, np.float32))
    assert tokens[1] == alone[0]
