"""An environment of the library verifiers (0.1), as one that DORA plays.

    pip install 'verifiers==0.1.14'
    vf-install wordle                                        # or any other environment
    python -c 'import verifiers as vf; vf.load_environment("wordle").get_dataset().to_json("prompts.jsonl")'

    [data]
    path = "prompts.jsonl"
    chat_template = true

    [env]
    environment = "verifiers_env.py:wordle"

The library asks a client for each turn of the model. Here that client is the policy: what it is asked
is the observation, the next action is its answer, and the library's rubric gives the reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import verifiers as vf
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage

from dora.envs.base import Environment, Step


def wordle() -> Environment:
    """What `env.environment` names."""
    return VerifiersEnvironment(vf.load_environment("wordle"))


@Client.register
class Seat:
    """Where the policy sits: `asked` gets whole conversations, `written` its turns."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[Sequence[Any]] = asyncio.Queue()
        self.written: asyncio.Queue[str] = asyncio.Queue()

    async def get_response(self, prompt: Sequence[Any], model: str, *_: Any, **__: Any) -> Response:
        """Wait for the policy's turn."""
        self.asked.put_nowait(prompt)
        turn = await self.written.get()
        message = ResponseMessage(content=turn, finish_reason="stop", is_truncated=False)
        return Response(id="", created=0, model=model, message=message)


class VerifiersEnvironment(Environment):
    """Plays any environment of the library whose actions are text; needs data.chat_template = true."""

    def __init__(self, environment: vf.Environment) -> None:
        self._environment = environment
        self._rollout: asyncio.Task[Any] | None = None

    async def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Mapping[str, str]]:
        """Begin the rollout of a row of the library's dataset; one that was cut short ends."""
        self.close()
        self._seat, self._num_read = Seat(), 0
        self._rollout = asyncio.create_task(
            self._environment.run_rollout({"example_id": 0, **row}, self._seat, "policy", {})
        )
        return await self._next_messages()

    async def step(self, action: str) -> Step:
        """The rollout goes on, up to the next turn or to its reward."""
        assert self._rollout is not None
        self._seat.written.put_nowait(action)
        messages = await self._next_messages()
        return Step(messages, 0.0, False) if messages else Step("", self._rollout.result()["reward"], True)

    def close(self) -> None:
        """Also in the middle of an episode."""
        if self._rollout is not None:
            self._rollout.cancel()

    async def _next_messages(self) -> Sequence[Mapping[str, str]]:
        """What has been said since the policy's last turn; nothing when the rollout is over."""
        assert self._rollout is not None
        asked = asyncio.create_task(self._seat.asked.get())
        await asyncio.wait({asked, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            return []
        new = asked.result()[self._num_read :]
        self._num_read = len(asked.result()) + 1  # the answer of the policy comes next
        return [{"role": message.role, "content": message.content} for message in new]
