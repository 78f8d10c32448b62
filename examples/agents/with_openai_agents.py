"""An episode of OpenAI's Agents SDK, with its model of chat completions."""

import os

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


set_tracing_disabled(True)
model = OpenAIChatCompletionsModel(model="policy", openai_client=AsyncOpenAI())
agent = Agent(name="calculator", instructions="Use the tool.", tools=[add], model=model)
print(Runner.run_sync(agent, os.environ["DORA_PROMPT"]).final_output)
