"""A taskset of verifiers, with a tool that adds."""

import verifiers.v1 as vf


class Adder(vf.Toolset[vf.ToolsetConfig]):
    """A server of tools."""

    TOOL_PREFIX = None  # names of tools are those of the methods

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Adder(vf.ToolsetConfig())]

    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Sums(vf.Taskset[Sum]):
    def load(self) -> list[Sum]:
        return [Sum(SumData(prompt=f"{a} + 3?", answer=str(a + 3))) for a in range(10)]


__all__ = ["Sums"]

if __name__ == "__main__":
    Adder.run()
