"""A session is one episode of one version, with repeated, late, invalid and missing requests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.service.fake_run import FakeRun, disconnect_after, error_message

from dora.core.types import RequestId
from dora.envs.episode import (
    EpisodeBranched,
    EpisodeEnded,
    EpisodeFailed,
    EpisodeId,
    EpisodeObservation,
    EpisodeStarted,
    PolicyTurn,
)
from dora.runtime.process.supervisor import DriverClock
from dora.runtime.rollout.agent_sessions import MAX_ENDED, AgentSessions, ChatMessage, TurnRequest
from dora.runtime.run_dir import SESSIONS
from dora.service import agents

EPISODE = EpisodeId(RequestId(0, 3, 1), 0)
USER = {"role": "user", "content": "13:"}
NEXT = {"role": "user", "content": ","}
CHAT = "/v1/chat/completions"


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path, service__agents="true")


def ids(run: FakeRun, text: str) -> tuple[int, ...]:
    return tuple(run.setup.tokenizer.encode(text))


def turn_of(run: FakeRun, text: str, number: int = 0, num_left: int = 20, reason: str = "stop") -> PolicyTurn:
    return PolicyTurn(EPISODE, number, [*ids(run, text)], reason, num_left)


def generate(run: FakeRun, text: str) -> None:
    """The model generates the first turn."""
    run.finish_turn(turn_of(run, text))


def complete(run: FakeRun, messages: Sequence[Any], session: str = "a", **others: Any) -> Any:
    """Request a turn that the model does not generate."""
    return run.call("POST", CHAT, json={"messages": messages, **others}, headers={"Dora-Session": session})


def complete_with(run: FakeRun, messages: Sequence[Any], text: str, **turn: Any) -> Any:
    """Request a turn; the model generates `text`."""
    return run.ask(CHAT, {"messages": messages}, turn_of(run, text, **turn), **{"Dora-Session": "a"})


def open_session(run: FakeRun) -> dict[str, Any]:
    """Open the session "a" for a waiting episode."""
    run.agents.start(EPISODE, version=4)
    opened: dict[str, Any] = run.call("PUT", "/v1/sessions/a").json()
    return opened


def pass_time(run: FakeRun, seconds: float) -> None:
    """Advance the time during which the driver was running."""
    run.agents._clock._ran_s += seconds
    run.agents.check_deadlines()


def test_messages_may_have_the_fields_of_openai_clients(run: FakeRun) -> None:
    open_session(run)
    complete_with(run, [USER | {"name": "bob"}], "77")
    run.replies()
    answer = {"role": "assistant", "content": "77", "refusal": None, "tool_calls": None, "parsed": None}
    tool = {"role": "tool", "content": "1", "tool_call_id": "call_1"}
    assert complete_with(run, [USER, answer, tool], "8", number=1).status_code == 200
    assert run.replies() == [EpisodeObservation(EPISODE, 0, ids(run, "1"))]
    assert "seed" in error_message(complete(run, [USER], seed=1), 422)  # which would have no effect


def test_messages_of_too_many_characters_are_refused_before_they_are_tokenized(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_session(run)
    monkeypatch.setattr(type(run.setup.prompts), "encode", lambda *_: pytest.fail("it was tokenized"))
    assert "9000 characters" in error_message(complete(run, [{"role": "user", "content": "1" * 9000}]), 400)
    monkeypatch.undo()
    answer = complete_with(run, [USER], "77").json()["choices"][0]["message"]
    monkeypatch.setattr(
        type(run.setup.prompts), "encode_observation", lambda *_: pytest.fail("it was tokenized")
    )
    assert "at most 640" in error_message(
        complete(run, [USER, answer, {"role": "user", "content": "1" * 9000}]), 400
    )


def test_an_episode_runs_from_its_prompt_to_its_reward(run: FakeRun) -> None:
    opened = open_session(run)
    assert (opened["version"], opened["group"], opened["sibling"]) == (4, "0/3", 1)
    assert (opened["prompt"], opened["fields"]) == ("13:", {})
    first = complete_with(run, [USER], "77").json()
    assert run.replies() == [EpisodeStarted(EPISODE, ids(run, "13:"), None)]
    (choice,) = first["choices"]
    assert choice["message"] == {"role": "assistant", "content": "77"}
    assert (choice["finish_reason"], choice["token_ids"]) == ("stop", [*ids(run, "77")])
    assert (first["version"], first["num_tokens_left"]) == (4, 20)
    second = complete_with(run, [USER, choice["message"], NEXT], "8", number=1, reason="turn_length").json()
    assert run.replies() == [EpisodeObservation(EPISODE, 0, ids(run, ","))]
    assert second["choices"][0]["finish_reason"] == "length"
    assert second["usage"] == {"prompt_tokens": 6, "completion_tokens": 1, "total_tokens": 7}
    for _ in range(2):  # a repeated request has the same response
        ended = run.call("POST", "/v1/sessions/a/reward", json={"reward": 1})
        assert ended.json() == {"session": "a", "end_reason": "finished with reward 1.0"}
    assert run.replies() == [EpisodeEnded(EPISODE, 1, 1.0)]
    run.agents.release(EPISODE)
    assert run.call("POST", "/v1/sessions/a/reward", json={"reward": 1.0}).status_code == 200
    assert "finished" in error_message(run.call("POST", "/v1/sessions/a/reward", json={"reward": 2.0}), 410)
    assert "finished" in error_message(complete(run, [USER]), 410)
    assert run.replies() == []


def test_a_reward_may_have_its_parts_by_turn(run: FakeRun) -> None:
    open_session(run)
    answer = complete_with(run, [USER], "77").json()["choices"][0]["message"]
    run.replies()
    complete_with(run, [USER, answer, NEXT], "8", number=1)
    run.replies()
    for body, reason in (
        ({"reward": 1.0, "turn_rewards": [1.0]}, "1 turn_rewards for 2 turns; post one for each"),
        (
            {"reward": 0.5, "turn_rewards": [0.5, 0.5]},
            "turn_rewards do not give the reward 0.5",
        ),
        ({"reward": 1.0, "turn_rewards": [1e9, -1e9]}, "turn_rewards"),
    ):
        refused = run.call("POST", "/v1/sessions/a/reward", json=body)
        assert refused.status_code in (400, 422)
        assert reason in error_message(refused, refused.status_code)
    posted = run.call("POST", "/v1/sessions/a/reward", json={"reward": 1.0, "turn_rewards": [0.25, 0.75]})
    assert posted.json() == {"session": "a", "end_reason": "finished with reward 1.0"}
    assert run.replies() == [EpisodeEnded(EPISODE, 1, 1.0, (0.25, 0.75))]


def test_a_repeated_request_has_the_same_response(run: FakeRun) -> None:
    open_session(run)
    assert run.call("PUT", "/v1/sessions/a").json()["session"] == "a"
    first = complete_with(run, [USER], "77").json()
    again = complete(run, [USER]).json()
    assert again["choices"] == first["choices"]
    assert len(run.replies()) == 1
    assert run.call("GET", "/v1/sessions/a").json()["num_turns"] == 1


def test_the_oldest_version_is_opened_first(run: FakeRun) -> None:
    for sibling, version in enumerate((2, 1, 1, 3)):
        run.agents.start(EpisodeId(RequestId(0, 0, sibling), 0), version)
    siblings = [run.call("PUT", f"/v1/sessions/{name}").json()["sibling"] for name in "abcd"]
    assert siblings == [1, 2, 0, 3]
    assert run.call("GET", "/v1/status").json()["agents"] == {
        "sessions": 4,
        "waiting": 0,
        "branches": 0,
        "retokenized": 0,
    }
    assert run.call("GET", "/v1/status").json()["awaited_inputs"] == ["agents"]
    assert "dora_sessions 4.0" in run.call("GET", "/metrics").text
    assert "try again" in error_message(run.call("PUT", "/v1/sessions/e"), 429)


def test_a_waiting_agent_gets_the_next_episode(run: FakeRun) -> None:
    async def requests(http: Any) -> Any:
        response = asyncio.ensure_future(http.put("/v1/sessions/a", params={"wait_s": 60}))
        await http.get("/health")
        run.agents.start(EPISODE, version=0)
        run.process()
        return await response

    assert run.call_many(requests).json()["version"] == 0


def test_the_episode_of_an_agent_without_requests_fails(run: FakeRun) -> None:
    open_session(run)
    complete_with(run, [USER], "7")
    pass_time(run, 59)
    run.call("GET", "/v1/sessions/a")  # renews the lease, as during a long tool call
    pass_time(run, 59)
    assert len(run.replies()) == 1
    pass_time(run, 2)
    assert run.replies() == [EpisodeFailed(EPISODE, "session expired")]
    for _ in range(2):
        assert "session expired" in error_message(complete(run, [USER]), 410)
        assert "session expired" in error_message(run.call("PUT", "/v1/sessions/a"), 410)
        run.agents.release(EPISODE)


def test_an_expired_session_without_a_turn_leaves_its_episode_to_the_next_agent(run: FakeRun) -> None:
    open_session(run)
    pass_time(run, 61)
    assert "session expired" in error_message(complete(run, [USER]), 410)
    assert run.call("PUT", "/v1/sessions/b").json()["group"] == "0/3"
    assert run.replies() == []


def test_a_disconnected_agent_gets_no_episode(run: FakeRun) -> None:
    assert disconnect_after(run.app, "PUT", "/v1/sessions/a", wait_s="60") == 429
    run.agents.start(EPISODE, version=0)
    run.process()
    assert run.agents.num_waiting == 1


def test_a_disconnected_agent_may_repeat_its_request(run: FakeRun) -> None:
    open_session(run)
    assert disconnect_after(run.app, "POST", CHAT, {"messages": [USER]}, {"dora-session": "a"}) == 429
    generate(run, "77")
    assert complete(run, [USER]).json()["choices"][0]["message"]["content"] == "77"


def test_a_lease_is_suspended_while_the_model_generates(run: FakeRun) -> None:
    open_session(run)
    run.agents.complete("a", TurnRequest((message(USER),)))
    pass_time(run, 1000)
    assert len(run.replies()) == 1
    generate(run, "7")
    pass_time(run, 61)
    assert run.replies() == [EpisodeFailed(EPISODE, "session expired")]


def message(fields: dict[str, str]) -> ChatMessage:
    return ChatMessage(fields["role"], fields["content"])


def test_an_episode_restarts_in_another_session_after_an_engine_is_lost(run: FakeRun) -> None:
    open_session(run)
    complete_with(run, [USER], "77")
    run.agents.release(EPISODE)
    run.agents.start(EPISODE._replace(attempt=1), version=4)
    assert "its engine was lost" in error_message(complete(run, [USER]), 410)
    assert run.call("PUT", "/v1/sessions/b").json()["version"] == 4


def test_a_name_opens_no_other_episode_after_a_resume(run: FakeRun) -> None:
    open_session(run)
    run.context.agent_sessions = resumed = AgentSessions(run.setup, run.messages, DriverClock(), print)
    resumed.start(EPISODE, version=4)
    assert "the run was resumed" in error_message(complete(run, [USER]), 410)
    for path in ("chat/completions", "completions"):
        body = {"messages": [USER]} if path.startswith("chat") else {"prompt": "13:"}
        assert "the run was resumed" in error_message(run.call("POST", f"/s/a/v1/{path}", json=body), 410)
    assert run.call("PUT", "/v1/sessions/b").status_code == 200


def resume(run: FakeRun) -> None:
    """The sessions of a process that resumes the run, with one waiting episode."""
    run.context.agent_sessions = AgentSessions(run.setup, run.messages, DriverClock(), print)
    run.agents.start(EPISODE, version=4)


def test_the_name_of_a_refused_first_request_is_not_recorded(run: FakeRun) -> None:
    run.agents.start(EPISODE, version=4)
    for _ in range(2):
        refused = run.call("POST", "/s/a/v1/completions", json={"prompt": "1" * 9000})
        assert "9000 characters" in error_message(refused, 400)
    assert not (run.setup.out / SESSIONS).exists()
    resume(run)
    run.ask("/s/a/v1/completions", {"prompt": "13:"}, turn_of(run, "7"))
    assert (run.setup.out / SESSIONS).read_text().split() == ["a"]
    resume(run)
    assert "the run was resumed" in error_message(complete(run, [USER]), 410)


def test_a_resumed_run_knows_all_earlier_sessions(run: FakeRun) -> None:
    (run.setup.out / SESSIONS).write_text("\n".join(["a", *(f"b{i}" for i in range(MAX_ENDED))]))
    resume(run)
    assert "the run was resumed" in error_message(run.call("PUT", "/v1/sessions/a"), 410)


def test_a_session_whose_name_cannot_be_recorded_is_opened_by_a_repeated_request(run: FakeRun) -> None:
    file = run.setup.out / SESSIONS
    file.mkdir()  # writing fails as on a full disk
    run.agents.start(EPISODE, version=4)
    for method, path, body in (
        ("PUT", "/v1/sessions/a", None),
        ("POST", "/s/b/v1/completions", {"prompt": "13:"}),
    ):
        if method == "POST":
            run.agents.start(EpisodeId(RequestId(0, 3, 0), 0), version=4)
        response = run.call(method, path, json=body)
        assert (response.status_code, run.replies()) == (503, [])
        assert "free disk space" in response.text
    file.rmdir()
    assert run.call("PUT", "/v1/sessions/a").json()["sibling"] == 1
    assert run.call("PUT", "/v1/sessions/b").json()["sibling"] == 0
    assert file.read_text().split() == ["a", "b"]


@pytest.mark.parametrize("fsync", ["true", "false"])
def test_names_survive_a_loss_of_power_if_the_journal_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: str
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").read_text()))
    open_session(FakeRun(tmp_path, service__agents="true", journal__fsync=fsync))
    assert synced == (["\na"] if fsync == "true" else [])


def test_an_abandoned_episode_fails_only_if_it_has_started(run: FakeRun) -> None:
    open_session(run)
    run.call("DELETE", "/v1/sessions/a")
    assert run.call("PUT", "/v1/sessions/b").status_code == 200
    assert "abandoned" in error_message(run.call("PUT", "/v1/sessions/a"), 410)
    run.agents.complete("b", TurnRequest((message(USER),), 5))
    for _ in range(2):  # the request is repeated
        assert run.call("DELETE", "/v1/sessions/b").json()["end_reason"] == "session abandoned by its agent"
    generate(run, "7")
    assert run.replies() == [
        EpisodeStarted(EPISODE, ids(run, "13:"), 5),
        EpisodeFailed(EPISODE, "session abandoned by its agent"),
    ]


@pytest.mark.parametrize(
    ("messages", "prompt", "parent"),
    [
        ([NEXT, {"role": "assistant", "content": "77"}, NEXT], ",77,", 0),
        ([USER, {"role": "assistant", "content": "78"}, NEXT], "13:78,", 4),
        ([USER, NEXT], "13:,", 3),
        ([USER, {"role": "assistant", "content": "7"}, {"role": "user", "content": "7"}], "13:77", 5),
    ],
)
def test_messages_with_another_history_are_a_branch(
    run: FakeRun, messages: list[Any], prompt: str, parent: int
) -> None:
    open_session(run)
    complete_with(run, [USER], "77", reason="turn_length")
    run.replies()
    assert complete_with(run, messages, "8", number=1).json()["usage"]["prompt_tokens"] == len(prompt)
    new = len(prompt) - parent
    assert run.replies() == [EpisodeBranched(EPISODE, 0, ids(run, prompt), new, parent)]
    first = {"role": "assistant", "content": "77"}
    complete_with(run, [USER, first, NEXT], "9", number=2)  # back to the first conversation
    assert run.replies() == [EpisodeBranched(EPISODE, 1, ids(run, "13:77,"), 1, 5)]
    assert (run.agents.num_branches, run.agents.num_retokenized) == (2, 0)


def test_a_text_that_begins_as_the_turn_before_it_ended_is_whole_in_a_branch(run: FakeRun) -> None:
    open_session(run)
    turns = [{"role": "assistant", "content": text} for text in "78"]
    complete_with(run, [USER, NEXT], "7", reason="turn_length")
    run.replies()
    complete_with(run, [USER, NEXT, turns[0], NEXT], "8", number=1)
    run.replies()
    changed = {"role": "user", "content": "7,"}
    complete_with(run, [USER, NEXT, turns[0], changed, turns[1], NEXT], "9", number=2)
    assert run.replies() == [EpisodeBranched(EPISODE, 1, ids(run, "13:,77,8,"), 4, 5)]


def test_turns_of_the_same_text_keep_their_own_tokens(run: FakeRun) -> None:
    open_session(run)
    answer, end = {"role": "assistant", "content": "7"}, run.setup.tokenizer.eos_id
    complete_with(run, [USER], "7", reason="turn_length")
    run.replies()
    again = replace(turn_of(run, "7", 1), token_ids=[*ids(run, "7"), end])
    body = {"messages": [USER, answer, NEXT]}
    run.ask(CHAT, body, again, **{"Dora-Session": "a"})
    run.replies()
    complete_with(run, [USER, answer, {"role": "user", "content": "3"}], "8", number=2)
    assert run.replies() == [EpisodeBranched(EPISODE, 1, ids(run, "13:73"), 1, 4)]
    assert run.agents.num_retokenized == 0


def test_a_turn_whose_tokens_are_no_longer_in_the_conversation_is_counted(run: FakeRun) -> None:
    """Also one before the history that is continued."""
    open_session(run)
    complete_with(run, [USER], "77", reason="turn_length")
    answer = {"role": "assistant", "content": "77"}
    run.agents._sessions["a"].token_ids[0] += 1  # which no rule of a session does
    run.replies()
    complete_with(run, [USER, answer, NEXT], "8", number=1)
    assert run.agents.num_retokenized == 1


def test_text_completions_continue_the_sampled_tokens(run: FakeRun) -> None:
    run.agents.start(EPISODE, version=4)

    def complete_text(prompt: str, answer: str, number: int) -> Any:
        return run.ask("/s/a/v1/completions", {"prompt": prompt}, turn_of(run, answer, number)).json()

    first = complete_text("13:", "77", 0)
    assert (first["object"], first["choices"][0]["text"]) == ("text_completion", "77")
    assert run.replies() == [EpisodeStarted(EPISODE, ids(run, "13:"), None)]
    assert complete_text("13:77,", "8", 1)["usage"]["prompt_tokens"] == 6
    assert run.replies() == [EpisodeObservation(EPISODE, 0, ids(run, ","))]
    again = run.call("POST", "/s/a/v1/completions", json={"prompt": "13:77,"}).json()
    assert (again["choices"][0]["text"], run.replies()) == ("8", [])
    complete_text("13:8", "9", 2)
    assert run.replies() == [EpisodeBranched(EPISODE, 1, ids(run, "13:8"), 1, 3)]
    for change in ({"echo": True}, {"n": 2}, {"logprobs": 1}, {"stream": True}, {"prompt": ["1"]}):
        error_message(run.call("POST", "/s/a/v1/completions", json={"prompt": "1", **change}), 422)


def test_a_text_completion_of_the_text_so_far_continues_the_sampled_tokens(run: FakeRun) -> None:
    """Also if the turn has other tokens than its text has; here it has an end token."""
    run.agents.start(EPISODE, version=4)
    sampled = [*ids(run, "77"), run.setup.tokenizer.eos_id]
    run.ask("/s/a/v1/completions", {"prompt": "13:"}, replace(turn_of(run, ""), token_ids=sampled))
    run.replies()
    run.ask("/s/a/v1/completions", {"prompt": "13:77"}, turn_of(run, "8", 1))
    assert run.replies() == [EpisodeBranched(EPISODE, 0, (*ids(run, "13:"), *sampled), 0, 6)]


def test_a_text_continues_the_latest_of_the_conversations_with_this_text(run: FakeRun) -> None:
    """Both have the text "13:77"; the tokens of the latest have an end token, too."""
    run.agents.start(EPISODE, version=4)
    run.ask("/s/a/v1/completions", {"prompt": "13:"}, turn_of(run, "77", reason="turn_length"))
    run.replies()
    latest = replace(turn_of(run, "", 1), token_ids=[*ids(run, "7"), run.setup.tokenizer.eos_id])
    run.ask("/s/a/v1/completions", {"prompt": "13:7"}, latest)
    run.replies()
    run.ask("/s/a/v1/completions", {"prompt": "13:77,"}, turn_of(run, "8", 2))
    assert run.replies() == [EpisodeObservation(EPISODE, 1, ids(run, ","))]


def test_a_repeated_text_completion_without_text_has_the_same_response(run: FakeRun) -> None:
    run.agents.start(EPISODE, version=4)
    end = replace(turn_of(run, ""), token_ids=[run.setup.tokenizer.eos_id])
    first = run.ask("/s/a/v1/completions", {"prompt": "13:"}, end).json()
    run.replies()
    again = run.call("POST", "/s/a/v1/completions", json={"prompt": "13:"}).json()
    assert (again["id"], again["choices"], run.replies()) == (first["id"], first["choices"], [])


def test_a_run_that_cannot_train_on_branches_refuses_them(run: FakeRun) -> None:
    run.agents._no_branches = "the run has trainer.routing_replay = true"
    open_session(run)
    complete_with(run, [USER], "77")
    assert "routing_replay = true, so it trains on no branches" in error_message(
        complete(run, [USER, NEXT]), 409
    )
    last = [USER, {"role": "assistant", "content": "77"}]
    assert "has role assistant" in error_message(complete(run, last), 400)
    assert len(run.replies()) == 1


def test_messages_that_do_not_fit_are_refused_and_the_reward_is_still_accepted(run: FakeRun) -> None:
    open_session(run)
    answer = {"role": "assistant", "content": "77"}
    complete_with(run, [USER], "77", num_left=2, reason="length")
    run.replies()
    message = error_message(complete(run, [USER, answer, {"role": "tool", "content": "12"}]), 409)
    assert "have 2 tokens, and the episode may only have 2 more" in message
    assert run.call("POST", "/v1/sessions/a/reward", json={"reward": None}).status_code == 200
    assert run.replies() == [EpisodeEnded(EPISODE, 0, None)]


def test_a_second_different_request_during_a_turn_is_refused(run: FakeRun) -> None:
    open_session(run)
    run.agents.complete("a", TurnRequest((message(USER),)))
    assert "is generating the turn for an earlier call" in error_message(complete(run, [NEXT]), 409)
    assert "has not generated a turn yet" in error_message(
        run.call("POST", "/v1/sessions/a/reward", json={"reward": 1}), 409
    )


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ({"messages": []}, 422, "at least 1"),
        ({"messages": [{"role": "user", "content": ""}]}, 400, "0 tokens"),
        ({"messages": [{"role": "user", "content": "123456789"}]}, 400, "9 tokens; they must have 1 to"),
        ({"messages": [{"role": "user", "content": "\U0001f600"}]}, 400, "vocabulary"),
        ({"messages": [{"role": "robot", "content": "1"}]}, 422, "role"),
        ({"messages": [{"role": "assistant", "content": "1"}]}, 400, "assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 422, "type"),
        ({"temperature": 0.5}, 400, "sampling.temperature = 1"),
        ({"top_p": 0.5}, 400, "sampling.top_p = 1"),
        ({"n": 2}, 422, "n:"),
        ({"stop": ["x"]}, 400, "sampling.stop = []"),
        ({"max_tokens": 0}, 422, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "the same meaning"),
        ({"model": "gpt"}, 422, "model"),
        ({"logit_bias": {}}, 422, "logit_bias"),
    ],
)
def test_an_invalid_request_is_refused_and_changes_nothing(
    run: FakeRun, changes: dict[str, Any], status: int, reason: str
) -> None:
    open_session(run)
    assert reason in error_message(complete(run, **{"messages": [USER], **changes}), status)
    assert run.replies() == []
    assert complete_with(run, [USER], "7").status_code == 200


def test_max_tokens_must_be_the_same_in_all_requests_of_a_session(run: FakeRun) -> None:
    open_session(run)
    complete_with(run, [USER], "77")
    more = [USER, {"role": "assistant", "content": "77"}, NEXT]
    assert "repeat it" in error_message(complete(run, more, max_tokens=3), 400)


@pytest.mark.parametrize("reward", ['"1"', "NaN", "Infinity", "1e999", "[]", "true", "1.1e6", "-1e200"])
def test_a_reward_is_a_finite_number_up_to_a_maximum(run: FakeRun, reward: str) -> None:
    open_session(run)
    complete_with(run, [USER], "77")
    body, kind = f'{{"reward": {reward}}}', {"content-type": "application/json"}
    message = error_message(run.call("POST", "/v1/sessions/a/reward", content=body, headers=kind), 422)
    if reward in ("1.1e6", "-1e200"):
        assert "1000000" in message
    assert run.call("POST", "/v1/sessions/a/reward", json={"reward": -1e6}).status_code == 200


def test_an_unknown_session_is_not_found(run: FakeRun) -> None:
    assert "PUT /v1/sessions/NAME" in error_message(complete(run, [USER], session="unknown"), 404)
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/reward")):
        error_message(
            run.call(method, f"/v1/sessions/x{path}", **({"json": {"reward": 1}} if path else {})), 404
        )
    assert error_message(run.call("POST", CHAT, json={"messages": [USER]}), 422)
    for name in ("a b", "x" * 65, "%2e%2e", "é"):
        response = run.call("PUT", f"/v1/sessions/{name}")
        assert error_message(response, response.status_code)


def test_a_run_without_agents_has_no_sessions(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    assert "service.agents = true" in error_message(run.call("PUT", "/v1/sessions/a"), 409)
    assert run.call("GET", "/v1/models").json()["data"][0]["id"] == "policy"


def test_episodes_without_agents_are_logged(run: FakeRun) -> None:
    notices: list[str] = []
    run.agents._notice, run.agents.instructions = notices.append, "open one with PUT URL"
    run.agents.start(EPISODE, version=0)
    for _ in range(3):
        pass_time(run, 20)
    assert notices == ["no agent has a session: 1 episode waiting; open one with PUT URL"]
    open_session(run)
    pass_time(run, 40)
    assert (len(notices), run.agents.missing) == (1, "")


def test_the_wait_graph_names_what_an_agent_has_to_do(run: FakeRun) -> None:
    run.agents.start(EPISODE, version=0)
    assert run.agents.waits() == {EPISODE.request: "an agent that opens a session"}
    open_session(run)
    assert run.agents.waits() == {EPISODE.request: "its first messages, in session a"}
    run.agents.complete("a", TurnRequest((message(USER),)))
    assert run.agents.waits() == {}  # the model generates
    generate(run, "7")
    assert run.agents.waits() == {EPISODE.request: "its next messages or its reward, in session a"}
    run.agents.finish("a", 1.0)
    assert run.agents.waits() == {}


BY_URL = "/s/a/v1/chat/completions"


def complete_by_url(run: FakeRun, messages: Sequence[Any], text: str, **turn: Any) -> Any:
    """Request a turn as a client that has only a base URL and an API key; the model generates `text`."""
    return run.ask(BY_URL, {"messages": messages}, turn_of(run, text, **turn))


def test_a_client_with_only_a_base_url_and_a_key_runs_an_episode(run: FakeRun) -> None:
    run.agents.start(EPISODE, version=4)
    assert run.call("GET", "/s/a/v1/models").json()["data"][0]["id"] == "policy"
    assert run.agents.num_waiting == 1
    first = complete_by_url(run, [USER], "77").json()
    assert (first["version"], run.replies()) == (4, [EpisodeStarted(EPISODE, ids(run, "13:"), None)])
    answer = first["choices"][0]["message"]
    assert complete_by_url(run, [USER, answer, NEXT], "8", number=1).status_code == 200
    assert run.replies() == [EpisodeObservation(EPISODE, 0, ids(run, ","))]
    assert run.call("GET", "/v1/sessions/a").json()["num_turns"] == 2
    for _ in range(2):
        ended = run.call("POST", "/s/a/reward", json={"reward": 0.5})
        assert ended.json() == {"session": "a", "end_reason": "finished with reward 0.5"}
    assert run.replies() == [EpisodeEnded(EPISODE, 1, 0.5)]
    run.agents.start(EPISODE._replace(attempt=1), version=5)
    error = run.call("POST", BY_URL, json={"messages": [USER]})
    assert "this session has ended: finished with reward 0.5" in error_message(error, 410)


def test_the_first_completion_in_a_url_waits_for_an_episode(run: FakeRun) -> None:
    async def requests(http: Any) -> Any:
        response = asyncio.ensure_future(http.post(BY_URL, json={"messages": [USER]}))
        await http.get("/health")
        run.agents.start(EPISODE, version=4)
        run.process()
        while run.messages.empty():
            await asyncio.wait([response], timeout=0.001)
        generate(run, "7")
        return await response

    assert run.call_many(requests).json()["choices"][0]["message"]["content"] == "7"


def test_a_completion_in_a_url_is_refused_for_the_time_being_if_no_episode_waits(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "OPEN_TIMEOUT_S", 0.0)
    response = run.call("POST", BY_URL, json={"messages": [USER]})
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
    assert response.json()["error"]["type"] == "server_error"
    assert "no episode was waiting" in response.json()["error"]["message"]


def test_an_invalid_first_completion_in_a_url_takes_no_episode(run: FakeRun) -> None:
    run.agents.start(EPISODE, version=4)
    for changes, status in (({"temperature": 0.5}, 400), ({"stream": 1}, 422), ({"model": "gpt"}, 422)):
        error_message(run.call("POST", BY_URL, json={"messages": [USER], **changes}), status)
    error_message(run.call("POST", "/s/a%20b/v1/chat/completions", json={"messages": [USER]}), 422)
    assert (run.agents.num_waiting, run.agents.num_sessions) == (1, 0)


def test_a_disconnected_client_of_a_url_gets_no_episode(run: FakeRun) -> None:
    assert disconnect_after(run.app, "POST", BY_URL, {"messages": [USER]}) == 503
    run.agents.start(EPISODE, version=0)
    run.process()
    assert run.agents.num_waiting == 1


def test_a_body_without_end_is_refused_although_the_request_needs_none(run: FakeRun) -> None:
    async def body() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 1000

    response = run.call("PUT", "/v1/sessions/a", params={"wait_s": 9}, content=body())
    assert "the body has more than" in error_message(response, 413)
