"""The shop as a taskset of verifiers. Its only task is the row that `dora rollout` passes on.

    PYTHONPATH=$PWD/examples/tool_caller dora rollout runs/shop -- \\
        python examples/agents/with_verifiers.py shop_taskset
"""

import json
import os

import shop
import verifiers.v1 as vf


class ShopData(vf.TaskData):
    row: dict


class ShopTools(vf.Toolset[vf.ToolsetConfig]):
    """A server of the tools."""

    TOOL_PREFIX = None  # names of tools are those of the methods

    async def setup_task(self, task: ShopData) -> None:
        """Called before the first tool."""
        self.row = task.row

    @vf.tool
    def lookup(self, item: str) -> str:
        """The price of an item."""
        return shop.call_tool("lookup", json.dumps({"item": item}), self.row)

    @vf.tool
    def calculate(self, expression: str) -> str:
        """A product or sum of two numbers, such as 12*34."""
        return shop.call_tool("calculate", json.dumps({"expression": expression}), self.row)


class Purchase(vf.Task[ShopData]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [ShopTools(vf.ToolsetConfig())]

    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        """1 for the right answer."""
        return shop.reward_of(trace.last_reply, self.data.row)


class Shop(vf.Taskset[Purchase]):
    def load(self) -> list[Purchase]:
        row = json.loads(os.environ["DORA_FIELDS"])
        return [Purchase(ShopData(prompt=os.environ["DORA_PROMPT"], row=row))]


__all__ = ["Shop"]

if __name__ == "__main__":
    ShopTools.run()
