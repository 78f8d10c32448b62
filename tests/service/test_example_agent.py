"""The agent of the examples plays as it says, with nothing of DORA in it."""

from __future__ import annotations

import ast
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.service.fake_run import FakeRun

from dora.config.schema import ServiceSection
from dora.core.types import RequestId
from dora.data.gcd import chain
from dora.runtime.rollout.episodes import (
    EpisodeEnded,
    EpisodeId,
    EpisodeObservation,
    EpisodeReply,
    EpisodeStarted,
    PolicyTurn,
)
from dora.service.server import WebGateway

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "external_agent.py"
EPISODE = EpisodeId(RequestId(0, 0, 0), 0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[FakeRun]:
    """A run of the demo's task behind a real server."""
    made = FakeRun(tmp_path, service__agents="true", data__path="gcd", sampling__max_response_length=56)
    made.plan.out.mkdir()
    door = WebGateway(ServiceSection(), made.plan.out)
    door.open(made.calls, lambda sentence: None)
    yield made
    made.calls.close()
    door.close()


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("external_agent", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def play(run: FakeRun, *answers: str) -> tuple[list[EpisodeReply], str]:
    """What the agent says where the model answers so, and how the episode ends for it."""
    script, ends, words = load_script(), list[str](), list[EpisodeReply]()
    service = script.Service(run.setup.out)
    agent = threading.Thread(target=lambda: ends.append(script.play(service)))
    run.agents.start(EPISODE, version=3)
    agent.start()
    for number, answer in enumerate(answers):
        words.append(run.messages.get(timeout=20)[1])
        token_ids = run.setup.tokenizer.encode(answer)
        run.agents.on_turn(PolicyTurn(EPISODE, number, token_ids, "stop", 300 - 150 * number))
        run.hands.nudge()
    agent.join()
    service.close()
    run.agents.release(EPISODE)
    return [*words, *run.replies()], ends[0]


def ids(run: FakeRun) -> tuple[int, ...]:
    return tuple(run.setup.prompt_ids(EPISODE.request.group))


def right(run: FakeRun) -> str:
    fields = run.setup.dataset.fields(0)
    return chain(fields["a"], fields["b"])


def test_a_right_answer_is_worth_one(run: FakeRun) -> None:
    words, end = play(run, right(run))
    assert words == [EpisodeStarted(EPISODE, ids(run), None), EpisodeEnded(EPISODE, 0, 1.0)]
    assert end == "reward 1.0"


def test_a_wrong_answer_is_asked_for_again_once(run: FakeRun) -> None:
    words, end = play(run, "01=61", right(run))
    assert words == [
        EpisodeStarted(EPISODE, ids(run), None),
        EpisodeObservation(EPISODE, 0, ids(run)),
        EpisodeEnded(EPISODE, 1, 0.5),
    ]
    assert end == "reward 0.5"
    assert play(run, "01=61", "02=61")[1] == "reward 0.0"


def test_an_episode_that_is_lost_is_told(run: FakeRun) -> None:
    script = load_script()
    run.agents.start(EPISODE, version=0)

    def lose() -> None:
        run.messages.get(timeout=20)
        run.agents.release(EPISODE)
        run.process()

    lost = threading.Thread(target=lose)
    lost.start()
    service = script.Service(run.setup.out)
    end = script.play(service)
    lost.join()
    service.close()
    assert "its engine was lost" in end


def test_the_agent_ends_with_the_run(run: FakeRun) -> None:
    script = load_script()
    service = script.Service(run.setup.out)
    (run.setup.out / "service.json").unlink()
    with pytest.raises(script.RunIsOver):
        service.call("GET", "/v1/status")


def test_the_agent_shares_no_code_with_the_run() -> None:
    nodes = [*ast.walk(ast.parse(SCRIPT.read_text(encoding="utf-8")))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert not {name for name in names if name.partition(".")[0] == "dora"}
