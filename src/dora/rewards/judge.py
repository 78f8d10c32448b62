"""A generative judge as a reward: a served model grades each completion by a rubric.

Grades are kept in memory, and with `cache` in a file that the workers of a task and later runs share.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import sqlite3
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import Formatter
from typing import Any

from dora.errors import InputError, RewardError
from dora.openai_server import OpenAIServer

Text = str | Sequence[Mapping[str, str]]  # or the messages of a conversation

# The number in "Score: 7", "**Score:** 7/10", "Score (7)" and "Score (0-10): 7"; not one of a range.
_NUMBER, _RANGE_END = r"-?(?:\d+(?:\.\d+)?|\.\d+)", r"\s*(?:-|\u2013|to)\s*[\d.]+\s*[)\]]"
_REMARK = rf"[(\[](?!\s*{_NUMBER}\s*[)\]])[^()\[\]]*[)\]]"
_SCORE = rf"(?i)score\W*?(?:{_REMARK}\W*?)??({_NUMBER})(?!\.?\d|{_RANGE_END})"
_CACHE_TIMEOUT_S = 30.0  # while another worker writes


class Judge:
    """The grade of a completion over `max_score`: 0 to 1."""

    def __init__(
        self,
        url: str,
        path: str,
        model: str | None = None,
        max_score: float = 10.0,
        pattern: str = _SCORE,
        max_tokens: int = 512,
        timeout_s: float = 60.0,
        concurrency: int = 8,
        cache: str | None = None,
    ) -> None:
        """`url` is that of an OpenAI-compatible API, `http://host:8000/v1`; `model` None: its first model.

        `path` is a file with the judge's instructions, its rubric. It contains `{prompt}` and
        `{completion}`, and may contain columns of the dataset, as `{answer}`; braces are doubled otherwise.
        The grade is the first group of the last match of `pattern` in the judge's reply. A completion is
        graded in at most `timeout_s`, `concurrency` at a time. Raises RewardError.
        """
        self._rubric = _read_rubric(path)
        self._max_score, self._max_tokens, self._concurrency = max_score, max_tokens, concurrency
        self._server = OpenAIServer(url, timeout_s)
        try:
            self._pattern = re.compile(pattern)
            self._model = model or self._server.first_model()
        except (re.error, InputError) as error:
            raise RewardError(f"the judge cannot start: {error}") from error
        if self._pattern.groups < 1:
            raise RewardError(f"pattern = {pattern!r} has no group for the grade; write it as (\\d+)")
        self._grades: dict[str, float] = {}
        self._cache = None if cache is None else Path(cache)
        if self._cache is not None:
            with self._open_cache(self._cache) as file:
                file.execute("create table if not exists grades (key text primary key, grade real)")

    def __call__(self, prompts: Sequence[Text], completions: Sequence[Text], **row: Any) -> list[float]:
        """Rewards of completions. Raises ValueError for a reply without a grade, RunError without a reply."""
        texts = [self._fill(i, *pair, row) for i, pair in enumerate(zip(prompts, completions, strict=True))]
        keys = [self._key(text) for text in texts]
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._grades}
        self._grades |= self._read_cache(missing)
        missing = {key: text for key, text in missing.items() if key not in self._grades}
        with ThreadPoolExecutor(self._concurrency) as threads:
            graded = dict(zip(missing, threads.map(self._grade, missing.values()), strict=True))
        self._grades |= graded
        self._write_cache(graded)
        return [self._grades[key] / self._max_score for key in keys]

    def _fill(self, index: int, prompt: Text, completion: Text, row: Mapping[str, Any]) -> str:
        columns = {name: values[index] for name, values in row.items() if isinstance(values, list | tuple)}
        try:
            return self._rubric.format(prompt=_as_text(prompt), completion=_as_text(completion), **columns)
        except (LookupError, ValueError) as error:
            names = ", ".join(sorted(columns.keys() - {"completion_ids"})) or "none"
            raise ValueError(f"the rubric names {error}, and the columns are: {names}") from error

    def _grade(self, text: str) -> float:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0.0,
            "max_tokens": self._max_tokens,
        }
        reply = self._server.post("chat/completions", body)
        try:
            content = str(reply["choices"][0]["message"]["content"])
        except (LookupError, TypeError) as error:
            raise ValueError(f"the judge's reply has no message: {str(reply)[:200]}") from error
        found = self._pattern.findall(content)
        if not found:
            raise ValueError(f"the judge gave no grade; its reply ends with {content[-200:]!r}")
        grade = float(found[-1] if isinstance(found[-1], str) else found[-1][0])
        if not (math.isfinite(grade) and 0.0 <= grade <= self._max_score):
            raise ValueError(f"the judge's grade {grade:g} is not in 0 to max_score = {self._max_score:g}")
        return grade

    def _key(self, text: str) -> str:
        content = json.dumps([self._server.url, self._model, self._pattern.pattern, self._max_tokens, text])
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def _open_cache(self, path: Path) -> contextlib.closing[sqlite3.Connection]:
        try:
            return contextlib.closing(sqlite3.connect(path, timeout=_CACHE_TIMEOUT_S, isolation_level=None))
        except sqlite3.Error as error:
            raise RewardError(f"cache = {str(path)!r} cannot be opened: {error}; name a file") from error

    def _read_cache(self, keys: Mapping[str, str]) -> dict[str, float]:
        if self._cache is None:
            return {}
        with self._open_cache(self._cache) as file:
            query = "select grade from grades where key = ?"
            found = {key: file.execute(query, (key,)).fetchone() for key in keys}
        return {key: float(row[0]) for key, row in found.items() if row is not None}

    def _write_cache(self, grades: Mapping[str, float]) -> None:
        if self._cache is not None and grades:
            with self._open_cache(self._cache) as file:
                file.executemany("insert or replace into grades values (?, ?)", grades.items())


def _read_rubric(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
        names = {name for _, name, _, _ in Formatter().parse(text) if name is not None}
    except (OSError, ValueError) as error:
        raise RewardError(
            f"path = {path!r} is no rubric: {error}; name a text file, with single braces around names only"
        ) from error
    if missing := {"prompt", "completion"} - names:
        raise RewardError(f"path = {path!r}: the rubric does not contain {{{min(missing)}}}; add it")
    return text


def _as_text(text: Text) -> str:
    if isinstance(text, str):
        return text
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in text)
