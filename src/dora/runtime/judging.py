"""A reward task in its worker: questions and token ids of whole groups in, a reward for each answer out.

A question is the prompt with the other columns of its dataset row, as JSON; the first answer of a group
brings it, for the others have the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dora.core.records import GroupId
from dora.data.dataset import Prompt
from dora.data.tokenizer import Tokenizer
from dora.rewards.base import Answer, judge, load_reward
from dora.runtime.consumer import NoResult
from dora.stream.batch import Batch
from dora.stream.feed import QUESTION, reward_column
from dora.stream.fields import Given

REWARD = "reward"  # the task of the section [reward]


@dataclass(frozen=True)
class JudgeSpec:
    """A reward function or class, named by the setting `key`; the tokenizer of `model` decodes answers.

    `columns` of the dataset, None where they are not known, are what it is given beside them.
    """

    name: str
    function: str
    key: str
    model: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    columns: tuple[str, ...] | None = None


def question_of(prompt: Prompt, columns: Mapping[str, Any]) -> bytes:
    """What judges are told beside an answer. What JSON cannot say, a date or a decimal, becomes text."""
    return json.dumps([prompt, columns], default=str).encode()


class Judge:
    """A reward function at the stream."""

    def __init__(self, spec: JudgeSpec, still: Callable[[], None]) -> None:
        """`still` is called after each answer that is judged alone. Raises RewardError."""
        self._name, self._still = spec.name, still
        self._function = load_reward(spec.function, spec.key, spec.options, spec.columns)
        self._decode = Tokenizer(spec.model).decode

    def do(self, batch: Batch) -> Given:
        """Raises NoResult where an answer cannot be judged."""
        rewards = []
        for outcome in judge(self._function, self._answers(batch)):
            if outcome.reward is None:
                whose = "" if self._name == REWARD else f"{self._name}: "
                raise NoResult(whose + outcome.reason, outcome.detail)
            rewards.append(outcome.reward)
            self._still()
        return {reward_column(self._name): np.array(rewards, np.float64)}

    def _answers(self, batch: Batch) -> list[Answer]:
        questions: dict[GroupId, tuple[Prompt, dict[str, Any]]] = {}
        answers = []
        for group, text, ids in zip(batch.groups, batch.rows(QUESTION), batch.rows("token_ids"), strict=True):
            if group not in questions:
                questions[group] = json.loads(text.tobytes())
            prompt, columns = questions[group]
            token_ids = ids.tolist()
            answers.append(Answer(prompt, self._decode(token_ids), token_ids, columns))
        return answers
