"""An episode through LiteLLM: the model calls a tool and reads its result. Prints the reward."""

import json
import os

import litellm

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
about = {
    "model": "openai/policy",
    "api_base": os.environ["OPENAI_BASE_URL"],
    "api_key": os.environ["OPENAI_API_KEY"],
    "tools": TOOLS,
}
messages = [{"role": "user", "content": os.environ["DORA_PROMPT"]}]
while True:
    message = litellm.completion(messages=messages, **about).choices[0].message
    if not message.tool_calls:
        break
    messages.append(message.model_dump())
    for call in message.tool_calls:
        result = sum(json.loads(call.function.arguments).values())
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
expected = json.loads(os.environ["DORA_FIELDS"])["answer"]
print(float((message.content or "").strip() == str(expected)))
