"""The shop as a program with OpenAI's client, which knows nothing of DORA-RL. Prints the reward.

It reads OPENAI_BASE_URL and OPENAI_API_KEY; the question and its row are in DORA_PROMPT and DORA_FIELDS.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import shop


def run_episode(complete: Callable[..., Any]) -> float:
    """Let the model call tools until it answers; the reward of its answer. `complete` makes a completion."""
    row = json.loads(os.environ["DORA_FIELDS"])
    messages: list[Any] = [{"role": "user", "content": os.environ["DORA_PROMPT"]}]
    for _ in range(shop.MAX_TURNS):
        message = complete(model="policy", messages=messages, tools=shop.TOOLS).choices[0].message
        if not message.tool_calls:
            return shop.reward_of(message.content, row)
        messages.append(message.model_dump())
        for call in message.tool_calls:
            result = shop.call_tool(call.function.name, call.function.arguments, row)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


if __name__ == "__main__":
    import openai

    print(run_episode(openai.OpenAI().chat.completions.create))
