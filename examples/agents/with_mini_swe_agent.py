"""An episode of mini-swe-agent. Prints the reward. Its commands run on this machine: use a container."""

import json
import os

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

model = LitellmModel(
    model_name="openai/policy",
    model_kwargs={"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]},
    cost_tracking="ignore_errors",
)
templates = {"system_template": "You use a shell.", "instance_template": "{{task}}"}
agent = DefaultAgent(model, LocalEnvironment(), step_limit=20, **templates)
answer = agent.run(os.environ["DORA_PROMPT"])["submission"]
print(float(answer.strip() == str(json.loads(os.environ["DORA_FIELDS"])["answer"])))
