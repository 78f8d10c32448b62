"""The harness with LiteLLM in place of OpenAI's client."""

import os
from functools import partial

import harness
import litellm

about = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
litellm.model_alias_map = {"policy": "openai/policy"}
print(harness.run_episode(partial(litellm.completion, **about)))
