"""A reward function in a worker process: scores groups of the sample stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dora.core.types import GroupId
from dora.data.dataset import Prompt
from dora.data.tokenizer import Tokenizer
from dora.rewards.base import RewardInput, load_reward, score
from dora.runtime.process.stream_workers import TaskError
from dora.stream.run_stream import PROMPT_ROW
from dora.stream.schema import StreamBatch

REWARD = "reward"  # name of the task of the section [reward]


@dataclass(frozen=True)
class RewardSpec:
    """A reward function or class: the value `function` of the setting `key`, with `options` for a class.

    The tokenizer of the folder `model` decodes responses. `columns` are those of all datasets; None: unknown.
    `missing` maps each other column to a dataset without it.
    """

    name: str  # of the reward task
    function: str
    key: str
    model: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    columns: tuple[str, ...] | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


def encode_prompt_row(prompt: Prompt, columns: Mapping[str, Any]) -> bytes:
    """Encode a prompt and the other columns of its dataset row as JSON.

    A value without a JSON type, such as a date or a decimal, becomes a string.
    """
    return json.dumps([prompt, columns], default=str).encode()


class RewardWorker:
    """A `ConsumerTask` that scores with a reward function."""

    def __init__(self, spec: RewardSpec, restart_timeout: Callable[[], None]) -> None:
        """`restart_timeout` is called after each response that is scored in a call of its own.

        Raises RewardError if the function cannot be loaded.
        """
        self._name, self._restart_timeout = spec.name, restart_timeout
        self._function = load_reward(spec.function, spec.key, spec.options, spec.columns, spec.missing)
        self._decode = Tokenizer(spec.model).decode

    def process(self, batch: StreamBatch) -> list[float]:
        """The rewards of all responses. Raises TaskError if one cannot be scored."""
        rewards: list[float] = []
        for result in score(self._function, self._inputs(batch)):
            if result.reward is None:
                task = "" if self._name == REWARD else f"{self._name}: "
                raise TaskError(task + result.reason, result.detail)
            rewards.append(result.reward)
            self._restart_timeout()
        return rewards

    def _inputs(self, batch: StreamBatch) -> list[RewardInput]:
        prompt_rows: dict[GroupId, tuple[Prompt, dict[str, Any]]] = {}
        inputs = []
        rows = zip(batch.groups, batch.rows(PROMPT_ROW), batch.rows("token_ids"), strict=True)
        for group, prompt_row, ids in rows:
            if group not in prompt_rows:  # only the first row of a group has it
                prompt_rows[group] = json.loads(prompt_row.tobytes())
            prompt, columns = prompt_rows[group]
            token_ids = ids.tolist()
            inputs.append(RewardInput(prompt, self._decode(token_ids), token_ids, columns))
        return inputs
