"""Memory of one process that another one reads by NIXL (extra ``nixl``), without help of the first.

trainer = RemoteMemory("trainer-1"); told = trainer.expose(memory), trainer.metadata()
engine = RemoteMemory("engine-1"); engine.meet(metadata); engine.read(place, target, timeout_s=60)
"""

import importlib
import os
import time
from contextlib import suppress
from typing import Any, NamedTuple

import torch

_POLL_S = 0.0002


class RemoteSpan(NamedTuple):
    """Registered bytes of another process.

    Attributes:
        kind: "DRAM", or "VRAM" of the GPU ``device``.
    """

    address: int
    size: int
    device: int
    kind: str


class RemoteMemory:
    """An agent of NIXL. Not for several threads at once.

    Args:
        name: no two agents that meet may have the same one.
        within_host: whether no other machine has to reach it: then no other one can.

    Raises:
        RuntimeError: NIXL is not installed, or cannot start.
    """

    def __init__(self, name: str, within_host: bool) -> None:
        if within_host:
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        try:
            # A thread of its own answers readers while this process does something else.
            self._agent: Any = importlib.import_module("nixl").nixl_agent(name)
        except Exception as error:  # what a native library raises has no type of its own
            raise RuntimeError(f"NIXL cannot be used: {type(error).__name__}: {error}") from error
        self._registered: list[Any] = []
        self._peer: str | None = None

    def expose(self, memory: torch.Tensor) -> RemoteSpan:
        """Registers contiguous memory for reading, from here or from elsewhere, until `close`."""
        self._registered.append(self._agent.register_memory(memory))
        device = memory.device
        kind = "DRAM" if device.type == "cpu" else "VRAM"
        return RemoteSpan(memory.data_ptr(), memory.nbytes, device.index or 0, kind)

    def metadata(self) -> bytes:
        """What a reader has to know of this agent and the memory that is registered by now."""
        return bytes(self._agent.get_agent_metadata())

    def meet(self, metadata: bytes) -> None:
        """
        Raises:
            RuntimeError: this is not the metadata of an agent.
        """
        try:
            found = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise RuntimeError(f"metadata of NIXL: {type(error).__name__}: {error}") from error
        self._peer = found.decode() if isinstance(found, bytes) else found

    def read(self, source: RemoteSpan, target: torch.Tensor, timeout_s: float) -> None:
        """Fills registered memory with the first bytes of a place of the agent that was met.

        Raises:
            RuntimeError: the other process is gone, has no such memory, or there is no way to it.
            TimeoutError: it has not ended in time.
        """
        deadline = time.monotonic() + timeout_s
        size = target.nbytes
        try:
            places = self._agent.get_xfer_descs([(source.address, size, source.device)], source.kind)
            own = self._agent.get_xfer_descs(target)
            handle = self._agent.initialize_xfer("READ", own, places, self._peer)
            state = self._agent.transfer(handle)
            while state == "PROC" and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                state = self._agent.check_xfer_state(handle)
        except Exception as error:
            raise RuntimeError(f"read by NIXL of {size} bytes: {type(error).__name__}: {error}") from error
        with suppress(Exception):  # of one that has not ended, which is given up with the agent
            self._agent.release_xfer_handle(handle)
        if state == "PROC":
            raise TimeoutError(f"read by NIXL of {size} bytes: has not ended after {timeout_s:g} s")
        if state != "DONE":
            raise RuntimeError(f"read by NIXL of {size} bytes: state {state} (wanted: DONE)")

    def close(self) -> None:
        """Gives up the connection and what was registered; a reader that is left finds nobody."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        with suppress(Exception):  # what is lost already cannot be given up
            if self._peer is not None:
                agent.remove_remote_agent(self._peer)
        for each in self._registered:
            with suppress(Exception):
                agent.deregister_memory(each)
        self._registered = []
