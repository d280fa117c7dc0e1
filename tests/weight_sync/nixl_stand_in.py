"""In place of NIXL: agents of one process, which read each other's registered memory."""

import ctypes
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

Span = tuple[int, int]


class Agent:
    """What `RemoteMemory` asks of ``nixl.nixl_agent``.

    Attributes:
        living: those with registered memory, by name.
        state: of every read; "PROC" never ends.
    """

    living: ClassVar[dict[str, "Agent"]] = {}
    state: ClassVar[str] = "DONE"

    def __init__(self, name: str) -> None:
        assert name not in self.living
        self.name, self.spans, self.peers = name, list[Span](), set[str]()

    def register_memory(self, memory: Any) -> Span:
        self.living[self.name] = self
        self.spans.append((memory.data_ptr(), memory.nbytes))
        return self.spans[-1]

    def deregister_memory(self, span: Span) -> None:
        self.spans.remove(span)
        if not self.spans:
            del self.living[self.name]

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.peers.add(self.living[metadata.decode()].name)
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self.peers.remove(name)

    def get_xfer_descs(self, places: Any, kind: str = "DRAM") -> Span:
        assert kind == "DRAM"
        return places[0][:2] if isinstance(places, list) else (places.data_ptr(), places.nbytes)

    def initialize_xfer(self, operation: str, own: Span, places: Span, peer: str) -> tuple[Span, Span]:
        assert operation == "READ" and peer in self.peers
        for agent, (address, size) in ((self, own), (self.living[peer], places)):
            assert any(start <= address and address + size <= start + most for start, most in agent.spans)
        return own, places

    def transfer(self, handle: tuple[Span, Span]) -> str:
        if self.state == "DONE":
            ctypes.memmove(handle[0][0], handle[1][0], handle[0][1])
        return self.state

    def check_xfer_state(self, handle: tuple[Span, Span]) -> str:
        return self.state

    def release_xfer_handle(self, handle: tuple[Span, Span]) -> None:
        return


def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[Agent]:
    """Puts it in place of NIXL, for this process."""
    monkeypatch.setitem(sys.modules, "nixl", SimpleNamespace(nixl_agent=Agent))
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setattr(Agent, "living", {})
    return Agent
