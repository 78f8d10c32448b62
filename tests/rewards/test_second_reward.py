"""The example of a second reward model: it likes what looks like the texts it was made of."""

from __future__ import annotations

from pathlib import Path

from dora.rewards.base import Answer, judge, load_reward
from dora.settings import read

CONFIG = Path(__file__).parent.parent.parent / "examples" / "second_reward" / "second_reward.toml"


def test_it_is_one_class_and_one_table_and_likes_what_it_has_seen() -> None:
    (task,) = read(CONFIG).task
    reward = load_reward(task.factory, "task.looks.class", task.options)
    answers = [Answer("01,08:", text, (), {}) for text in ("777;777", "777777", "123456", "7", "")]
    seen, plain, strange, *short = [outcome.reward or 0.0 for outcome in judge(reward, answers)]
    assert min(seen, plain) > 0.5 > 0.1 > strange > 0.0
    assert short == [0.0, 0.0]
