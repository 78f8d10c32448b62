"""An episode of a ToolCallingAgent of smolagents. Prints the reward."""

import json
import os

from smolagents import AgentError, OpenAIServerModel, ToolCallingAgent, tool


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
try:
    answer = str(ToolCallingAgent([add], model).run(os.environ["DORA_PROMPT"]))
except AgentError:  # for example at the end of the episode's tokens
    answer = ""
print(float(answer.strip() == str(json.loads(os.environ["DORA_FIELDS"])["answer"])))
