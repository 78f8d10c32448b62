"""An episode of mini-swe-agent. Prints the reward. Its commands run on this machine: use a container."""

import json
import os

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

prompt, row = os.environ["DORA_PROMPT"], json.loads(os.environ["DORA_FIELDS"])
base_url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
for name in [*os.environ]:  # commands of the model get the environment, and must not read the answer
    if name.startswith(("ANTHROPIC_", "DORA_", "OPENAI_")):
        del os.environ[name]
model = LitellmModel(
    model_name="openai/policy",
    model_kwargs={"api_base": base_url, "api_key": key},
    cost_tracking="ignore_errors",
)
templates = {"system_template": "You use a shell.", "instance_template": "{{task}}"}
agent = DefaultAgent(model, LocalEnvironment(), step_limit=20, **templates)
answer = agent.run(prompt)["submission"]
print(float(answer.strip() == str(row["answer"])))
