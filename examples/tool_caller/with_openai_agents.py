"""The shop as an agent of OpenAI's Agents SDK, with its default, the Responses API. Prints the reward."""

import json
import os

import shop
from agents import Agent, Runner, function_tool, set_tracing_disabled
from agents.exceptions import AgentsException

row = json.loads(os.environ["DORA_FIELDS"])


@function_tool
def lookup(item: str) -> str:
    """The price of an item."""
    return shop.call_tool("lookup", json.dumps({"item": item}), row)


@function_tool
def calculate(expression: str) -> str:
    """A product or sum of two numbers, such as 12*34."""
    return shop.call_tool("calculate", json.dumps({"expression": expression}), row)


set_tracing_disabled(True)
agent = Agent(name="shop", tools=[lookup, calculate], model="policy")
try:
    result = Runner.run_sync(agent, os.environ["DORA_PROMPT"], max_turns=shop.MAX_TURNS)
    print(shop.reward_of(result.final_output, row))
except AgentsException:  # a tool that does not exist, a turn that is cut, or too many turns
    print(0.0)
