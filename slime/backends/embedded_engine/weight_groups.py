"""Process groups over which a trainer broadcasts weights."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.model_config import CPU
from slime.utils.distributed_utils import init_process_group

_TIMEOUT = timedelta(seconds=300)


class WeightGroups:
    """Named groups in which rank 0 is the trainer and this engine one of the receivers.

    Args:
        device: the engine's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._devices: dict[str, torch.device] = {}
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._joining: set[str] = set()

    def join(self, address: str, port: int, rank: int, world_size: int, name: str, backend: str) -> None:
        """Meets the trainer; blocks until all ranks are there, at most 300 s.

        Raises:
            BadRequest: ranks that cannot be, a backend this machine has not, nobody at the address.
        """
        if not 1 <= rank < world_size:
            raise BadRequest(f"rank_offset {rank}: wanted 1 to world_size - 1 = {world_size - 1}")
        known = {"gloo": CPU} | ({"nccl": self._device} if self._device.type == "cuda" else {})
        if backend not in known:
            wanted = " or ".join(map(repr, known))
            raise BadRequest(
                f"backend {backend!r}: not supported by the embedded engine on {self._device} "
                f"(wanted: {wanted})"
            )
        if name in self._joining:
            raise BadRequest(f"group {name!r} is being joined already")
        self._joining.add(name)
        try:
            self._groups[name] = init_process_group(
                backend, f"tcp://{address}:{port}", world_size, rank, name, _TIMEOUT
            )
            self._devices[name] = known[backend]
        except (RuntimeError, ValueError) as error:
            raise BadRequest(f"cannot join group {name!r} at {address}:{port}: {error}") from error
        finally:
            self._joining.discard(name)

    def leave(self, name: str) -> None:
        dist.destroy_process_group(self._group(name))
        del self._groups[name]

    def device(self, name: str) -> torch.device:
        """Returns the device of a group's tensors.

        Raises:
            BadRequest: there is no such group.
        """
        self._group(name)
        return self._devices[name]

    def receive(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Fills the tensors, in order, with what rank 0 broadcasts; at most 300 s."""
        group = self._group(name)
        works = [dist.broadcast(tensor, src=0, group=group, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()

    def _group(self, name: str) -> dist.ProcessGroup:
        if name not in self._groups:
            raise BadRequest(f"group {name!r} does not exist (known: {sorted(self._groups)})")
        return self._groups[name]
