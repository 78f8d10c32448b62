"""The shop as a tool environment of verifiers, in its own rollout loop. Prints the reward."""

import json
import os

import shop
import verifiers as vf
from datasets import Dataset
from verifiers.types import ClientConfig

row = json.loads(os.environ["DORA_FIELDS"])


def lookup(item: str) -> str:
    """The price of an item."""
    return shop.call_tool("lookup", json.dumps({"item": item}), row)


def calculate(expression: str) -> str:
    """A product or sum of two numbers, such as 12*34."""
    return shop.call_tool("calculate", json.dumps({"expression": expression}), row)


def is_right(completion: list) -> float:
    """1 for the right answer."""
    return shop.reward_of(completion[-1]["content"], row)


env = vf.ToolEnv(
    tools=[lookup, calculate],
    max_turns=shop.MAX_TURNS,
    eval_dataset=Dataset.from_list([{"question": os.environ["DORA_PROMPT"]}]),
    rubric=vf.Rubric(funcs=[is_right]),
)
client = ClientConfig(api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY", max_retries=0)
results = env.evaluate_sync(client=client, model="policy", sampling_args={})
print(results["outputs"][0]["reward"])
