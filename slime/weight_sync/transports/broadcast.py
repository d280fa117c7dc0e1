"""Weights by broadcast over a process group that the trainer shares with the engines."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist

from slime.config.weight_update import WeightUpdateConfig
from slime.training.weights import NamedTensors
from slime.utils.accelerator import process_group_backend
from slime.utils.tensor_bucket import FlatBuffer
from slime.weight_sync.plan import WeightPlan
from slime.weight_sync.transports import engine_group
from slime.weight_sync.transports.session import SessionTransport, WriterClient

_LEAST_MEAN = 8 * 1024**2
"""Bytes of the tensors of a bucket, on average, from which on they are broadcast one by one.

Two copies of as many take as long as one more broadcast takes to begin and end.
"""
_KNOWN_TO_GLOO = (torch.float32, torch.bfloat16, torch.float16)


class BroadcastTransport(SessionTransport):
    """One group for all engines: trainer rank 0, then the ranks of each engine in turn.

    A group per pipeline stage would let stages broadcast at the same time. It is not needed: the backend
    brings every stage's tensors to rank 0, which moves the same bytes once more, between trainers.

    A bucket is one flat uint8 tensor (``load_format="flattened_bucket"``), its metadata goes by HTTP. Between
    hosts' memories large tensors go one by one instead: the copies into the flat tensor and out of it would
    take as long as half of the way. There a bucket is on its way while the next one is made, and they share
    the bytes of one; between GPUs each goes alone, as it is made in no time.
    """

    def __init__(self, config: WeightUpdateConfig) -> None:
        super().__init__(config)
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""
        self.buckets_at_once = 2 if process_group_backend() == "gloo" else 1
        self._sender: ThreadPoolExecutor | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._buffers = [FlatBuffer() for _ in range(self.buckets_at_once)]
        self._turn = 0
        self._formed: tuple[list[torch.Tensor], str | None] | None = None
        self._under_way: Future[None] | None = None

    @classmethod
    def is_wanted(cls, config: WeightUpdateConfig) -> bool:
        return config.weight_sync.update_weight_mode == "full"

    def path_speed(self) -> float:
        return engine_group.path_speed(self._engines.endpoints, self._bucket_bytes)

    def prepare(self, bucket: NamedTensors, plan: WeightPlan) -> bool:
        if self._group is not None:
            self._formed = self._form(bucket)
        return False

    def send(self, bucket: NamedTensors, is_last: bool) -> int:
        if self._group is None and self._under_way is None:
            return 0
        (tensors, load_format), self._formed = self._formed or self._form(bucket), None
        names = [name for name, _ in bucket]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
        shapes = [list(tensor.shape) for _, tensor in bucket]

        def announce(client: WriterClient) -> None:
            client.update_weights_from_distributed(
                names,
                dtypes,
                shapes,
                self._group_name,
                load_format=load_format,
                weight_version=self._version if is_last else None,
            )

        self._carry(tensors, announce, is_last)
        return sum(tensor.nbytes for tensor in tensors)

    def _carry(
        self, tensors: Sequence[torch.Tensor], announce: Callable[[WriterClient], None], is_last: bool
    ) -> None:
        """Broadcasts tensors once those before are there; beside what the caller does next, if it may.

        Raises:
            EngineError: an engine refused these or those before, or did not answer in time.
            GroupBroken: connections of the group have ended.
        """
        self._settle()
        if is_last or self.buckets_at_once == 1:
            self._carry_now(tensors, announce)
        else:
            if self._sender is None:
                self._sender = ThreadPoolExecutor(1, thread_name_prefix="send-bucket")
            self._under_way = self._sender.submit(self._carry_now, tensors, announce)
        self._turn = 0 if is_last else (self._turn + 1) % self.buckets_at_once

    def _settle(self) -> None:
        """Waits for the bucket that is on its way."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _carry_now(self, tensors: Sequence[torch.Tensor], announce: Callable[[WriterClient], None]) -> None:
        """Broadcasts tensors, of which every engine is told meanwhile."""
        with engine_group.threads(len(self._engines.clients), "announce-bucket") as pool:
            answers = [pool.submit(announce, client) for client in self._engines.clients]
            self._broadcast(tensors, answers)

    def _form(self, bucket: NamedTensors) -> tuple[list[torch.Tensor], str | None]:
        """What is broadcast, and how engines are told to load it."""
        if self._takes_tensors and _are_large(bucket):
            return [tensor.detach().contiguous() for _, tensor in bucket], None
        return [self._buffers[self._turn].flatten(bucket).flattened_tensor], "flattened_bucket"

    @property
    def _takes_tensors(self) -> bool:
        """Whether engines can receive tensors into their own: those of one rank, which keeps all of each."""
        return all(endpoint.num_gpus == 1 for endpoint in self._engines.endpoints)

    def _leave(self) -> None:
        if self._sender is not None:
            self._sender.shutdown()  # a bucket may be on its way after a failure
        if name := self._group_name:
            self._engines.each(lambda client: client.destroy_weights_update_group(name))
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group, self._group_name, self._sender = None, "", None
        self._begin_anew()

    def _join(self) -> None:
        """
        Raises:
            EngineError: an engine refused to join.
            RuntimeError: the group did not form in time.
        """
        if self._engines.endpoints:
            meeting = engine_group.new_meeting(self._engines.endpoints)
            self._group_name = meeting.name
            self._group = engine_group.join_engines(meeting, 0, self._engines, self._timeout)

    def _broadcast(self, tensors: Sequence[torch.Tensor], answers: list[Future[None]]) -> None:
        works = [dist.broadcast(tensor, src=0, group=self._group, async_op=True) for tensor in tensors]
        try:
            engine_group.await_answers(answers, self._group_name, self._timeout)
            with engine_group.naming_broken(self._group_name):
                while works:
                    works[0].wait()
                    works.pop(0)
        except Exception:
            group, self._group, left = self._group, None, [*works]
            engine_group.abandon(group, left)
            del group, left
            raise
        finally:
            works.clear()  # the traceback of a failure would keep them, and they the group's connections


def _are_large(bucket: NamedTensors) -> bool:
    """Whether tensors of the host are worth a broadcast each."""
    known = all(tensor.device.type == "cpu" and tensor.dtype in _KNOWN_TO_GLOO for _, tensor in bucket)
    return known and sum(tensor.nbytes for _, tensor in bucket) >= _LEAST_MEAN * len(bucket)
