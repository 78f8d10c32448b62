"""A stand-in for NIXL, whose agents are in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor

MODULE = "nixl._api"


class Agent:
    """An agent that reads the registered memory of all others."""

    registered: ClassVar[dict[tuple[str, int], Tensor]] = {}  # by agent and address
    agents: ClassVar[dict[str, Agent]] = {}
    state = "DONE"  # in which each read ends

    def __init__(self, name: str, config: Any) -> None:
        assert (config.backends, config.enable_prog_thread) == (["UCX"], False)
        self.name, self.known, self.notifications = name, set[str](), list[bytes]()
        self.agents[name] = self

    def exit(self) -> None:
        """As if its process had been killed."""
        del self.agents[self.name]

    def register_memory(self, tensors: list[Tensor]) -> list[int]:
        addresses = [tensor.data_ptr() for tensor in tensors]
        self.registered.update({(self.name, tensor.data_ptr()): tensor for tensor in tensors})
        return addresses

    def deregister_memory(self, addresses: list[int]) -> None:
        for address in addresses:
            del self.registered[self.name, address]

    def get_partial_agent_metadata(
        self, addresses: list[int], has_connection: bool, backends: list[str]
    ) -> bytes:
        assert has_connection
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
        ((address, num_bytes, device),) = theirs
        assert (operation, device, agent in self.known) == ("READ", 0, True)
        if (source := self.registered.get((agent, address))) is None or source.nbytes != num_bytes:
            raise AgentError("NIXL_ERR_NOT_FOUND")
        assert (self.name, own[0].data_ptr()) in self.registered
        return SimpleNamespace(source=source, target=own[0], agent=agent, key=notification, release=int)

    def transfer(self, handle: Any) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
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
