"""An episode of OpenAI's Agents SDK, with its default, the Responses API."""

import os

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


set_tracing_disabled(True)
agent = Agent(name="calculator", instructions="Use the tool.", tools=[add], model="policy")
print(Runner.run_sync(agent, os.environ["DORA_PROMPT"]).final_output)
