"""The turns of a session as OpenAI chat completions, whole or as server-sent events.

A session is named by a header, or by the URL for programs that can only be given a base URL and an API key.
Tokens, not texts, are what is trained on: a text that was generated is never tokenized again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field

from dora.data.tool_calls import ToolCall, json_object
from dora.errors import ServiceError
from dora.runtime.rollout.agent_sessions import ChatMessage, TurnRequest
from dora.service.agents import (
    NAME_PATTERN,
    SessionName,
    SessionTurn,
    check_sampling,
    next_turn,
    open_if_new,
)
from dora.service.context import Run, RunContext
from dora.service.models import JsonObject, MessageBody, RequestBody, event_stream

router = APIRouter(prefix="/v1", tags=["agents"])
session_router = APIRouter(prefix="/s/{session}/v1", tags=["agents"])
SessionHeader = Annotated[str, Header(pattern=NAME_PATTERN, description="name of the session")]


class TextPart(MessageBody):
    """Text as part of a message's content."""

    type: Literal["text"]
    text: str


class FunctionCallParam(MessageBody):
    """Name and arguments of a call; the arguments are a JSON object as text."""

    name: str
    arguments: str

    def to_call(self) -> ToolCall:
        """Raises ServiceError unless the arguments are a JSON object."""
        arguments = json_object(self.arguments)
        if arguments is None:
            raise ServiceError(
                400, "the arguments of a tool call are no JSON object; send the call as the response had it"
            )
        return ToolCall.make(self.name, arguments)


class ToolCallParam(MessageBody):
    """A call of a tool, as the model wrote it."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCallParam


class ChatMessageParam(MessageBody):
    """A message of a conversation. Only its role, content and tool calls reach the model."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCallParam] | None = None
    function_call: None = None
    audio: None = None

    def to_message(self) -> ChatMessage:
        """The parts of the content are concatenated."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        return ChatMessage(role, text, tuple(call.function.to_call() for call in self.tool_calls or ()))


class FunctionParam(RequestBody):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ToolParam(RequestBody):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionParam

    def to_tool(self) -> dict[str, Any]:
        return {"type": "function", "function": self.function.model_dump(exclude_none=True)}


class StreamOptions(RequestBody):
    """What a stream has besides the turn."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextFormat(RequestBody):
    """The only format of responses: text as the model writes it."""

    type: Literal["text"]


class ChatCompletionRequest(RequestBody):
    """A request for the model's next turn. The run fixes the sampling parameters, as it trains on them."""

    model: Literal["policy"] = "policy"
    messages: list[ChatMessageParam] = Field(min_length=1)
    max_tokens: int | None = Field(
        default=None, ge=1, description="maximum length of a turn, the same in all requests of a session"
    )
    max_completion_tokens: int | None = Field(default=None, ge=1, description="the same as max_tokens")
    tools: list[ToolParam] | None = Field(
        default=None, description="the same in all requests of a session; the model's template shows them"
    )
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None  # the run's own, as temperature and top_p
    n: Literal[1] | None = None
    presence_penalty: float | None = Field(default=None, ge=0, le=0)
    frequency_penalty: float | None = Field(default=None, ge=0, le=0)
    response_format: TextFormat | None = None
    logprobs: bool | None = Field(
        default=None,
        description="of the distribution that tokens are sampled from, after temperature and filters",
    )
    top_logprobs: Literal[0] | None = None
    seed: None = None
    chat_template_kwargs: JsonObject | None = Field(
        default=None, description="the run's own, as vLLM's clients send them in extra_body"
    )
    user: str | None = None  # has no effect, as the next two
    metadata: dict[str, str] | None = None
    store: bool | None = None

    def to_call(self) -> TurnRequest:
        """Raises ServiceError for arguments of a tool call that are no JSON object."""
        tools = () if self.tool_choice == "none" else tuple(tool.to_tool() for tool in self.tools or ())
        messages = tuple(message.to_message() for message in self.messages)
        return TurnRequest(messages, self.max_tokens or self.max_completion_tokens, tools)

    def check(self, context: RunContext) -> None:
        """Raises ServiceError for parameters that the run does not sample or render prompts with."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        check_sampling(context, {"temperature": self.temperature, "top_p": self.top_p, "stop": stop})
        variables = context.setup.config.data.chat_template_kwargs
        if self.chat_template_kwargs not in (None, variables):
            expected = f"data.chat_template_kwargs = {json.dumps(variables)}"
            raise ServiceError(400, f"chat_template_kwargs must be the run's {expected}; leave it out")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ServiceError(
                400, "max_tokens and max_completion_tokens have the same meaning but differ; leave one out"
            )


class AssistantMessage(BaseModel):
    """The message that the model generated. Without tool calls the field `tool_calls` is left out."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[ToolCallParam] = Field(default=[], exclude_if=lambda calls: not calls)


class TokenLogprob(BaseModel):
    """A sampled token and its log-prob, in nats."""

    token: str
    logprob: float
    bytes: None = None
    top_logprobs: list[None] = []


