"""Weights by handle to engines that share the trainer's GPUs (or host memory)."""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import NamedTuple

import torch.distributed as dist

from slime.config.weight_update import WeightUpdateConfig
from slime.processes.reaper import start_memory_reaper
from slime.training.weights import NamedTensors
from slime.utils import tensor_bucket
from slime.utils.accelerator import collect_handles, local_device
from slime.utils.tensor_bucket import FlatBuffer, FlattenedTensorBucket, withdraw_handle
from slime.utils.types import EngineEndpoint
from slime.weight_sync.floor import copy_speed, probe_size
from slime.weight_sync.plan import WeightPlan
from slime.weight_sync.transports.session import SessionTransport, WriterClient

_COPIES = 2


class Handed(NamedTuple):
    """What a rank has for the engine: its handle to the bucket, or why there is none."""

    payload: str
    failure: str | None


class NothingPosted(RuntimeError):
    """The engine has got no handle, because a rank had none."""


class HandleTransport(SessionTransport):
    """Trainer ranks ``gpu_offset ... gpu_offset + num_gpus - 1`` stand behind the ranks of an engine.

    Each of them puts the bucket into one flat tensor on its own GPU; the first collects the handles and
    posts them, one per tensor-parallel rank of the engine. While the engine takes them in, the next bucket is
    put into another flat tensor: two take turns.

    No weight gets there in fewer than two copies: into the flat tensor, and out of it into the engine's own.
    """

    buckets_at_once = 2
    _load_format = "flattened_bucket"

    def __init__(self, config: WeightUpdateConfig) -> None:
        super().__init__(config)
        self._all_ranks: set[int] = set()
        self._engine: WriterClient | None = None
        self._ranks: list[int] = []
        self._group: dist.ProcessGroup | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._buffers = [FlatBuffer(shared=True) for _ in range(self.buckets_at_once)]
        self._turn = 0
        self._prepared: FlattenedTensorBucket | None = None
        self._under_way: tuple[FlattenedTensorBucket, Future[None] | None] | None = None
        self._poster: ThreadPoolExecutor | None = None

    @classmethod
    def is_wanted(cls, config: WeightUpdateConfig) -> bool:
        return config.cluster.colocate

    def accepts(self, endpoint: EngineEndpoint) -> bool:
        offset = endpoint.gpu_offset
        return offset is not None and offset + endpoint.num_gpus <= dist.get_world_size()

    def source_ranks(self) -> set[int]:
        return self._all_ranks

    def path_speed(self) -> float:
        device = local_device(int(os.environ.get("LOCAL_RANK", "0")))
        return copy_speed(probe_size(self._bucket_bytes, device), device) / _COPIES

    def prepare(self, bucket: NamedTensors, plan: WeightPlan) -> bool:
        if self._engine is not None:
            self._prepared = self._flatten(bucket)
        return False

    def _flatten(self, bucket: NamedTensors) -> FlattenedTensorBucket:
        """Fills the flat tensor that the engine does not read now."""
        if bucket[0][1].is_cpu:
            _remove_memory_at_the_end()
        return self._buffers[self._turn].flatten(bucket)

    def send(self, bucket: NamedTensors, is_last: bool) -> int:
        if self._engine is None:
            return 0
        failure: Exception | None = None
        payload, nbytes, flat = "", 0, None
        try:
            flat, self._prepared = self._prepared or self._flatten(bucket), None
            payload, nbytes = self._serialize(flat), flat.flattened_tensor.nbytes
        except Exception as error:  # the other ranks behind the engine wait for what this one has to say
            failure = error
        handed = self._collect(payload, failure)
        try:
            self._settle(failure, handed)
        except Exception:
            if flat is not None and payload:
                withdraw_handle(flat.flattened_tensor)
            raise
        assert flat is not None
        self._under_way = flat, self._begin_post(handed, is_last)
        self._turn = 0 if is_last else 1 - self._turn  # the second is needed where there are two buckets
        if is_last:
            self._settle()
        return nbytes

    def _serialize(self, flat: FlattenedTensorBucket) -> str:
        return serialize_bucket(flat)

    def _settle(self, failure: Exception | None = None, handed: list[Handed] | None = None) -> None:
        """Waits for the engine's answer to the bucket before, whose flat tensor is free then.

        Args:
            failure: why this rank has no next bucket.
            handed: the next bucket, on the rank that is to post it.

        Raises:
            EngineError: the engine refused the bucket before, or did not answer in time.
            NothingPosted: a rank has no next bucket.
        """
        refusal: Exception | None = None
        try:
            if self._under_way is not None and self._under_way[1] is not None:
                self._under_way[1].result()
            self._require_all(handed or [])
        except Exception as error:
            refusal = error
        self._share_outcome(failure, refusal)
        if self._under_way is not None:
            self._under_way = None
            collect_handles()

    def _require_all(self, handed: list[Handed]) -> None:
        for rank, (_, failure) in zip(self._ranks, handed, strict=False):
            if failure is not None:
                raise NothingPosted(f"trainer rank {rank} handed over no bucket: {failure}")

    def _begin_post(self, handed: list[Handed] | None, is_last: bool) -> Future[None] | None:
        """Posts a bucket on the rank that has all handles, in another thread."""
        if handed is None:
            return None
        if self._poster is None:
            self._poster = ThreadPoolExecutor(1, thread_name_prefix="post-bucket")
        return self._poster.submit(partial(self._post, handed, is_last))

    def _post(self, handed: list[Handed], is_last: bool) -> None:
        assert self._engine is not None
        with self.spans.measure("apply", lane=1):
            self._engine.update_weights_from_tensor(
                [payload for payload, _ in handed],
                load_format=self._load_format,
                weight_version=self._version if is_last else None,
            )

    @property
    def _loaders(self) -> list[WriterClient]:
        return [] if self._engine is None else [self._engine]

    def _join(self) -> None:
        """
        Raises:
            ValueError: two engines claim the same trainer rank.
        """
        for endpoint in self._endpoints:
            first = endpoint.gpu_offset or 0
            ranks = list(range(first, first + endpoint.num_gpus))
            if self._all_ranks.intersection(ranks):
                raise ValueError(
                    f"engine {endpoint.url}: another engine has one of its trainer ranks {ranks}"
                )
            self._all_ranks.update(ranks)
            # Collective on all ranks, members or not.
            group = dist.new_group(ranks, backend="gloo", timeout=self._timeout) if len(ranks) > 1 else None
            if dist.get_rank() in ranks:
                self._engine = self._client_of(endpoint)
                self._ranks, self._group = ranks, group

    def _client_of(self, endpoint: EngineEndpoint) -> WriterClient:
        """The one that tells the engine of the session where this rank does, whose connection is there."""
        for client in self._engines.clients:
            if client.endpoint == endpoint:
                return client
        client = WriterClient(endpoint, self._answer_limit, self.writer, self._selector)
        client.take_weights()
        return client

    def _leave(self) -> None:
        if self._poster is not None:
            self._poster.shutdown()  # the engine may still read what it was given
        if self._engine is not None:
            self._engine.close()
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._engine, self._group, self._ranks, self._all_ranks = None, None, [], set()
        self._begin_anew()

    def _collect(self, payload: str, failure: Exception | None) -> list[Handed] | None:
        """What all ranks behind this engine hand over, on the first of them."""
        own = Handed(payload, None if failure is None else f"{type(failure).__name__}: {failure}")
        if self._group is None:
            return [own]
        first = self._ranks[0]
        handed: list[Handed] | None = [own] * len(self._ranks) if dist.get_rank() == first else None
        dist.gather_object(own, handed, dst=first, group=self._group)
        return handed

    def _share_outcome(self, failure: Exception | None, refusal: Exception | None) -> None:
        """Raises on all ranks behind the engine if one of them failed, or the first one to post.

        Until the first one has told them they must keep their flat tensors, which the engine reads.
        """
        if self._group is not None:
            outcome = [refusal]
            dist.broadcast_object_list(outcome, src=self._ranks[0], group=self._group)
            refusal = outcome[0]
        if (error := failure or refusal) is not None:
            raise error


def serialize_bucket(bucket: FlattenedTensorBucket) -> str:
    """Base64 text with a handle to the flat tensor, which must not change until the engine has answered.

    Of a tensor on a GPU a CUDA IPC handle; else a shared-memory file, to which the flat tensor moves when it
    is first serialised.
    """
    if bucket.flattened_tensor.device.type == "cpu":
        _remove_memory_at_the_end()
    return tensor_bucket.serialize_bucket(bucket)


@cache
def _remove_memory_at_the_end() -> None:
    """Has the memory that this process shares removed when it dies, asked for once."""
    start_memory_reaper()
