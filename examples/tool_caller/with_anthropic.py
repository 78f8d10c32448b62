"""The shop through Anthropic's client, in the Messages API. Prints the reward.

It reads ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY.
"""

import json
import os

import anthropic
import shop


def run_episode() -> float:
    """Let the model call tools until it answers; the reward of its answer."""
    client, row = anthropic.Anthropic(), json.loads(os.environ["DORA_FIELDS"])
    functions = [tool["function"] for tool in shop.TOOLS]
    tools = [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]
    messages = [{"role": "user", "content": os.environ["DORA_PROMPT"]}]
    for _ in range(shop.MAX_TURNS):
        turn = client.messages.create(model="policy", max_tokens=40, messages=messages, tools=tools)
        calls = [block for block in turn.content if block.type == "tool_use"]
        if not calls:
            return shop.reward_of("".join(block.text for block in turn.content), row)
        results = [(call.id, shop.call_tool(call.name, json.dumps(call.input), row)) for call in calls]
        answers = [{"type": "tool_result", "tool_use_id": id, "content": result} for id, result in results]
        messages += [{"role": "assistant", "content": turn.content}, {"role": "user", "content": answers}]
    return 0.0


if __name__ == "__main__":
    print(run_episode())
