"""The sample store against the journal: each row is the one that its event names, with possible values.

A row's tokens and log-probs have the digest that the journal recorded when the response finished. Advantages
are computed again from the rewards.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dora.config.schema import Config
from dora.core.actions import Action
from dora.core.events import Event, GroupScored, RequestFinished
from dora.core.types import FIRST_IMAGE_ID
from dora.errors import ConfigError, RunError
from dora.journal.reader import open_sample_store
from dora.stream.sample_db import (
    LATER_COLUMNS,
    PAYLOAD,
    count_turns,
    is_sum_of_turns,
    payload_digest,
    read_branches,
)
from dora.text import plural

FINISH_REASONS = ("stop", "length", "turn_length", "max_turns", "observation_length")
Element = TypeVar("Element", bound=np.generic)
MAX_LOGPROB = 1e-3  # a log-softmax in bf16 may round to slightly more than 0


class AuditedSample(NamedTuple):
    """All columns of one sample; a truncated one has the elements that are whole."""

    group: str
    sibling: int
    prompt_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    loss_mask: NDArray[np.uint8]  # empty: the policy sampled every token
    branches: str | None  # JSON
    turn_rewards: str | None  # JSON
    reward: float | None
    advantage: float | None
    task_rewards: str | None  # JSON
    finish_reason: str | None  # None: stored by an earlier version of DORA-RL
    payload_digest: str


def read_stored_samples(run: Path) -> Iterator[AuditedSample]:
    """All rows of the sample store, group by group. Raises InputError."""
    with open_sample_store(run) as store:
        names = {row[1] for row in store.execute("pragma table_info(samples)")}
        found = [
            "null" if name in LATER_COLUMNS and name not in names else name
            for name in ("reward", "advantage", "task_rewards", "finish_reason", *PAYLOAD)
        ]
        rows = store.execute(
            f"select group_id, sibling, {', '.join(found)} from samples order by group_id, sibling"
        )
        for group, sibling, reward, advantage, task_rewards, reason, *values in rows:
            columns = dict(zip(PAYLOAD, values, strict=True))
            yield AuditedSample(
                group,
                sibling,
                _array(columns["prompt_ids"], np.int32),
                _array(columns["token_ids"], np.int32),
                _array(columns["logprobs"], np.float32),
                _array(columns["loss_mask"] or b"", np.uint8),
                columns["branches"],
                columns["turn_rewards"],
                reward,
                advantage,
                task_rewards,
                reason,
                payload_digest(values),
            )


def _array(blob: bytes, dtype: type[Element]) -> NDArray[Element]:
    size = np.dtype(dtype).itemsize
    return np.frombuffer(blob[: len(blob) // size * size], dtype)


class SampleAudit:
    """Reads a journal once, then `close` reads the store; `findings` are sentences."""

    def __init__(self, config: Config | None, vocab_size: int | None, images: Collection[int] = ()) -> None:
        """Without `config` or `vocab_size` the checks that need them are skipped, and `skipped` says so.

        `images` are the ids of the images that the run has stored.
        """
        self.findings: list[str] = []
        self.skipped: Counter[str] = Counter()  # reason -> samples
        self.num_samples = self.num_branches = 0
        self._config, self._vocab_size, self._images = config, vocab_size, {*images}
        self._finished: dict[tuple[str, int], RequestFinished] = {}
        self._rewards: dict[str, tuple[float, ...]] = {}  # by group

    @property
    def notes(self) -> list[str]:
        """Sentences about samples that could not be checked."""
        return [f"{plural(num, 'sample')} {reason}" for reason, num in self.skipped.items()]

    def observe(self, record: Event | Action) -> None:
        match record:
            case RequestFinished(_, request):
                self._finished[str(request.group), request.sibling] = record
            case GroupScored(group, rewards):
                self._rewards[str(group)] = rewards
            case _:
                pass

    def close(self, run: Path, *, is_sealed: bool) -> None:
        """Read the store. Only a run in progress may have rows whose event is not recorded yet."""
        for group, rows in groupby(read_stored_samples(run), key=lambda row: row.group):
            siblings = [*rows]
            for row in siblings:
                self._check_row(row, is_sealed=is_sealed)
            self._check_group(group, siblings)

    def _check(self, condition: bool, sentence: str) -> None:
        if not condition:
            self.findings.append(sentence)

    def _check_row(self, row: AuditedSample, *, is_sealed: bool) -> None:
        name = f"sample {row.group}/{row.sibling}"
        self.num_samples += 1
        event = self._finished.get((row.group, row.sibling))
        if event is None:
            if is_sealed:
                self.findings.append(f"{name} is stored, and the journal has no such response")
            else:
                self.skipped["without an event yet"] += 1
            return
        if event.payload:
            self._check(
                row.payload_digest == event.payload,
                f"{name} has changed since it finished: its digest is {row.payload_digest}, "
                f"the journal has {event.payload}",
            )
        else:
            self.skipped["without a digest in the journal"] += 1
        self._check(
            event.finish_reason in FINISH_REASONS,
            f"{name} finished with the reason {event.finish_reason!r}, expected one of {FINISH_REASONS}",
        )
        masks_truncated = self._config is not None and self._config.algorithm.mask_truncated_responses
        if masks_truncated or row.finish_reason is not None:
            self._check(
                row.finish_reason == event.finish_reason,
                f"{name} is stored with the finish reason {row.finish_reason!r}, "
                f"the journal has {event.finish_reason!r}",
            )
        self._check_tokens(name, row)
        self._check_branches(name, row)

    def _check_tokens(self, name: str, row: AuditedSample) -> None:
        num_prompt, num_tokens = len(row.prompt_ids), len(row.token_ids)
        limit = math.inf
        if self._config is not None:
            has_turns = self._config.has_episodes
            longest = self._config.max_sequence_length
            limit = longest - num_prompt if has_turns else self._config.sampling.max_response_length
        self._check(
            num_prompt > 0 and 0 < num_tokens <= limit,
            f"{name} has {num_prompt} + {num_tokens} tokens; the limit of a response is {limit}",
        )
        logprobs = row.logprobs
        if len(row.loss_mask) == len(logprobs):
            logprobs = logprobs[row.loss_mask != 0]
        self._check(
            bool(np.all(np.isfinite(logprobs) & (logprobs <= MAX_LOGPROB))),
            f"{name} has a log-prob that is above 0 or not a finite number",
        )
        images = {*row.prompt_ids[row.prompt_ids >= FIRST_IMAGE_ID].tolist()}
        for id in sorted(images - self._images):
            self.findings.append(f"{name} has the image {id:08x}, which the run does not have")
        ids = np.concatenate([row.prompt_ids[row.prompt_ids < FIRST_IMAGE_ID], row.token_ids])
        if self._vocab_size is None:
            self.skipped["whose tokens need the size of the vocabulary"] += 1
        if self._vocab_size is None or not len(ids):
            return
        self._check(
            0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size,
            f"{name} has a token outside the vocabulary of {self._vocab_size}",
        )

    def _check_branches(self, name: str, row: AuditedSample) -> None:
        """Each branch has a sampled token, and starts where another sequence of the sample continues."""
        if row.branches is None:
            return
        try:
            branches = read_branches(row.branches) or []
        except (TypeError, ValueError):
            self.findings.append(f"{name} has branches that cannot be read: {row.branches!r}")
            return
        tokens = np.concatenate([row.prompt_ids, row.token_ids])
        num_prompt, stops = len(row.prompt_ids), [*(b.start for b in branches[1:]), len(tokens)]
        mask = row.loss_mask if len(row.loss_mask) else np.ones(len(row.token_ids), np.uint8)
        self.num_branches += len(branches)
        first = branches[0].start if branches else 0
        starts = [first, *stops]
        is_tree = num_prompt < first and all(a < b for a, b in pairwise(starts)) and starts[-1] == len(tokens)
        self._check(
            is_tree and all(0 <= b.parent <= b.start for b in branches),
            f"{name} has branches that are no tree of its {len(tokens)} tokens: {row.branches}",
        )
        if not is_tree:
            return
        for branch, stop in zip(branches, stops, strict=True):
            self._check(
                bool(mask[branch.start - num_prompt : stop - num_prompt].any()),
                f"{name} has a branch at token {branch.start} without a sampled token",
            )

    def _check_group(self, group: str, rows: Sequence[AuditedSample]) -> None:
        config = self._config
        if config is None or not config.has_episodes:
            is_same = len({row.prompt_ids.tobytes() for row in rows}) == 1
            self._check(is_same, f"the samples of group {group} have different prompts")
        rewards = self._rewards.get(group)
        if rewards is None or [row.sibling for row in rows] != [*range(len(rewards))]:
            return  # not scored; a missing sample is a finding against C2
        for row, reward in zip(rows, rewards, strict=True):
            self._check_reward(row, reward)
        if config is None:
            self.skipped["whose advantage needs config.toml"] += len(rows)
            return
        expected: Sequence[float | None] = [None] * len(rows)
        if not group.startswith("-"):  # a held-out prompt has no advantages
            lengths = [len(row.token_ids) for row in rows]
            try:
                expected = config.advantage_settings.group_advantages(rewards, lengths)
            except (ConfigError, RunError) as error:  # the user's own estimator is not there, or fails
                self.skipped[f"whose advantage cannot be computed ({error})"] += len(rows)
                return
        estimator = config.algorithm.adv_estimator
        hint = f" by {estimator} as its file is now" if ":" in estimator else ""
        for row, advantage in zip(rows, expected, strict=True):
            self._check(
                _is_close(row.advantage, advantage),
                f"sample {group}/{row.sibling} has the advantage {row.advantage}, expected {advantage}{hint}",
            )

    def _check_reward(self, row: AuditedSample, reward: float) -> None:
        name = f"sample {row.group}/{row.sibling}"
        self._check(_is_close(row.reward, reward), f"{name} has the reward {row.reward}, scored {reward}")
        try:
            parts = {task: float(own) for task, own in json.loads(row.task_rewards or "{}").items()}
        except (AttributeError, TypeError, ValueError):
            self.findings.append(f"{name} has rewards by task that cannot be read: {row.task_rewards!r}")
            return
        self._check_turn_rewards(name, row, reward)
        if not parts or self._config is None:
            return
        weights = self._config.reward_weights
        self._check(
            {*parts} == {*weights}
            and _is_close(sum(weights[task] * value for task, value in parts.items()), reward),
            f"{name} has the rewards {parts} by task, which do not give its reward {reward}",
        )

    def _check_turn_rewards(self, name: str, row: AuditedSample, reward: float) -> None:
        if row.turn_rewards is None:
            return
        try:
            found = json.loads(row.turn_rewards)
            is_sum = isinstance(found, list) and is_sum_of_turns(found, reward)
        except (TypeError, ValueError, OverflowError):
            is_sum, found = False, row.turn_rewards
        self._check(is_sum, f"{name} has the rewards {found} by turn, which do not give its reward {reward}")
        if is_sum and row.branches is None:  # each turn ends where an observation begins, or at the end
            num_turns = count_turns(row.loss_mask if len(row.loss_mask) else None, 0, ())
            of_turns = f"{plural(len(found), 'reward')} by turn for {plural(num_turns, 'turn')}"
            self._check(len(found) == num_turns, f"{name} has {of_turns}")


def _is_close(stored: float | None, expected: float | None) -> bool:
    if stored is None or expected is None:
        return stored is expected
    return math.isclose(stored, expected, rel_tol=1e-6, abs_tol=1e-9)
