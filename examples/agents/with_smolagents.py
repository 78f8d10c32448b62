"""An episode of a ToolCallingAgent of smolagents."""

import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


base_url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
model = OpenAIServerModel("policy", api_base=base_url, api_key=key, tool_choice="auto")
print(ToolCallingAgent([add], model).run(os.environ["DORA_PROMPT"]))
