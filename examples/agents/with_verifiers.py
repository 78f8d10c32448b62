"""An episode of a taskset of verifiers, in the rollout loop of verifiers. Prints the reward.

    python with_verifiers.py TASKSET

The field `idx` of the row is the number of the task. Without it, this is the first task.
"""

import asyncio
import json
import os
import sys

import verifiers.v1 as vf

MAX_TURNS = 10


async def run(taskset: str, number: int) -> float:
    """Run a task with the harness `null`, a chat loop, in a process of this machine. Returns the reward."""
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": MAX_TURNS}
    env = vf.load_environment(vf.SingleAgentEnvConfig(taskset={"id": taskset}, agent=agent))
    (task,) = env.taskset.include(idx=[number])
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext(model="policy", client=client))
    if not episode.ok:
        sys.exit(f"{episode.errors or [trace.errors for trace in episode.traces]}")
    return episode.traces[0].reward


print(asyncio.run(run(sys.argv[1], json.loads(os.environ["DORA_FIELDS"]).get("idx", 0))))
