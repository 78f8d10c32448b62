"""The agent of the examples runs episodes as documented, and imports nothing of DORA."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from examples import external_agent
from tests.service.fake_run import RUN_END, FakeRun, serve

from dora.core.types import RequestId
from dora.data.gcd import chain
from dora.envs.episode import (
    EpisodeEnded,
    EpisodeId,
    EpisodeObservation,
    EpisodeReply,
    EpisodeStarted,
    PolicyTurn,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
EPISODE = EpisodeId(RequestId(0, 0, 0), 0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[FakeRun]:
    """A run of the demo's task behind a real server."""
    run = FakeRun(tmp_path, service__agents="true", data__path="gcd", sampling__max_response_length=56)
    with serve(run):
        yield run


def run_episode(run: FakeRun, *turns: str) -> tuple[list[EpisodeReply], str]:
    """The replies of the session, and the result of the agent, if the model generates these turns."""
    results, replies = list[str](), list[EpisodeReply]()
    service = external_agent.Service(run.setup.out)
    agent = threading.Thread(target=lambda: results.append(external_agent.run_episode(service)))
    run.agents.start(EPISODE, version=3)
    agent.start()
    for number, turn in enumerate(turns):
        replies.append(run.messages.get(timeout=20)[1])
        token_ids = run.setup.tokenizer.encode(turn)
        run.finish_turn(PolicyTurn(EPISODE, number, token_ids, "stop", 300 - 150 * number))
    agent.join()
    service.close()
    run.agents.release(EPISODE)
    return [*replies, *run.replies()], results[0]


def prompt_ids(run: FakeRun) -> tuple[int, ...]:
    return tuple(run.setup.prompt_ids(EPISODE.request.group))


def correct_answer(run: FakeRun) -> str:
    fields = run.setup.dataset.fields(0)
    return chain(fields["a"], fields["b"])


def test_a_correct_first_answer_has_reward_1(run: FakeRun) -> None:
    replies, result = run_episode(run, correct_answer(run))
    assert replies == [EpisodeStarted(EPISODE, prompt_ids(run), None), EpisodeEnded(EPISODE, 0, 1.0)]
    assert result == "reward 1.0"


def test_the_question_is_repeated_once_after_a_wrong_answer(run: FakeRun) -> None:
    replies, result = run_episode(run, "01=61", correct_answer(run))
    assert replies == [
        EpisodeStarted(EPISODE, prompt_ids(run), None),
        EpisodeObservation(EPISODE, 0, prompt_ids(run)),
        EpisodeEnded(EPISODE, 1, 0.5),
    ]
    assert result == "reward 0.5"
    assert run_episode(run, "01=61", "02=61")[1] == "reward 0.0"


def test_the_agent_reports_why_an_episode_was_lost(run: FakeRun) -> None:
    run.agents.start(EPISODE, version=0)

    def lose_episode() -> None:
        run.messages.get(timeout=20)
        run.agents.release(EPISODE)
        run.process()

    thread = threading.Thread(target=lose_episode)
    thread.start()
    service = external_agent.Service(run.setup.out)
    result = external_agent.run_episode(service)
    thread.join()
    service.close()
    assert "its engine was lost" in result


def test_the_agent_ends_with_the_run(run: FakeRun) -> None:
    service = external_agent.Service(run.setup.out)
    (run.setup.out / "service.json").unlink()
    (run.setup.out / "summary.json").touch()
    with pytest.raises(external_agent.RunIsOver):
        service.request("GET", "/v1/status")


def test_the_agent_waits_for_a_run_that_is_resumed_after_a_crash(run: FakeRun) -> None:
    address = run.setup.out / "service.json"
    service, content = external_agent.Service(run.setup.out), address.read_text()
    address.unlink()
    writer = threading.Timer(3 * external_agent.RETRY_S, address.write_text, args=(content,))
    writer.start()
    assert service.request("GET", "/v1/status")[0] == 200
    writer.join()
    service.close()


def test_the_agent_ends_as_soon_as_the_service_says_that_the_run_has(run: FakeRun) -> None:
    service = external_agent.Service(run.setup.out)
    run.app.run_end = RUN_END
    run.requests.close(RUN_END)
    with pytest.raises(external_agent.RunIsOver):
        service.request("GET", "/v1/status")
    service.close()


@pytest.mark.parametrize("name", ["external_agent", "external_trainer"])
def test_clients_of_the_examples_import_nothing_of_dora(name: str) -> None:
    script = EXAMPLES / f"{name}.py"
    nodes = [*ast.walk(ast.parse(script.read_text(encoding="utf-8")))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert not {name for name in names if name.partition(".")[0] == "dora"}
