"""An episode of an environment of verifiers, in its own rollout loop; the last line is its reward."""

import os

import verifiers as vf
from datasets import Dataset
from verifiers.types import ClientConfig


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def is_right(completion: list, answer: str) -> float:
    """1 for the right sum."""
    return float(completion[-1]["content"].strip() == answer)


row = {"question": os.environ["DORA_PROMPT"], "answer": "5"}
data = Dataset.from_list([row])
rubric = vf.Rubric(funcs=[is_right])
if os.environ.get("VERIFIERS_ENV") == "single":
    env = vf.SingleTurnEnv(eval_dataset=data, rubric=rubric)
else:
    env = vf.ToolEnv(tools=[add], eval_dataset=data, rubric=rubric)
client = ClientConfig(api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY", max_retries=0)
results = env.evaluate_sync(client=client, model="policy", sampling_args={})
print(results["outputs"][0]["reward"])
