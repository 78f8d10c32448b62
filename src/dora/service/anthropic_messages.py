"""The turns of a session as messages of Anthropic's API, whole or as server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field

from dora.data.tool_calls import ToolCall
from dora.errors import ServiceError
from dora.runtime.rollout.agent_sessions import ChatMessage, TurnRequest
from dora.service.agents import SessionName, SessionTurn, check_sampling, next_turn, open_if_new
from dora.service.chat_completions import TextPart
from dora.service.context import Run, RunContext
from dora.service.models import JsonObject, MessageBody, RequestBody, event_stream

router = APIRouter(prefix="/s/{session}/v1", tags=["agents"])


class ToolUseBlock(MessageBody):
    """A call of the model, as the response had it."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject


class ToolResultBlock(MessageBody):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextPart] = ""


Block = Annotated[TextPart | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class MessageParam(MessageBody):
    """A message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | list[Block]

    def to_messages(self) -> list[ChatMessage]:
        """Each tool result is a message of its own, before the text beside it.

        Raises ServiceError for blocks that a message of this role cannot have.
        """
        blocks = [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        if self.role == "assistant" and any(isinstance(block, ToolResultBlock) for block in blocks):
            raise ServiceError(400, "a tool_result block must be in a message with role user")
        if self.role == "user" and any(isinstance(block, ToolUseBlock) for block in blocks):
            raise ServiceError(400, "a tool_use block must be in a message with role assistant")
        text = _text([block for block in blocks if isinstance(block, TextPart)])
        calls = tuple(
            ToolCall.make(block.name, block.input) for block in blocks if isinstance(block, ToolUseBlock)
        )
        results = [
            ChatMessage("tool", _text(block.content))
            for block in blocks
            if isinstance(block, ToolResultBlock)
        ]
        return [*results, ChatMessage(self.role, text, calls)] if text or not results else results


class AnthropicTool(MessageBody):
    """A tool that the model may call; `input_schema` is a JSON schema."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    input_schema: JsonObject

    def to_tool(self) -> dict[str, Any]:
        about = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **about, "parameters": self.input_schema}}


class ToolChoice(RequestBody):
    """Whether the model may call tools."""

    type: Literal["auto", "none"]
    disable_parallel_tool_use: Literal[False] | None = None


class MessageRequest(RequestBody):
    """A request for the model's next turn. The run fixes the sampling parameters, as it trains on them."""

    model: str = Field(description="any: the session has one model, the policy")
    messages: list[MessageParam] = Field(min_length=1)
    system: str | list[TextPart] | None = None
    max_tokens: int = Field(
        ge=1, description="maximum length of a turn, the same in all requests of a session"
    )
    tools: list[AnthropicTool] | None = Field(
        default=None, description="the same in all requests of a session; the model's template shows them"
    )
    tool_choice: ToolChoice | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None  # has no effect

    def to_call(self) -> TurnRequest:
        """Raises ServiceError for blocks that a message of their role cannot have."""
        system = [ChatMessage("system", _text(self.system))] if self.system else []
        messages = [message for param in self.messages for message in param.to_messages()]
        is_off = self.tool_choice is not None and self.tool_choice.type == "none"
        tools = () if is_off else tuple(tool.to_tool() for tool in self.tools or ())
        return TurnRequest((*system, *messages), self.max_tokens, tools)

    def check(self, context: RunContext) -> None:
        """Raises ServiceError for parameters that the run does not sample with."""
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        check_sampling(context, {**given, "stop": self.stop_sequences})


class MessageUsage(BaseModel):
    """Numbers of tokens; the input is all that the turn follows."""

    input_tokens: int
    output_tokens: int


class Message(BaseModel):
    """Anthropic's message, with the policy version and the tokens left in the episode."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: Literal["policy"] = "policy"
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "tool_use"]
    stop_sequence: None = None
    usage: MessageUsage
    version: int  # that generated the turn
    num_tokens_left: int  # that the episode may still have


@router.post("/messages", response_model=Message)
async def create_message(
    session: SessionName, body: MessageRequest, run: Run, request: Request
) -> Message | PlainTextResponse:
    """The model's next turn; the first request opens the session. 503 if no episode is waiting."""
    await open_if_new(session, body, run, request)
    message = _message(await next_turn(session, body, run, request))
    return event_stream(_events(message)) if body.stream else message


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _message(turn: SessionTurn) -> Message:
    answer, (num_prompt_tokens, num_tokens) = turn.answer, turn.num_tokens
    calls = [
        {"type": "tool_use", "id": id, "name": call.name, "input": json.loads(call.arguments)}
        for id, call in turn.calls
    ]
    text = [{"type": "text", "text": answer.parsed.content}] if answer.parsed.content else []
    is_whole = answer.turn.finish_reason == "stop"
    return Message(
        id=f"msg_{turn.name}",
        content=[*text, *calls],
        stop_reason="tool_use" if calls else "end_turn" if is_whole else "max_tokens",
        usage=MessageUsage(input_tokens=num_prompt_tokens, output_tokens=num_tokens),
        version=turn.version,
        num_tokens_left=answer.turn.num_left,
    )


def _events(message: Message) -> Iterator[str]:
    """The message as events. The turn is finished, so each block is one delta."""
    start = message.model_dump() | {"content": [], "stop_reason": None}
    yield _event("message_start", message=start)
    for index, block in enumerate(message.content):
        empty: dict[str, Any] = {"text": ""}
        delta = {"type": "text_delta", "text": block.get("text")}
        if block["type"] == "tool_use":
            empty = {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield _event("content_block_start", index=index, content_block=block | empty)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    end = {"stop_reason": message.stop_reason, "stop_sequence": None}
    yield _event("message_delta", delta=end, usage=message.usage.model_dump())
    yield _event("message_stop")


def _event(type: str, **fields: Any) -> str:
    return f"event: {type}\ndata: {json.dumps({'type': type, **fields})}\n\n"
