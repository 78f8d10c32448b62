"""A served model as a judge."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fake_openai import FakeOpenAI

from dora.errors import RewardError, RunError
from dora.rewards.base import RewardInput, load_reward, score
from dora.rewards.judge import _SCORE, Judge

RUBRIC = "Is {completion} a good answer to {prompt}? Known: {answer}. Reply {{}} and then Score: N."


def graded(path: str, body: Any) -> Any:
    """The grade is the length of the completion; an earlier number is no grade."""
    text = body["messages"][0]["content"]
    completion = text.removeprefix("Is ").partition(" a good")[0]
    content = f"2 reasons; score 1 at first.\n**Score:** {len(completion)}/10"
    return {"choices": [{"message": {"content": "" if "silent" in text else content}}]}


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    server = FakeOpenAI(graded)
    yield server
    server.stop()


@pytest.fixture
def rubric(tmp_path: Path) -> str:
    (tmp_path / "rubric.txt").write_text(RUBRIC)
    return str(tmp_path / "rubric.txt")


def test_each_different_completion_is_graded_once(server: FakeOpenAI, rubric: str) -> None:
    judge = Judge(server.url, rubric)
    given: dict[str, Any] = {"prompts": ["1+1"] * 3, "completions": ["two", "2", "two"], "answer": ["2"] * 3}
    assert judge(**given) == [0.3, 0.1, 0.3]
    assert judge(**given) == [0.3, 0.1, 0.3]
    texts = sorted(body["messages"][0]["content"] for _, body, _ in server.requests)
    assert texts[0] == "Is 2 a good answer to 1+1? Known: 2. Reply {} and then Score: N."
    assert len(texts) == 2
    assert {(path, body["model"], body["temperature"]) for path, body, _ in server.requests} == {
        ("/v1/chat/completions", "served", 0.0)
    }


@pytest.mark.parametrize("status", [408, 429, 503])
def test_a_busy_judge_is_asked_again(
    server: FakeOpenAI, rubric: str, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr("dora.openai_server._RETRY_INTERVAL_S", 0.01)
    judge = Judge(server.url, rubric)
    server.num_failures, server.failure = 2, status
    assert judge(["1+1"], ["two"], answer=["2"]) == [0.3]


def test_the_retries_of_a_judge_share_its_time(server: FakeOpenAI, rubric: str) -> None:
    judge = Judge(server.url, rubric, timeout_s=2.0)
    server.num_failures = 1  # the judge is asked again after 1 s
    server.reply = lambda path, body: threading.Event().wait()
    began_s = time.monotonic()
    with pytest.raises(RunError, match="gives no reply within 2 s"):
        judge(["1+1"], ["two"], answer=["2"])
    assert time.monotonic() - began_s < 2.9


def test_other_workers_and_runs_find_grades_in_the_cache(
    server: FakeOpenAI, rubric: str, tmp_path: Path
) -> None:
    cache = str(tmp_path / "grades.sqlite")
    given: dict[str, Any] = {"prompts": ["a"], "completions": ["b"], "answer": ["c"]}
    assert [Judge(server.url, rubric, cache=cache)(**given) for _ in range(3)] == [[0.1]] * 3
    assert len(server.requests) == 1
    assert Judge(server.url, rubric, model="other", cache=cache)(**given) == [0.1]
    assert len(server.requests) == 2


def test_a_reply_without_a_grade_fails_its_completion(server: FakeOpenAI, rubric: str) -> None:
    options = {"url": server.url, "path": rubric, "max_score": 5.0}
    judge = load_reward("dora.rewards.judge:Judge", options=options, columns=["answer"])

    def reason(prompt: str, completion: str, **row: str) -> str:
        (found,) = score(judge, [RewardInput(prompt, completion, (), row)])
        assert found.reward is None
        return f"{found.reason} {found.detail}"

    assert "the judge gave no grade; its reply ends with ''" in reason("silent", "a", answer="b")
    assert "grade 6 is not in 0 to max_score = 5" in reason("a", "123456", answer="b")
    assert "the rubric names 'answer', and the columns are: none" in reason("a", "b")


@pytest.mark.parametrize(
    ("reply", "grade"),
    [("Score: 3", "3"), ("**Score:** -3/10", "-3"), ("score - 2.5", "2.5"), ("Score (1-9)\nSCORE=7.", "7")],
)
def test_a_minus_sign_belongs_to_the_grade(reply: str, grade: str) -> None:
    assert re.findall(_SCORE, reply)[-1] == grade


@pytest.mark.parametrize(
    "reply",
    [
        "Score (0-10): 7",
        "**Score [1 to 10]:** 7",
        "Score (0.0-10.0): 7",
        "Score (out of 10): 7",
        "Score (7): 2 errors",
        "Score: 7 (0-10)",
    ],
)
def test_a_range_is_no_grade(reply: str) -> None:
    assert re.findall(_SCORE, reply) == ["7"]
    assert re.findall(_SCORE, "Score (0-10) [12-20]\nScore: .5") == [".5"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"url": "http://127.0.0.1:9/v1"}, "/models names no model"),
        ({"path": "nowhere.txt"}, "path = 'nowhere.txt' is no rubric: .*No such file"),
        ({"pattern": "score"}, "pattern = 'score' has no group for the grade"),
        ({"pattern": "("}, "the judge cannot start: missing"),
    ],
)
def test_a_judge_that_cannot_start_is_explained(
    options: dict[str, Any], why: str, server: FakeOpenAI, rubric: str
) -> None:
    with pytest.raises(RewardError, match=why):
        Judge(**{"url": server.url, "path": rubric} | options)


@pytest.mark.parametrize(
    ("text", "why"), [("{prompt}", r"does not contain \{completion\}"), ("{prompt} {", "is no rubric")]
)
def test_a_rubric_that_cannot_be_filled_is_explained(
    text: str, why: str, server: FakeOpenAI, rubric: str
) -> None:
    Path(rubric).write_text(text)
    with pytest.raises(RewardError, match=why):
        Judge(server.url, rubric)
