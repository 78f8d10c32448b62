"""The shop as a program with OpenAI's client, which knows nothing of DORA-RL. Prints the reward.

It reads OPENAI_BASE_URL and OPENAI_API_KEY; the question and its row are in DORA_PROMPT and DORA_FIELDS.
"""

from __future__ import annotations

import json
import os
from typing import Any

import openai
import shop


def run_episode(question: str, row: dict[str, Any]) -> float:
    """Let the model call tools until it answers; the reward of its answer."""
    client = openai.OpenAI()
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(shop.MAX_TURNS):
        completion = client.chat.completions.create(model="policy", messages=messages, tools=shop.TOOLS)
        message = completion.choices[0].message
        if not message.tool_calls:
            return shop.reward_of(message.content, row)
        messages.append(message)
        for call in message.tool_calls:
            result = shop.call_tool(call.function.name, call.function.arguments, row)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


if __name__ == "__main__":
    print(run_episode(os.environ["DORA_PROMPT"], json.loads(os.environ["DORA_FIELDS"])))
