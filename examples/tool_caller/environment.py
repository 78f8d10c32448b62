"""The shop as an environment in processes of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import shop

from dora.data.tool_calls import parser_of
from dora.envs.base import Environment, Observation, Step

PARSE = parser_of(shop.CALL_FORMAT)


class Shop(Environment):
    """The reward is 1 if the answer is right. A turn without a call is the answer."""

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """The tools, as the model's template shows them to an agent, and the question."""
        self._row = row
        return [
            {"role": "system", "content": shop.tools_text()},
            {"role": "user", "content": str(row["prompt"])},
        ]

    async def step(self, action: str) -> Step:
        """Call the tools, or score the answer."""
        assert PARSE is not None
        content, calls = PARSE(action, shop.TOOLS)
        if not calls:
            return Step("", shop.reward_of(content, self._row), True)
        results = [shop.call_tool(call.name, call.arguments, self._row) for call in calls]
        return Step([{"role": "tool", "content": result} for result in results], 0.0, False)
