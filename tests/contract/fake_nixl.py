"""A stand-in for NIXL, whose agents are in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor

MODULE = "nixl._api"


class Agent:
    """An agent that reads the registered memory of all others."""

    agents: ClassVar[dict[str, Agent]] = {}
    state = "DONE"  # of each read; "ERR": it raises an error

    def __init__(self, name: str, config: Any) -> None:
        assert (config.backends, config.enable_prog_thread) == (["UCX"], False)
        self.name, self.known, self.notifications = name, set[str](), list[bytes]()
        self.memory = list[Tensor]()
        self.agents[name] = self

    def exit(self) -> None:
        """As if its process had been killed."""
        del self.agents[self.name]

    def register_memory(self, tensors: list[Tensor]) -> None:
        self.memory += tensors

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        if (name := metadata.decode()) not in self.agents or name == self.name:
            raise AgentError("NIXL_ERR_BACKEND")
        self.known.add(name)
        return name

    def remove_remote_agent(self, name: str) -> None:
        self.known.remove(name)

    def get_xfer_descs(self, descriptors: list[Any], memory: str | None = None) -> list[Any]:
        assert memory in (None, "DRAM")
        return descriptors

    def initialize_xfer(
        self, operation: str, own: list[Tensor], theirs: list[Any], agent: str, notification: bytes
    ) -> Any:
        ((address, num_bytes, device),), (target,) = theirs, own
        assert (operation, device, agent in self.known) == ("READ", 0, True)
        if agent not in self.agents:
            raise AgentError("NIXL_ERR_REMOTE_DISCONNECT")
        ((memory,), (own_memory,)) = self.agents[agent].memory, self.memory
        start, own_start = address - memory.data_ptr(), target.data_ptr() - own_memory.data_ptr()
        assert 0 <= start <= start + num_bytes <= memory.nbytes, "not registered"
        assert 0 <= own_start <= own_start + target.nbytes <= own_memory.nbytes, "not registered"
        source = memory[start : start + num_bytes]
        return SimpleNamespace(source=source, target=target, agent=agent, key=notification, release=int)

    def transfer(self, handle: Any) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        if self.state == "ERR":
            raise AgentError("NIXL_ERR_REMOTE_DISCONNECT")
        if self.state == "DONE":
            handle.target.copy_(handle.source)
            self.agents[handle.agent].notifications.append(handle.key)
        return self.state

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        notifications, self.notifications = self.notifications, []
        return {"another agent": notifications}


class AgentError(Exception):
    """NIXL's errors have no other base."""


MEMBERS = {"nixl_agent": Agent, "nixl_agent_config": SimpleNamespace}
