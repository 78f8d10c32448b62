"""Any command runs the episodes of a run; whatever it does, its session ends and no process is left."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.service.fake_run import FakeRun, serve
from tests.service.test_client import ended_response, responding

from dora.core.types import GroupId, RequestId
from dora.envs.episode import EpisodeEnded, EpisodeFailed, EpisodeId, EpisodeStarted, PolicyTurn
from dora.errors import InputError, RunError
from dora.service import rollout
from dora.service.client import Address, AsyncClient
from dora.service.rollout import CommandEnd, Rollout, create_container, describe, parse_reward

AGENT = """
import json, os, urllib.request
def ask(content):
    body = {"messages": [{"role": "user", "content": content}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]
answer = ask(os.environ["DORA_PROMPT"])
"""


class Model:
    """Generates "77" for each episode; the run ends after `num_episodes` have ended."""

    def __init__(self, run: FakeRun, num_episodes: int) -> None:
        self.ends: list[EpisodeEnded | EpisodeFailed] = []
        self._run, self._num_episodes = run, num_episodes
        self._thread = threading.Thread(target=self._generate, daemon=True)
        for sibling in range(num_episodes):
            run.agents.start(EpisodeId(RequestId(0, 3, sibling), 0), version=0)

    def start(self) -> None:
        self._thread.start()

    def _generate(self) -> None:
        run = self._run
        while len(self.ends) < self._num_episodes:
            match run.messages.get()[1]:
                case EpisodeStarted(episode):
                    ids = run.setup.tokenizer.encode("77")
                    run.finish_turn(PolicyTurn(episode, 0, ids, "stop", 20))
                case EpisodeEnded() | EpisodeFailed() as end:
                    self.ends.append(end)
        run.end()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[FakeRun]:
    run = FakeRun(tmp_path, service__agents="true")
    with serve(run):
        yield run


def roll_out(run: FakeRun, code: str, num_episodes: int = 2, **settings: Any) -> tuple[Counter[str], Model]:
    """Run episodes with a Python program, two at a time."""
    model = Model(run, num_episodes)
    model.start()
    address = replace(Address.of_run(run.setup.out), retry_timeout_s=1.0)
    command = [sys.executable, "-S", "-c", code]
    given = {"concurrency": 2, "timeout_s": 60.0} | settings
    ends = Rollout(command, address, run.setup.out, report=lambda line: None, **given).run_all()
    return ends, model


def rewards(model: Model) -> list[float | None]:
    return [end.reward for end in model.ends if isinstance(end, EpisodeEnded)]


def outputs(run: FakeRun) -> Sequence[str]:
    return [path.read_text() for path in (run.setup.out / "rollouts").glob("*.log")]


def test_the_last_line_of_the_output_is_the_reward(run: FakeRun) -> None:
    ends, model = roll_out(run, AGENT + "print('answer', answer); print(len(answer) / 4); print()")
    assert (ends, rewards(model)) == ({"rewarded": 2}, [0.5, 0.5])
    assert outputs(run) == ["answer 77\n0.5\n\n"] * 2
    assert describe(ends) == "2 episodes: 2 rewarded"


def test_a_reward_file_comes_before_the_output(run: FakeRun) -> None:
    code = AGENT + "open(os.environ['DORA_REWARD_FILE'], 'w').write('0.25'); print(1)"
    assert rewards(roll_out(run, code)[1]) == [0.25, 0.25]


@pytest.mark.parametrize("write", ["print", "open(os.environ['DORA_REWARD_FILE'], 'w').write"])
def test_a_reward_may_have_its_parts_by_turn(run: FakeRun, write: str) -> None:
    ends, model = roll_out(run, f"""{AGENT}{write}('{{"reward": 0.75, "turn_rewards": [0.75]}}')""")
    assert (ends, rewards(model)) == ({"rewarded": 2}, [0.75, 0.75])
    assert [end.turn_rewards for end in model.ends if isinstance(end, EpisodeEnded)] == [(0.75,), (0.75,)]


def test_parts_of_a_reward_that_do_not_fit_the_episode_fail_it(run: FakeRun) -> None:
    ends, model = roll_out(run, f"""{AGENT}print('{{"reward": 1, "turn_rewards": [0.5, 0.5]}}')""")
    assert ends == {"ended by the run: 2 turn_rewards for 1 turn; post one for each": 2}
    assert [type(end) for end in model.ends] == [EpisodeFailed, EpisodeFailed]


@pytest.mark.parametrize(
    ("text", "reward", "turn_rewards"),
    [
        (" 0.5\n", 0.5, ()),
        ('{"reward": 1}', 1.0, ()),
        ('{"reward": null}', None, ()),
        ('{"reward": 1.0, "turn_rewards": [0.25, 0.75], "tries": 3}', 1.0, (0.25, 0.75)),
        ('{"reward": 1.0, "turn_rewards": []}', 1.0, ()),
        ('{"score": 1}', None, ()),
        ('{"reward": 1', None, ()),
        ("[1]", None, ()),
        ("inf", None, ()),
    ],
)
def test_the_text_of_a_reward(text: str, reward: float | None, turn_rewards: tuple[float, ...]) -> None:
    assert parse_reward(text) == CommandEnd(reward, "", turn_rewards)


@pytest.mark.parametrize(
    "values",
    ['"high"', "NaN", 'null, "turn_rewards": [1]', '1, "turn_rewards": 2', '1, "turn_rewards": ["a"]'],
)
def test_an_object_without_numbers_fails_its_episode(values: str) -> None:
    assert 'is no number or {"reward": number' in parse_reward(f'{{"reward": {values}}}').failure


def test_without_a_number_the_run_scores_the_episode(run: FakeRun) -> None:
    ends, model = roll_out(run, AGENT + "print('done: nan')")
    assert (ends, rewards(model)) == ({"scored by the run": 2}, [None, None])


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print(1); raise SystemExit(3)", "exit status 3"),
        ("import time; time.sleep(600)", "longer than 3 s"),
    ],
)
def test_a_command_that_fails_fails_its_episode(run: FakeRun, code: str, reason: str) -> None:
    ends, model = roll_out(run, AGENT + code, timeout_s=3.0)
    assert ends == {reason: 2}
    assert [type(end) for end in model.ends] == [EpisodeFailed, EpisodeFailed]


def test_what_a_command_leaves_behind_is_killed(run: FakeRun, tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    roll_out(run, f"{AGENT}{code}; print(1)", num_episodes=1)
    deadline_s = time.monotonic() + 60
    while any(b"time.sleep(600)'" in path.read_bytes() for path in command_lines()):
        assert time.monotonic() < deadline_s


def command_lines() -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]


def test_a_command_that_requests_no_turn_stops_everything(run: FakeRun, tmp_path: Path) -> None:
    """The first command sleeps; the others fail, and its session is abandoned for another command."""
    first = f"import os, time; os.open({str(tmp_path / 'first')!r}, os.O_CREAT | os.O_EXCL); time.sleep(600)"
    with pytest.raises(InputError, match=r"requested no turn 3 times in a row \(exit status 1\); its output"):
        roll_out(run, first)
    assert (run.agents.num_waiting, run.agents.num_sessions) == (2, 0)


def test_a_command_that_does_not_exist_is_named(run: FakeRun) -> None:
    run.agents.start(EpisodeId(RequestId(0, 3, 1), 0), version=0)
    address = Address.of_run(run.setup.out)
    with pytest.raises(InputError, match="cannot start no-such-agent: No such file"):
        Rollout(["no-such-agent"], address, run.setup.out, 2, 9.0, print).run_all()
    with pytest.raises(InputError, match=r"cannot start .*: embedded null byte"):
        Rollout(["no-such\0agent"], address, run.setup.out, 2, 9.0, print).run_all()
    with pytest.raises(InputError, match=r"list too long; DORA_PROMPT, DORA_FIELDS .* can have 128 KiB"):
        Rollout(["true", "x" * 2**18], address, run.setup.out, 2, 9.0, print).run_all()
    assert (run.agents.num_waiting, run.agents.num_sessions) == (1, 0)  # for another agent, at once


def test_only_commands_that_never_print_a_reward_stop_everything(tmp_path: Path) -> None:
    """The run has no reward tasks."""

    def remove_reward(start: Path) -> None:
        task = start.parent / "task.toml"
        task.write_text(task.read_text().replace('[reward]\nfunction = "task.py:reward"\n', "[reward]\n"))

    run = FakeRun(tmp_path, remove_reward, service__agents="true")
    assert not run.setup.config.reward_weights
    with serve(run):
        once = f"os.open({str(tmp_path / 'once')!r}, os.O_CREAT | os.O_EXCL)"
        code = f"{AGENT}\ntry: {once}\nexcept FileExistsError: print(1)\nelse: print('no number')"
        ends, model = roll_out(run, code, num_episodes=4)
        assert ends == {"rewarded": 3, "no reward, and the run has no reward tasks": 1}
        assert rewards(model) == [1.0] * 3
    run = FakeRun(tmp_path, remove_reward, service__agents="true")
    with (
        serve(run),
        pytest.raises(InputError, match=r"gave no reward 3 times in a row .*print the number as the last"),
    ):
        roll_out(run, AGENT + "print('no number')", num_episodes=4, concurrency=1)


def test_a_reward_out_of_range_fails_its_episode(run: FakeRun) -> None:
    ends, model = roll_out(run, AGENT + "print(1e9)")
    assert ends == {"ended by the run: reward: Input should be less than or equal to 1000000": 2}
    assert [type(end) for end in model.ends] == [EpisodeFailed, EpisodeFailed]


async def test_a_cancelled_request_for_a_session_leaves_none_open(run: FakeRun) -> None:
    """The service opens it, and the response comes too late."""
    run.agents.start(EpisodeId(RequestId(0, 3, 1), 0), version=0)
    address = Address.of_run(run.setup.out)
    rollout = Rollout(["no-such-agent"], address, run.setup.out, 1, 9.0, print)
    async with AsyncClient(address) as client:
        running = asyncio.create_task(rollout._run_episodes(client, Counter()))
        while not run.agents.num_sessions:
            await asyncio.wait([running], timeout=0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert (run.agents.num_waiting, run.agents.num_sessions) == (1, 0)


def test_a_session_that_has_ended_by_a_resume_is_replaced_by_another(tmp_path: Path) -> None:
    """The request for it is repeated, because its response was lost."""
    ended = ended_response("resumed").replace(b"run_", b"the_")  # that of the session, not of the run
    with responding(ended, ended_response("finished")) as (url, requests):
        assert not Rollout(["true"], Address(url, "x", 9.0, tmp_path), tmp_path, 1, 9.0, print).run_all()
    first, second = (line.split("?")[0] for line in requests)
    assert first != second


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("1\0", "DORA_PROMPT of group 0/3: it has a NUL character, .* change the row of the dataset"),
        ("1" * 2**17, "DORA_PROMPT of group 0/3: it has 131085 bytes, .* can have 131072"),
    ],
)
def test_a_row_that_no_environment_variable_can_have_is_named(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch, prompt: str, reason: str
) -> None:
    monkeypatch.setattr(type(run.setup.source_of(GroupId(0, 3))), "prompt", lambda *_: prompt)
    with pytest.raises(InputError, match=reason):
        roll_out(run, AGENT, num_episodes=1)
    assert (run.agents.num_waiting, run.agents.num_sessions) == (1, 0)


def test_a_service_that_is_gone_ends_everything(run: FakeRun) -> None:
    """As after a crash, which leaves service.json."""
    address = replace(Address.of_run(run.setup.out), url="http://127.0.0.1:9", retry_timeout_s=0.1)
    with pytest.raises(RunError, match=r"had no response .* is the run over"):
        Rollout(["true"], address, run.setup.out, 2, 9.0, print).run_all()


def test_the_row_of_the_dataset_is_in_the_environment(run: FakeRun) -> None:
    names = ("DORA_PROMPT", "DORA_FIELDS", "ANTHROPIC_BASE_URL")
    roll_out(run, f"{AGENT}\nfor name in {names}: print(os.environ[name])", num_episodes=1)
    prompt, fields, url = outputs(run)[0].split()
    assert (prompt, json.loads(fields)) == ("13:", {})
    assert url.startswith(f"{Address.of_run(run.setup.out).url}/s/")


DOCKER = f"""#!{sys.executable} -S
import json, os, pathlib, sys
folder, (verb, *arguments) = pathlib.Path(__file__).parent, sys.argv[1:]
end = arguments.index("image:1") if verb == "create" else len(arguments)
with (folder / "calls").open("a") as calls:
    print(verb, *arguments[:end], file=calls)
container = folder / arguments[arguments.index("--name") + 1 if verb == "create" else -1]
if verb == "create":
    names = [arguments[i + 1] for i in range(end) if arguments[i] == "--env"]
    variables = {{name: os.environ[name] for name in names}}
    container.write_text(json.dumps([arguments[end + 1 :], variables]))
    print(container.name)
elif verb == "start":
    command, variables = json.loads(container.read_text())
    os.execve(command[0], command, variables)
else:
    container.unlink()
"""


def install_docker(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have commands find `script` in place of Docker."""
    docker = folder / "docker"
    docker.write_text(script)
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_container_is_started_for_each_command_and_removed(
    run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a program in place of Docker, which writes its arguments and runs the command."""
    install_docker(tmp_path, monkeypatch, DOCKER)
    ends, model = roll_out(run, AGENT + "print(0.5)", 1, image="image:1")
    assert (ends, rewards(model), outputs(run)) == (Counter(rewarded=1), [0.5], ["0.5\n"])
    created, started, removed = (tmp_path / "calls").read_text().splitlines()
    options = "create --rm --init --cap-drop ALL --security-opt no-new-privileges --name dora-"
    assert created.startswith(options)
    name = created.split("--name ")[1].split()[0]
    assert (started, removed) == (f"start --attach {name}", f"rm --force {name}")
    assert "--network host --env OPENAI_BASE_URL --env OPENAI_API_KEY" in created
    assert "DORA_REWARD_FILE" not in created
    assert Address.of_run(run.setup.out).token not in created


def test_a_container_that_is_not_created_fails_its_episode(
    run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_docker(tmp_path, monkeypatch, "#!/bin/sh\necho no such image >&2; exit 125")
    with pytest.raises(InputError, match=r"no turn 3 times in a row \(docker create: exit status 125\)"):
        roll_out(run, AGENT, image="image:1")
    assert "no such image\n" in outputs(run)


def test_the_creation_of_a_container_counts_for_the_timeout(
    run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = DOCKER.replace("names = [", "__import__('time').sleep(1); names = [")
    install_docker(tmp_path, monkeypatch, slow)
    ends, _ = roll_out(run, AGENT + "import time; time.sleep(2.5)", 1, image="image:1", timeout_s=3.0)
    assert ends == {"longer than 3 s": 1}


async def test_a_container_whose_creation_times_out_is_named_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if Docker then creates it."""
    began, may_end = tmp_path / "began", tmp_path / "may_end"
    for pipe in (began, may_end):
        os.mkfifo(pipe)
    script = f"read line < {may_end}"

    async def create(script: str, is_created: bool = False) -> str:
        with (tmp_path / "errors").open("wb") as errors:
            creating = asyncio.create_task(create_container(["sh", "-c", script], {}, errors, 0.01))
            if is_created:
                await asyncio.to_thread(began.read_text)
                await asyncio.wait({creating}, timeout=0.05)
                await asyncio.to_thread(may_end.write_text, "now\n")
            return await creating

    assert await create(f"echo > {began}; {script}", is_created=True) == "longer than 0.01 s"
    monkeypatch.setattr(rollout, "REMOVAL_S", 0.01)
    assert await create(script) == "longer than 0.01 s"


async def test_a_container_is_removed_only_after_docker_has_created_it(tmp_path: Path) -> None:
    """Else it could be created after its removal, and stay."""
    began, may_end, container = (tmp_path / name for name in ("began", "may_end", "container"))
    os.mkfifo(began)
    os.mkfifo(may_end)
    script = f"echo > {began}; read line < {may_end}; echo > {container}"
    with (tmp_path / "errors").open("wb") as errors:
        creating = asyncio.create_task(create_container(["sh", "-c", script], {}, errors, 60.0))
        await asyncio.to_thread(began.read_text)
        creating.cancel()
        await asyncio.wait({creating}, timeout=0.05)
        assert not creating.done()
        with may_end.open("r+b", buffering=0) as pipe:  # "r+": does not wait for its reader
            pipe.write(b"now\n")
            with pytest.raises(asyncio.CancelledError):
                await creating
        assert container.exists()


def test_without_docker_an_image_is_an_error(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    rollout = Rollout(["agent"], Address.of_run(run.setup.out), run.setup.out, 1, 1.0, print, "image:1")
    with pytest.raises(InputError, match="no program docker on this machine; install Docker, or leave"):
        rollout.run_all()
