"""Run the episodes of a served run with any command: once for each episode, several at a time.

The command reaches its session as `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and
`ANTHROPIC_API_KEY`. `DORA_PROMPT` and `DORA_FIELDS` have the row of the dataset: the prompt as text or JSON,
the other columns as a JSON object. The reward is the number in the file `DORA_REWARD_FILE`, or the last line
of the output, or comes from the reward tasks of the run. In place of the number there may be a JSON object
such as `{"reward": 1.0, "turn_rewards": [0.5, 0.5]}`. With an image, each command runs in a container of its
own, which sees no file of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import os
import shutil
import signal
import uuid
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dora.errors import InputError, RunError, ServiceError
from dora.service.client import RETRY_STATUSES, UNREACHABLE, Address, AsyncClient
from dora.text import plural

OPEN_WAIT_S = 30.0  # of one request for an episode; it is repeated until the run ends
ABANDON_S = 10.0  # for the end of a session that its lease would end later
REMOVAL_S = 30.0  # for a container
REPORT_S = 10.0  # between two lines about the progress
FOLDER = "rollouts"  # in the folder of the run: the output of each command
MAX_TAIL_BYTES = 64 * 1024  # of an output whose last line may be the reward
MAX_FAILURES = 3  # of commands in a row that ended without a turn or a reward, which stop everything
NO_REWARD = "no reward, and the run has no reward tasks"  # how a session ended
MAX_VARIABLE_BYTES = 128 * 1024  # of an environment variable in Linux, with its name and two other bytes
SESSION_ENDED = 410


class CommandEnd(NamedTuple):
    """How a command ended; the reward None comes from the reward tasks of the run.

    `turn_rewards` are the parts of the reward, one for each turn, or empty.
    """

    reward: float | None = None
    failure: str = ""
    turn_rewards: tuple[float, ...] = ()


@dataclass(frozen=True)
class Rollout:
    """`command` for each episode of a run, `concurrency` at a time, each for at most `timeout_s`.

    `image` is that of a Docker container for each command, whose creation counts; None: it runs on this
    machine.
    """

    command: Sequence[str]
    address: Address
    run: Path
    concurrency: int
    timeout_s: float
    report: Callable[[str], None]
    image: str | None = None

    def run_all(self) -> Counter[str]:
        """Run episodes until the run ends; returns how often they ended in which way.

        Raises InputError if the command cannot be started or requests no turn, if the run has no agents, or
        if there is no Docker for the image; RunError if no process listens at the address.
        """
        if self.image is not None and shutil.which("docker") is None:
            raise InputError(
                f"--docker {self.image}: there is no program docker on this machine; install Docker, or leave"
                " the option out to run the command without a container"
            )
        try:
            return asyncio.run(self._run_all())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run_all(self) -> Counter[str]:
        ends: Counter[str] = Counter()
        (self.run / FOLDER).mkdir(exist_ok=True)
        async with AsyncClient(self.address) as client, asyncio.TaskGroup() as tasks:
            runners = [tasks.create_task(self._run_episodes(client, ends)) for _ in range(self.concurrency)]
            reporter = tasks.create_task(self._report_progress(ends))
            await asyncio.wait(runners, return_when=asyncio.FIRST_EXCEPTION)
            reporter.cancel()
        return ends

    async def _run_episodes(self, client: AsyncClient, ends: Counter[str]) -> None:
        num_failures = 0
        while True:
            name = uuid.uuid4().hex
            try:
                session = await client.open_session(name, wait_s=OPEN_WAIT_S)
            except ServiceError as error:
                if error.kind.startswith("run_"):
                    return
                if error.status == SESSION_ENDED:
                    continue  # the response was lost, and the session ended with the run before a resume
                if error.status not in RETRY_STATUSES:
                    raise InputError(str(error)) from error
                if not self.address.is_served:
                    return
                if error.kind == UNREACHABLE:
                    raise RunError(str(error)) from error
                continue  # no episode is waiting
            except asyncio.CancelledError:
                await _abandon(client, name)  # the service may have opened it
                raise
            try:
                end = await self._run_command(client, session)
                ended, num_turns = await self._end_session(client, name, end)
            except ServiceError as error:
                if error.kind.startswith("run_"):
                    return
                ended, num_turns = f"ended by the run: {error}", 1
                if error.status not in RETRY_STATUSES:
                    await _abandon(client, name)  # it is open if its reward was refused
            except BaseException:  # bad input, another command stops everything, or Ctrl-C
                await _abandon(client, name)
                raise
            ends[ended] += 1
            num_failures = num_failures + 1 if num_turns == 0 or ended == NO_REWARD else 0
            if num_failures == MAX_FAILURES:
                raise InputError(self._describe_failures(session, ended, num_turns))

    async def _run_command(self, client: AsyncClient, session: Mapping[str, Any]) -> CommandEnd:
        output = self._output(session)
        reward_file = output.with_suffix(".reward")
        environment, container = self._environment(session, reward_file), f"dora-{session['session']}"
        keeper = asyncio.create_task(_renew_lease(client, session["session"], session["lease_s"] / 3))
        end_s = asyncio.get_running_loop().time() + self.timeout_s
        try:
            with output.open("wb") as file:
                command = self.command
                if self.image is not None:
                    create = docker_create(self.image, container, environment, command)
                    if failure := await create_container(create, environment, file, self.timeout_s):
                        return CommandEnd(failure=failure)
                    command = ["docker", "start", "--attach", container]
                process = await _start(command, environment, stdout=file, stderr=file)
            failure = await self._wait(process, keeper, end_s)
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            if self.image is not None and not await _remove_container(container):
                self.report(f"docker rm {container} takes over {REMOVAL_S:g} s: remove the container")
        return CommandEnd(failure=failure) if failure else _read_reward(reward_file, output)

    async def _wait(self, process: Process, keeper: asyncio.Task[None], end_s: float) -> str:
        """Wait for a command until `end_s` of the loop's clock; returns how it failed, or "".

        Raises ServiceError if its session has ended.
        """
        waiter = asyncio.create_task(process.wait())
        left_s = max(0.0, end_s - asyncio.get_running_loop().time())
        try:
            done, _ = await asyncio.wait(
                {waiter, keeper}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            if keeper in done:
                keeper.result()
            if waiter not in done:
                return f"longer than {self.timeout_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what the command has left behind
            await waiter
        return f"exit status {process.returncode}" if process.returncode else ""

    async def _end_session(self, client: AsyncClient, name: str, end: CommandEnd) -> tuple[str, int]:
        """Post the reward, or abandon the session; returns how it ended, and the number of its turns."""
        num_turns = int((await client.get_session(name))["num_turns"])
        if end.failure or num_turns == 0:
            await client.abandon_session(name)
            return end.failure or "no turn requested", num_turns
        try:
            await client.post_reward(name, end.reward, end.turn_rewards)
        except ServiceError as error:
            if error.status != 400 or end.reward is not None:
                raise
            await client.abandon_session(name)
            return NO_REWARD, num_turns
        return "rewarded" if end.reward is not None else "scored by the run", num_turns

    def _describe_failures(self, session: Mapping[str, Any], ended: str, num_turns: int) -> str:
        """How MAX_FAILURES commands in a row have failed, by the last of them."""
        failed, remedy = "requested no turn", ""
        if num_turns > 0:
            other = "" if self.image else ", or write it to DORA_REWARD_FILE"
            failed, remedy = "gave no reward", f"; let it print the number as the last line{other}"
        what = f"the command {failed} {MAX_FAILURES} times in a row ({ended})"
        return f"{what}; its output is in {self._output(session)}{remedy}"

    async def _report_progress(self, ends: Counter[str]) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            self.report(describe(ends))

    def _output(self, session: Mapping[str, Any]) -> Path:
        group = str(session["group"]).replace("/", "-")
        return self.run / FOLDER / f"{group}-{session['sibling']}-{session['session']}.log"

    def _environment(self, session: Mapping[str, Any], reward_file: Path) -> dict[str, str]:
        prompt, base_url = session["prompt"], f"{self.address.url}/s/{session['session']}"
        row = {
            "DORA_PROMPT": prompt if isinstance(prompt, str) else json.dumps(prompt),
            "DORA_FIELDS": json.dumps(session["fields"]),
        }
        for variable, value in row.items():
            if reason := _why_no_variable(variable, value):
                raise InputError(
                    f"{variable} of group {session['group']}: {reason}; change the row of the dataset"
                )
        return {
            "OPENAI_BASE_URL": f"{base_url}/v1",
            "OPENAI_API_KEY": self.address.token,
            "ANTHROPIC_BASE_URL": base_url,
            "ANTHROPIC_API_KEY": self.address.token,
            "DORA_SESSION": str(session["session"]),
            **row,
            "DORA_REWARD_FILE": str(reward_file.resolve()),
        }


def _why_no_variable(name: str, value: str) -> str:
    """Why a value cannot be that of an environment variable; empty if it can."""
    num_bytes = len(f"{name}={value}\0".encode(errors="surrogatepass"))
    if num_bytes > MAX_VARIABLE_BYTES:
        return f"it has {num_bytes} bytes, and an environment variable can have {MAX_VARIABLE_BYTES}"
    if "\0" in value:
        return "it has a NUL character, which no environment variable can have"
    return ""


def docker_create(
    image: str, container: str, environment: Mapping[str, str], command: Sequence[str]
) -> list[str]:
    """The command that creates a container for a command, which reaches the service and no file.

    Docker's client takes the values of the variables from its own environment, so that no process listing has
    the auth token.
    """
    names = [name for name in environment if name != "DORA_REWARD_FILE"]
    variables = [part for name in names for part in ("--env", name)]
    limits = ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    options = ["--rm", "--init", *limits, "--name", container, "--network", "host", *variables]
    return ["docker", "create", *options, image, *command]


async def create_container(
    command: Sequence[str], environment: Mapping[str, str], errors: BinaryIO, timeout_s: float
) -> str:
    """Run `docker create`; returns how it failed, or "".

    Also when cancelled it first waits for Docker, up to REMOVAL_S: a container that is created after its
    removal would stay.
    """
    creating = asyncio.create_task(_create_container(command, environment, errors))
    try:
        return await asyncio.wait_for(asyncio.shield(creating), timeout_s)
    except TimeoutError:
        return f"longer than {timeout_s:g} s"
    finally:
        await asyncio.wait({creating}, timeout=REMOVAL_S)
        creating.cancel()
        await asyncio.gather(creating, return_exceptions=True)


async def _create_container(command: Sequence[str], environment: Mapping[str, str], errors: BinaryIO) -> str:
    process = await _start(command, environment, stdout=asyncio.subprocess.DEVNULL, stderr=errors)
    try:
        await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        status = await process.wait()
    return f"docker create: exit status {status}" if status else ""


async def _start(
    command: Sequence[str], environment: Mapping[str, str], stdout: BinaryIO | int, stderr: BinaryIO
) -> Process:
    """Start a command in a process group of its own. Raises InputError."""
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # ValueError: a NUL character, which no variable can have
        reason = str(getattr(error, "strerror", error))
        if isinstance(error, OSError) and error.errno == errno.E2BIG:
            reason += "; DORA_PROMPT, DORA_FIELDS and each argument can have 128 KiB"
        raise InputError(f"cannot start {command[0]}: {reason}") from error


async def _remove_container(container: str) -> bool:
    """Kill a container whose client was killed; one that has ended is not there. False if Docker hangs."""
    null = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        "docker", "rm", "--force", container, stdin=null, stdout=null, stderr=null
    )
    try:
        async with asyncio.timeout(REMOVAL_S):
            await process.wait()
            return True
    except TimeoutError:
        process.kill()
        return False


def describe(ends: Counter[str]) -> str:
    """How many episodes ended in which way."""
    counts = ", ".join(f"{count} {end}" for end, count in ends.most_common())
    return f"{plural(ends.total(), 'episode')}: {counts}" if ends else "0 episodes"


async def _abandon(client: AsyncClient, session: str) -> None:
    """End a session, if it is open and the service responds."""
    with contextlib.suppress(ServiceError, TimeoutError):
        async with asyncio.timeout(ABANDON_S):
            await client.abandon_session(session)


async def _renew_lease(client: AsyncClient, session: str, interval_s: float) -> None:
    """Keep a session alive while its command uses a tool. Raises ServiceError once the session has ended."""
    while True:
        await asyncio.sleep(interval_s)
        await client.get_session(session)


def _read_reward(file: Path, output: Path) -> CommandEnd:
    """The reward in a file, or in the last line of the output; None: there is none."""
    if file.exists():
        text = file.read_text(errors="replace", encoding="utf-8")
    else:
        with output.open("rb") as stream:
            stream.seek(max(0, output.stat().st_size - MAX_TAIL_BYTES))
            lines = stream.read().decode(errors="replace").split("\n")
        text = next((line for line in reversed(lines) if line.strip()), "")
    return parse_reward(text)


def parse_reward(text: str) -> CommandEnd:
    """The reward that a text writes: a number, or a JSON object with `reward` and perhaps `turn_rewards`.

    Other texts have no reward. An object whose values are not finite numbers is a failure.
    """
    with contextlib.suppress(ValueError):
        reward = float(text)
        return CommandEnd(reward if math.isfinite(reward) else None)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return CommandEnd()
    if not isinstance(found, dict) or "reward" not in found:
        return CommandEnd()
    reward, parts = found["reward"], found.get("turn_rewards", [])
    numbers = [
        *([] if reward is None and not parts else [reward]),
        *(parts if isinstance(parts, list) else [None]),
    ]
    if not all(isinstance(number, int | float) and abs(number) < math.inf for number in numbers):
        return CommandEnd(failure='reward is no number or {"reward": number, "turn_rewards": [number, ...]}')
    return CommandEnd(reward, turn_rewards=(*parts,))
