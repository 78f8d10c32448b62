"""An episode of OpenAI's Agents SDK, with its default, the Responses API. Prints the reward."""

import json
import os

from agents import Agent, Runner, function_tool, set_tracing_disabled
from agents.exceptions import AgentsException


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


set_tracing_disabled(True)
agent = Agent(name="calculator", instructions="Use the tool.", tools=[add], model="policy")
try:
    answer = str(Runner.run_sync(agent, os.environ["DORA_PROMPT"]).final_output)
except AgentsException:  # for example a turn that is cut, or a tool that does not exist
    answer = ""
print(float(answer.strip() == str(json.loads(os.environ["DORA_FIELDS"])["answer"])))
