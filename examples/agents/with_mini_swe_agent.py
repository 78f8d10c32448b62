"""An episode of mini-swe-agent, whose commands run on this machine: start it in a container."""

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
print(agent.run(os.environ["DORA_PROMPT"])["submission"])
