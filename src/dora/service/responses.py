"""The turns of a session in OpenAI's Responses API, whole or as server-sent events.

A client sends the whole conversation with each request: the service stores no responses.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, BeforeValidator, Field

from dora.runtime.rollout.agent_sessions import ChatMessage, TurnRequest
from dora.service.agents import SessionName, SessionTurn, check_sampling, next_turn, open_if_new
from dora.service.chat_completions import FunctionCallParam, FunctionParam, TextFormat
from dora.service.context import Run, RunContext
from dora.service.models import MessageBody, RequestBody, event_stream

router = APIRouter(prefix="/s/{session}/v1", tags=["agents"])


_Event = tuple[str, dict[str, Any]]  # type and fields


class ContentPart(MessageBody):
    """Text as part of an item's content."""

    type: Literal["input_text", "output_text"]
    text: str


class MessageItem(MessageBody):
    """A message of the conversation."""

    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]


class CallItem(FunctionCallParam):
    """A call of the model, as the response had it."""

    type: Literal["function_call"]
    call_id: str


class CallOutputItem(MessageBody):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ContentPart]


def _with_type(item: object) -> object:
    """A message may leave out its type."""
    return {"type": "message", **item} if isinstance(item, dict) else item


Item = Annotated[
    Annotated[MessageItem | CallItem | CallOutputItem, Field(discriminator="type")],
    BeforeValidator(_with_type),
]


def _refuse_reference(id: object) -> None:
    """A conversation cannot refer to an earlier response."""
    if id is not None:
        raise ValueError("no response is stored; send the whole conversation as input")


