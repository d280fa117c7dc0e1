"""Process groups over which trainers send weights."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.model_config import CPU
from slime.utils.distributed_utils import init_process_group, join_again

_TIMEOUT = timedelta(seconds=300)


class Incoming(NamedTuple):
    """Memory of a rank of this engine for what another member of a group sends."""

    rank: int
    source: int
    memory: torch.Tensor


class WeightGroups:
    """Named groups of trainer ranks, which come first, and a receiver for each of this engine's ranks.

    Args:
        device: the engine's.
        tp_size: its tensor-parallel ranks.
    """

    def __init__(self, device: torch.device, tp_size: int = 1) -> None:
        self._device, self._tp_size = device, tp_size
        self._devices: dict[str, torch.device] = {}
        self._groups: dict[str, list[dist.ProcessGroup]] = {}  # in the order of the ranks
        self._joining: set[str] = set()
        self._kept: dict[str, list[torch.Tensor]] = {}

    def join(self, address: str, port: int, rank: int, world_size: int, name: str, backend: str) -> None:
        """Meets the trainer; blocks until all ranks are there, at most 300 s.

        Args:
            rank: of this engine's first one.

        Raises:
            BadRequest: ranks that cannot be, a backend this machine has not, a name that is taken, nobody at
                the address.
        """
        last = world_size - self._tp_size
        if not 1 <= rank <= last:
            raise BadRequest(f"rank_offset {rank}: wanted 1 to world_size - tp_size = {last}")
        known = {"gloo": CPU} | ({"nccl": self._device} if self._device.type == "cuda" else {})
        if backend not in known:
            wanted = " or ".join(map(repr, known))
            raise BadRequest(
                f"backend {backend!r}: not supported by the embedded engine on {self._device} "
                f"(wanted: {wanted})"
            )
        if name in self._joining:
            raise BadRequest(f"group {name!r} is being joined already")
        if name in self._groups:
            raise BadRequest(f"group {name!r} exists already (wanted: another name)")
        self._joining.add(name)
        try:
            self._groups[name] = self._meet(backend, f"tcp://{address}:{port}", world_size, rank, name)
            self._devices[name] = known[backend]
        except (RuntimeError, ValueError) as error:
            raise BadRequest(f"cannot join group {name!r} at {address}:{port}: {error}") from error
        finally:
            self._joining.discard(name)

    def _meet(
        self, backend: str, url: str, world_size: int, first: int, name: str
    ) -> list[dist.ProcessGroup]:
        with ThreadPoolExecutor(self._tp_size, "join-weight-group") as pool:  # each waits for all others
            members = [
                pool.submit(join_again, url, world_size, rank, name, _TIMEOUT)
                for rank in range(first + 1, first + self._tp_size)
            ]
            group = init_process_group(backend, url, world_size, first, name, _TIMEOUT)
            try:
                return [group, *(member.result() for member in members)]
            except BaseException:
                dist.destroy_process_group(group)  # or its name is taken for good
                raise

    def leave(self, name: str) -> None:
        """Closes the connections of all ranks; a broadcast that failed at one ends at the others so."""
        ranks = self._ranks(name)
        dist.destroy_process_group(ranks[0])
        del self._groups[name]  # nothing else knows of the other ranks
        while ranks:
            ranks.pop(0)  # in this order: they wait for what lower ones would have passed on
        self._kept.pop(name, None)

    def leave_all(self) -> None:
        """Closes all connections, those of a trainer that is gone among them."""
        for name in list(self._groups):
            self.leave(name)

    def device(self, name: str) -> torch.device:
        """Returns the device of a group's tensors.

        Raises:
            BadRequest: there is no such group.
        """
        self._ranks(name)
        return self._devices[name]

    def buffers(self, name: str, size: int) -> list[torch.Tensor]:
        """Returns bytes for each rank to receive a bucket in, which are valid until the next call.

        Host memory is kept until the group is left: touching fresh pages costs more than a bucket does.
        """
        device, kept = self._devices[name], self._kept.get(name, [])
        if not kept or kept[0].numel() < size:
            kept = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(self._tp_size)]
        if device.type == "cpu":
            self._kept[name] = kept
        return [buffer[:size] for buffer in kept]

    def receive(self, name: str, ranks: Sequence[Sequence[torch.Tensor]]) -> None:
        """Fills the tensors of each rank, in order, with what the trainer broadcasts; at most 300 s."""
        works = [
            group.broadcast([tensor], dist.BroadcastOptions())  # its root is rank 0
            for group, tensors in zip(self._ranks(name), ranks, strict=True)
            for tensor in tensors
        ]
        try:
            while works:
                works.pop(0).wait()
        finally:
            works.clear()  # the traceback of a failure would keep them, and they the group's connections

    def has(self, name: str) -> bool:
        return name in self._groups

    def begin_receiving(self, name: str, messages: Iterable[Incoming]) -> list[dist.Work]:
        """Begins to fill memory of ranks with what other members of the group send them, in order."""
        ranks = self._ranks(name)
        return [ranks[one.rank].recv([one.memory], one.source, 0) for one in messages]

    def _ranks(self, name: str) -> list[dist.ProcessGroup]:
        if name not in self._groups:
            raise BadRequest(f"group {name!r} does not exist (known: {sorted(self._groups)})")
        return self._groups[name]
