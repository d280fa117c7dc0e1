"""Sessions in which this engine reads weights out of a trainer's memory."""

import uuid

import torch

from slime.backends.embedded_engine.errors import BadRequest
from slime.weight_sync.remote_memory import RemoteMemory, RemoteSpan

_TIMEOUT_S = 300.0
"""How long the read of one bucket may take, as over a process group."""


class RemoteWeights:
    """One session at a time: a trainer that was killed has not closed its own.

    Args:
        device: the engine's.
        tp_size: its tensor-parallel ranks, each of which reads every bucket.
    """

    def __init__(self, device: torch.device, tp_size: int = 1) -> None:
        self._device, self._tp_size = device, tp_size
        self._name: str | None = None
        self._memory: RemoteMemory | None = None
        self._buffers: list[torch.Tensor] = []

    def open(self, name: str, metadata: bytes, size: int, within_host: bool) -> None:
        """Meets the trainer in the place of whoever had a session here.

        Args:
            size: bytes of the largest bucket.
            within_host: whether the trainer is on this machine.

        Raises:
            BadRequest: NIXL is not here or cannot start, or this is nobody's metadata.
        """
        self.leave()
        try:
            memory = RemoteMemory(f"engine-{uuid.uuid4().hex}", within_host)
            memory.meet(metadata)
            self._buffers = [
                torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(self._tp_size)
            ]
            for buffer in self._buffers:
                memory.expose(buffer)
        except RuntimeError as error:
            raise BadRequest(f"session {name!r}: {error}") from error
        self._name, self._memory = name, memory

    def receive(self, name: str, source: RemoteSpan) -> list[torch.Tensor]:
        """Reads a bucket for each rank, into memory that is valid until the next call; at most 300 s.

        Raises:
            BadRequest: there is no such session, no room, or the trainer cannot be read.
        """
        if self._memory is None or name != self._name:
            raise BadRequest(f"session {name!r} does not exist (known: {self._name!r})")
        if not 0 <= source.size <= self._buffers[0].numel():
            raise BadRequest(f"a bucket of {source.size} bytes (wanted: 0 to {self._buffers[0].numel()})")
        found = [buffer[: source.size] for buffer in self._buffers]
        try:
            for target in found if source.size else ():
                self._memory.read(source, target, _TIMEOUT_S)
        except (RuntimeError, TimeoutError) as error:
            self.leave()  # a read that is still under way may fill the memory at any time
            raise BadRequest(f"session {name!r}: {error}") from error
        return found

    def close(self, name: str) -> None:
        """
        Raises:
            BadRequest: there is no such session.
        """
        if name != self._name:
            raise BadRequest(f"session {name!r} does not exist (known: {self._name!r})")
        self.leave()

    def leave(self) -> None:
        """Gives up the session that there is, if any."""
        if self._memory is not None:
            self._memory.close()
        self._name, self._memory, self._buffers = None, None, []