class ResponseTool(FunctionParam):
    """A function that the model may call."""

    type: Literal["function"]

    def to_tool(self) -> dict[str, Any]:
        return {"type": self.type, "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class TextConfig(RequestBody):
    """The format of the text."""

    format: TextFormat | None = None


class ResponseRequest(RequestBody):
    """A request for the model's next turn. The run fixes the sampling parameters, as it trains on them."""

    model: Literal["policy"] = "policy"
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = Field(default=None, description="the system message before `input`")
    max_output_tokens: int | None = Field(
        default=None, ge=1, description="maximum length of a turn, the same in all requests of a session"
    )
    tools: list[ResponseTool] | None = Field(
        default=None, description="the same in all requests of a session; the model's template shows them"
    )
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextConfig | None = None
    truncation: Literal["disabled"] | None = None
    include: Annotated[list[str], Field(max_length=0)] | None = None
    previous_response_id: Annotated[None, BeforeValidator(_refuse_reference)] = None
    store: bool | None = None  # has no effect, as the next three
    user: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None

    def to_call(self) -> TurnRequest:
        """Raises ServiceError for arguments of a tool call that are no JSON object."""
        tools = () if self.tool_choice == "none" else tuple(tool.to_tool() for tool in self.tools or ())
        system = [ChatMessage("system", self.instructions)] if self.instructions else []
        items = self.input if isinstance(self.input, list) else []
        messages = _messages(items) if items else [ChatMessage("user", str(self.input))]
        return TurnRequest((*system, *messages), self.max_output_tokens, tools)

    def check(self, context: RunContext) -> None:
        """Raises ServiceError for parameters that the run does not sample with."""
        check_sampling(context, {"temperature": self.temperature, "top_p": self.top_p})


def _messages(items: list[MessageItem | CallItem | CallOutputItem]) -> list[ChatMessage]:
    """The calls of a turn belong to the message of the model before them."""
    messages: list[ChatMessage] = []
    for item in items:
        match item:
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                messages.append(ChatMessage(role, _text(item.content)))
            case CallOutputItem():
                messages.append(ChatMessage("tool", _text(item.output)))
            case CallItem():
                if not messages or messages[-1].role != "assistant":
                    messages.append(ChatMessage("assistant", ""))
                before = messages[-1]
                messages[-1] = ChatMessage("assistant", before.content, (*before.calls, item.to_call()))
    return messages


def _text(content: str | list[ContentPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class ResponseUsage(BaseModel):
    """Numbers of tokens; the input is all that the turn follows."""

    input_tokens: int
    input_tokens_details: dict[str, int] = {"cached_tokens": 0, "cache_write_tokens": 0}
    output_tokens: int
    output_tokens_details: dict[str, int] = {"reasoning_tokens": 0}
    total_tokens: int


class Response(BaseModel):
    """OpenAI's response, with the policy version and the tokens left in the episode."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["completed", "incomplete"]
    error: None = None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: Literal["policy"] = "policy"
    output: list[dict[str, Any]]
    parallel_tool_calls: Literal[True] = True
    previous_response_id: None = None
    temperature: float | None
    tool_choice: Literal["auto", "none"]
    tools: list[dict[str, Any]]
    top_p: float | None
    usage: ResponseUsage
    version: int  # that generated the turn
    num_tokens_left: int  # that the episode may still have
    token_ids: list[int]  # as sampled, and as trained on


@router.post("/responses", response_model=Response)
async def create_response(
    session: SessionName, body: ResponseRequest, run: Run, request: Request
) -> Response | PlainTextResponse:
    """The model's next turn; the first request opens the session. 503 if no episode is waiting."""
    await open_if_new(session, body, run, request)
    response = _response(body, await next_turn(session, body, run, request))
    return event_stream(_events(response)) if body.stream else response


def _response(body: ResponseRequest, turn: SessionTurn) -> Response:
    answer, (num_prompt_tokens, num_tokens) = turn.answer, turn.num_tokens
    is_whole = answer.turn.finish_reason == "stop"
    status: Literal["completed", "incomplete"] = "completed" if is_whole or turn.calls else "incomplete"
    content, output = answer.parsed.content, list[dict[str, Any]]()
    if content or not turn.calls:
        part = {"type": "output_text", "text": content, "annotations": []}
        about = {"type": "message", "id": f"msg_{turn.name}", "role": "assistant", "status": status}
        output.append({**about, "content": [part]})
    for id, call in turn.calls:
        named = {"call_id": id, "name": call.name, "arguments": call.arguments}
        output.append({"type": "function_call", "id": f"fc_{id}", **named, "status": "completed"})
    return Response(
        id=f"resp_{turn.name}",
        created_at=int(time.time()),
        status=status,
        incomplete_details=None if status == "completed" else {"reason": "max_output_tokens"},
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        output=output,
        temperature=body.temperature,
        tool_choice=body.tool_choice or "auto",
        tools=[tool.model_dump() for tool in body.tools or ()],
        top_p=body.top_p,
        usage=ResponseUsage(
            input_tokens=num_prompt_tokens,
            output_tokens=num_tokens,
            total_tokens=num_prompt_tokens + num_tokens,
        ),
        version=turn.version,
        num_tokens_left=answer.turn.num_left,
        token_ids=answer.turn.token_ids,
    )


def _events(response: Response) -> Iterator[str]:
    """The response as events. The turn is finished, so each text and each call is one delta."""
    whole = response.model_dump()
    begun = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[_Event] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
    ]
    for index, item in enumerate(response.output):
        about = {"output_index": index, "item_id": item["id"]}
        is_call = item["type"] == "function_call"
        empty: dict[str, Any] = {"arguments": ""} if is_call else {"content": []}
        events.append(
            (
                "response.output_item.added",
                {"output_index": index, "item": item | empty | {"status": "in_progress"}},
            )
        )
        events += _call_events(item, about) if is_call else _text_events(item["content"][0], about)
        events.append(("response.output_item.done", {"output_index": index, "item": item}))
    events.append((f"response.{response.status}", {"response": whole}))
    for number, (type, fields) in enumerate(events):
        data = {"type": type, "sequence_number": number, **fields}
        yield f"event: {type}\ndata: {json.dumps(data)}\n\n"


def _call_events(item: dict[str, Any], about: dict[str, Any]) -> list[_Event]:
    name = "response.function_call_arguments"
    done = about | {"arguments": item["arguments"], "name": item["name"]}
    return [(f"{name}.delta", about | {"delta": item["arguments"]}), (f"{name}.done", done)]


def _text_events(part: dict[str, Any], about: dict[str, Any]) -> list[_Event]:
    at = about | {"content_index": 0}
    return [
        ("response.content_part.added", at | {"part": part | {"text": ""}}),
        ("response.output_text.delta", at | {"delta": part["text"], "logprobs": []}),
        ("response.output_text.done", at | {"text": part["text"], "logprobs": []}),
        ("response.content_part.done", at | {"part": part}),
    ]
