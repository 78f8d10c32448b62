"""An environment of the library verifiers (0.1) as an environment of DORA.

    pip install 'verifiers==0.1.14'
    vf-install wordle                                        # or any other environment
    python -c 'import verifiers as vf; vf.load_environment("wordle").get_dataset().to_json("prompts.jsonl")'

    [data]
    path = "prompts.jsonl"
    chat_template = true

    [env]
    environment = "verifiers_env.py:wordle"

The library requests each turn of the model from a client. Here the client is the policy: the request is the
observation, the next action is the response, and the library's rubric gives the reward.
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
    """The function that `env.environment` names."""
    return VerifiersEnvironment(vf.load_environment("wordle"))


@Client.register
class PolicyClient:
    """Passes requests of the library to the policy and its turns back."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[Sequence[Any]] = asyncio.Queue()
        self.turns: asyncio.Queue[str] = asyncio.Queue()

    async def get_response(self, prompt: Sequence[Any], model: str, *_: Any, **__: Any) -> Response:
        """Wait for the policy's turn."""
        self.requests.put_nowait(prompt)
        turn = await self.turns.get()
        message = ResponseMessage(content=turn, finish_reason="stop", is_truncated=False)
        return Response(id="", created=0, model=model, message=message)


class VerifiersEnvironment(Environment):
    """Any environment of the library whose actions are text; needs data.chat_template = true."""

    def __init__(self, environment: vf.Environment) -> None:
        self._environment = environment
        self._rollout: asyncio.Task[Any] | None = None

    async def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Mapping[str, str]]:
        """Start the rollout of a row of the library's dataset; cancels one that is still running."""
        self.close()
        self._client, self._num_read = PolicyClient(), 0
        self._rollout = asyncio.create_task(
            self._environment.run_rollout({"example_id": 0, **row}, self._client, "policy", {})
        )
        return await self._next_messages()

    async def step(self, action: str) -> Step:
        """Continue the rollout up to the next turn or to its reward."""
        assert self._rollout is not None
        self._client.turns.put_nowait(action)
        messages = await self._next_messages()
        return Step(messages, 0.0, False) if messages else Step("", self._rollout.result()["reward"], True)

    def close(self) -> None:
        """Cancel the rollout, if one is running."""
        if self._rollout is not None:
            self._rollout.cancel()

    async def _next_messages(self) -> Sequence[Mapping[str, str]]:
        """The messages since the policy's last turn; none when the rollout is over."""
        assert self._rollout is not None
        request = asyncio.create_task(self._client.requests.get())
        await asyncio.wait({request, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            return []
        new = request.result()[self._num_read :]
        self._num_read = len(request.result()) + 1  # the policy's turn comes next
        return [{"role": message.role, "content": message.content} for message in new]