class ChoiceLogprobs(BaseModel):
    """The log-probs of all tokens of the turn, with those of tool calls and of the token that stopped it."""

    content: list[TokenLogprob]
    refusal: None = None


class Choice(BaseModel):
    """The only choice of a completion."""

    index: Literal[0] = 0
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int]  # as sampled, and as trained on


class Usage(BaseModel):
    """Numbers of tokens; the prompt is all that the turn follows."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletion(BaseModel):
    """OpenAI's chat completion, with the policy version and the tokens left in the episode."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: Literal["policy"] = "policy"
    choices: list[Choice]
    usage: Usage
    version: int  # that generated the turn
    num_tokens_left: int  # that the episode may still have


class ServedModel(BaseModel):
    """The policy, as a model of OpenAI's API."""

    id: Literal["policy"] = "policy"
    object: Literal["model"] = "model"
    owned_by: str = "dora"


class ModelList(BaseModel):
    """The models of the service."""

    object: Literal["list"] = "list"
    data: list[ServedModel] = [ServedModel()]


@session_router.get("/models")
@router.get("/models")
async def get_models() -> ModelList:
    """The only model is the policy, in the version of the session."""
    return ModelList()


@router.post("/chat/completions", response_model=ChatCompletion)
async def create_completion(
    body: ChatCompletionRequest, run: Run, request: Request, dora_session: SessionHeader
) -> ChatCompletion | PlainTextResponse:
    """The model's next turn in a conversation, by the version of the session."""
    return _response(body, await next_turn(dora_session, body, run, request))


@session_router.post("/chat/completions", response_model=ChatCompletion)
async def create_completion_of_session(
    session: SessionName, body: ChatCompletionRequest, run: Run, request: Request
) -> ChatCompletion | PlainTextResponse:
    """The same without a header; the first request opens the session. 503 if no episode is waiting."""
    await open_if_new(session, body, run, request)
    return _response(body, await next_turn(session, body, run, request))


def _response(body: ChatCompletionRequest, turn: SessionTurn) -> ChatCompletion | PlainTextResponse:
    completion = _completion(turn, _logprobs(turn) if body.logprobs else None)
    if not body.stream:
        return completion
    has_usage = bool(body.stream_options and body.stream_options.include_usage)
    return event_stream(_events(completion, has_usage))


def _logprobs(turn: SessionTurn) -> ChoiceLogprobs:
    """Raises ServiceError if the engine reports none; the same request without `logprobs` gets the turn."""
    token_ids, logprobs = turn.answer.turn.token_ids, turn.answer.turn.logprobs
    if len(logprobs) != len(token_ids):
        raise ServiceError(400, "the run's engine does not report log-probs of turns; leave logprobs out")
    pairs = zip(token_ids, logprobs, strict=True)
    return ChoiceLogprobs(content=[TokenLogprob(token=turn.decode_token(id), logprob=x) for id, x in pairs])


def usage_of(turn: SessionTurn) -> Usage:
    """The number of tokens before the turn, and in it."""
    num_prompt_tokens, num_tokens = turn.num_tokens
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_tokens,
        total_tokens=num_prompt_tokens + num_tokens,
    )


def _completion(turn: SessionTurn, logprobs: ChoiceLogprobs | None) -> ChatCompletion:
    answer = turn.answer
    calls = [
        ToolCallParam(id=id, function=FunctionCallParam(name=call.name, arguments=call.arguments))
        for id, call in turn.calls
    ]
    content = answer.parsed.content
    end: Literal["stop", "length"] = "stop" if answer.turn.finish_reason == "stop" else "length"
    return ChatCompletion(
        id=f"chatcmpl-{turn.name}",
        created=int(time.time()),
        choices=[
            Choice(
                message=AssistantMessage(content=content if content or not calls else None, tool_calls=calls),
                logprobs=logprobs,
                finish_reason="tool_calls" if calls else end,
                token_ids=answer.turn.token_ids,
            )
        ],
        usage=usage_of(turn),
        version=turn.version,
        num_tokens_left=answer.turn.num_left,
    )


def _events(completion: ChatCompletion, has_usage: bool) -> Iterator[str]:
    """The completion as chunks. The turn is finished, so each field of the message is one chunk."""
    (choice,), message = completion.choices, completion.choices[0].message
    calls = [{"index": i, **call.model_dump()} for i, call in enumerate(message.tool_calls)]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": message.content and ""}]
    deltas += [{"content": message.content}] if message.content else []
    deltas += [{"tool_calls": [call]} for call in calls]
    about = completion.model_dump(include={"id", "created", "model", "version", "num_tokens_left"})
    about["object"] = "chat.completion.chunk"
    logprobs = choice.logprobs and choice.logprobs.model_dump()
    for delta in deltas:
        yield _event(
            about, choices=[{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}]
        )
        logprobs = None
    yield _event(about, choices=[{"index": 0, "delta": {}, "finish_reason": choice.finish_reason}])
    if has_usage:
        yield _event(about, choices=[], usage=completion.usage.model_dump())
    yield "data: [DONE]\n\n"


def _event(about: Mapping[str, Any], **fields: Any) -> str:
    return f"data: {json.dumps({**about, **fields})}\n\n"
