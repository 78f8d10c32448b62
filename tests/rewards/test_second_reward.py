"""The example of a second reward model gives high rewards to texts like those of its corpus."""

from __future__ import annotations

from pathlib import Path

from dora.config.load import read_config
from dora.rewards.base import RewardInput, load_reward, score

CONFIG = Path(__file__).parent.parent.parent / "examples" / "second_reward" / "second_reward.toml"


def test_texts_like_the_corpus_get_a_higher_reward() -> None:
    (task,) = read_config(CONFIG).reward_task
    reward = load_reward(task.factory, "reward_task.looks.class", task.options)
    inputs = [RewardInput("01,08:", text, (), {}) for text in ("777;777", "777777", "123456", "7", "")]
    seen, plain, strange, *short = [result.reward or 0.0 for result in score(reward, inputs)]
    assert min(seen, plain) > 0.5 > 0.1 > strange > 0.0
    assert short == [0.0, 0.0]
