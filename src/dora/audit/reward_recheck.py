"""`dora audit RUN --deep N`: score N responses again with the run's reward function.

Each response is scored twice: where both rewards agree with each other, they must agree with the recorded
one. A function that gives two rewards for one response is not pure, and cannot be checked.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dora.audit.logprob_recheck import spread
from dora.config.load import read_run_config
from dora.core.types import GroupId
from dora.data.chat import PromptEncoder
from dora.data.dataset import Dataset
from dora.data.tokenizer import Tokenizer
from dora.errors import InputError
from dora.journal.reader import SampleRow, read_responses, read_samples
from dora.model.pretrained import load_config
from dora.rewards.base import RewardInput, load_reward, score
from dora.runtime.run_setup import image_reader, template_of, training_prompts
from dora.runtime.scoring.reward_manager import RewardTask, reward_tasks
from dora.runtime.scoring.reward_worker import encode_prompt_row
from dora.text import plural

MAX_DIFFERENCE = 1e-9  # relative and absolute


@dataclass(frozen=True)
class RewardRecheck:
    """Sentences about rewards that differ, and why others could not be checked."""

    num_checked: int  # responses
    findings: tuple[str, ...]
    unchecked: tuple[str, ...]


def main(run: Path, num: int) -> int:
    """Print the verdict and the findings; exit code 1 if a reward differs."""
    result = check(run, num)
    verdict = "VIOLATED" if result.findings else "ok" if result.num_checked else "not checked"
    print(f"rewards {verdict}  {plural(result.num_checked, 'response')} scored again")
    for finding in result.findings:
        print(f"   {finding}")
    for sentence in result.unchecked:
        print(f"   not checked: {sentence}")
    return 1 if result.findings else 0


def check(run: Path, num: int) -> RewardRecheck:
    """Score up to `num` responses of the run again. Raises InputError if its files cannot be read."""
    config = read_run_config(run)
    if config.service.agents or (config.has_episodes and not config.reward_weights):
        return RewardRecheck(0, (), ("environments and agents gave the rewards",))
    scored = [row for row in read_samples(run).values() if row.reward is not None and row.group[0] != "-"]
    rows = spread(scored, num)
    try:
        tokenizer = Tokenizer(Path(config.model.path))
        images = image_reader(tokenizer, load_config(Path(config.model.path)))
        encoder = PromptEncoder(tokenizer, template_of(config), images)
        dataset = training_prompts(config, run, encoder)
        tasks = reward_tasks(config, dataset.columns)
        if external := [task.name for task in tasks if task.is_external]:
            return RewardRecheck(0, (), (f"the service received the rewards of {', '.join(external)}",))
        inputs = _inputs(run, rows, dataset, tokenizer)
        first, second = (_score(tasks, inputs) for _ in range(2))
    except InputError as error:
        return RewardRecheck(0, (), (str(error),))
    findings, num_impure = [], 0
    for row, reward, again in zip(rows, first, second, strict=True):
        assert row.reward is not None
        if not _is_equal(reward, again):
            num_impure += 1
        elif not _is_equal(reward, row.reward):
            name = f"sample {row.group}/{row.sibling}"
            findings.append(f"{name} has the reward {row.reward}, and scored again {reward}")
    unchecked: tuple[str, ...] = ()
    if num_impure:
        unchecked = (f"{plural(num_impure, 'response')} without a reward, or with another one in each call",)
    return RewardRecheck(len(rows) - num_impure, tuple(findings), unchecked)


def _inputs(run: Path, rows: list[SampleRow], dataset: Dataset, tokenizer: Tokenizer) -> list[RewardInput]:
    """What a reward function gets. Raises InputError for a response that cannot be read."""
    inputs = []
    for row, response in zip(rows, read_responses(run, rows), strict=True):
        if response is None:
            raise InputError(f"sample {row.group}/{row.sibling} is truncated")
        position = GroupId.parse(row.group).row
        if position >= len(dataset):
            raise InputError(f"sample {row.group}/{row.sibling}: the dataset has {len(dataset)} rows")
        ids = [*response.token_ids]
        try:
            text = tokenizer.decode(ids)
        except (OverflowError, ValueError) as error:
            raise InputError(f"sample {row.group}/{row.sibling} has tokens that are no ids") from error
        prompt_row = encode_prompt_row(dataset.prompt(position), dataset.fields(position))
        prompt, fields = json.loads(prompt_row)
        inputs.append(RewardInput(prompt, text, ids, fields, response.finish_reason))
    return inputs


def _score(tasks: list[RewardTask], inputs: list[RewardInput]) -> list[float]:
    """The weighted sum of the rewards of all tasks, for each response; NaN if one could not be scored."""
    totals = [0.0] * len(inputs)
    for task in tasks:
        spec = task.reward
        function: Any = load_reward(spec.function, spec.key, spec.options, spec.columns)
        for i, item in enumerate(inputs):  # one at a time: the group of a response is not complete here
            (result,) = score(function, [item])
            totals[i] += task.weight * (math.nan if result.reward is None else result.reward)
    return totals


def _is_equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=MAX_DIFFERENCE, abs_tol=MAX_DIFFERENCE)
