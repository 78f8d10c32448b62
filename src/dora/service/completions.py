"""The turns of a session as OpenAI text completions, for runs without a chat template."""

from __future__ import annotations

import time
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from dora.errors import ServiceError
from dora.runtime.rollout.agent_sessions import ChatMessage, TurnRequest
from dora.service.agents import SessionName, SessionTurn, check_sampling, next_turn, open_if_new
from dora.service.chat_completions import SessionHeader, Usage, usage_of
from dora.service.context import Run, RunContext
from dora.service.models import RequestBody

router = APIRouter(prefix="/v1", tags=["agents"])
session_router = APIRouter(prefix="/s/{session}/v1", tags=["agents"])


class CompletionRequest(RequestBody):
    """A request for the text after a prompt. The run fixes the sampling parameters, as it trains on them."""

    model: Literal["policy"] = "policy"
    prompt: str = Field(min_length=1, description="may begin with an earlier prompt and its completion")
    max_tokens: int | None = Field(default=None, ge=1, description="the same in all requests of a session")
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    stream: Literal[False] | None = None
    logprobs: None = None
    user: str | None = None  # has no effect

    def to_call(self) -> TurnRequest:
        return TurnRequest((ChatMessage("user", self.prompt),), self.max_tokens, is_text=True)

    def check(self, context: RunContext) -> None:
        """Raises ServiceError for a run with messages, or parameters that the run does not sample with."""
        if context.setup.config.data.chat_template:
            raise ServiceError(
                400, "a prompt without messages needs data.chat_template = false; use chat completions"
            )
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        check_sampling(context, {"temperature": self.temperature, "top_p": self.top_p, "stop": stop})


class TextChoice(BaseModel):
    """The only choice of a completion."""

    index: Literal[0] = 0
    text: str
    logprobs: None = None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int]  # as sampled, and as trained on


class TextCompletion(BaseModel):
    """OpenAI's completion, with the policy version and the tokens left in the episode."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: Literal["policy"] = "policy"
    choices: list[TextChoice]
    usage: Usage
    version: int  # that generated the turn
    num_tokens_left: int  # that the episode may still have


@router.post("/completions")
async def create_text_completion(
    body: CompletionRequest, run: Run, request: Request, dora_session: SessionHeader
) -> TextCompletion:
    """The text that the model generates after a prompt, by the version of the session."""
    return _completion(await next_turn(dora_session, body, run, request))


@session_router.post("/completions")
async def create_text_completion_of_session(
    session: SessionName, body: CompletionRequest, run: Run, request: Request
) -> TextCompletion:
    """The same without a header; the first request opens the session. 503 if no episode is waiting."""
    await open_if_new(session, body, run, request)
    return _completion(await next_turn(session, body, run, request))


def _completion(turn: SessionTurn) -> TextCompletion:
    answer = turn.answer
    choice = TextChoice(
        text=answer.text,
        finish_reason="stop" if answer.turn.finish_reason == "stop" else "length",
        token_ids=answer.turn.token_ids,
    )
    return TextCompletion(
        id=f"cmpl-{turn.name}",
        created=int(time.time()),
        choices=[choice],
        usage=usage_of(turn),
        version=turn.version,
        num_tokens_left=answer.turn.num_left,
    )
