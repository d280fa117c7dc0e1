"""By handle to engines on the trainer's GPUs, each of whose ranks gets what it keeps and nothing else."""

from collections.abc import Sequence

import torch.distributed as dist

from slime.backends.sglang_utils.client import EngineClient
from slime.config.weight_update import WeightUpdateConfig
from slime.utils.tensor_bucket import FlattenedTensorBucket, serialize_tensors
from slime.weight_sync.plan import WeightPlan
from slime.weight_sync.proof import Digests, require_ranks_hold
from slime.weight_sync.transports.handle import HandleTransport


class ShardTransport(HandleTransport):
    """SGLang's ``load_format="direct"``: a rank copies each tensor into its own parameter of that name.

    It is given buckets of `slime.weight_sync.shards`, of each rank others.
    """

    choice = "shards"
    takes_shards = True
    _load_format = "direct"

    def __init__(self, config: WeightUpdateConfig) -> None:
        super().__init__(config)
        self._notes_sent = config.weight_sync.check_weight_checksums
        self._everyone: dist.ProcessGroup | None = None
        self._sent: list[Digests] = []

    def _serialize(self, flat: FlattenedTensorBucket) -> str:
        # Views of one storage, of which there is one handle then.
        return serialize_tensors(flat.reconstruct_tensors())

    def commit(self) -> None:
        """
        Raises:
            RuntimeError: an engine's rank holds other numbers than were sent, under
                ``--check-weight-checksums``.
        """
        if self._everyone is not None and self._plan is not None and self._plan.sent is not None:
            # Before anything that fails on rank 0 alone.
            of_ranks: list[Digests] | None = [{}] * dist.get_world_size() if dist.get_rank() == 0 else None
            dist.gather_object(self._plan.sent.digests, of_ranks, dst=0, group=self._everyone)
            self._sent = of_ranks or []
        super().commit()

    def _require_held(self, plan: WeightPlan, engines: Sequence[EngineClient]) -> None:
        if engines:
            places = [(one.endpoint.gpu_offset or 0, one.endpoint.num_gpus) for one in engines]
            require_ranks_hold(engines, [self._sent[first : first + count] for first, count in places])

    def _join(self) -> None:
        super()._join()
        if self._notes_sent:
            self._everyone = dist.new_group(backend="gloo", timeout=self._timeout)

    def _leave(self) -> None:
        super()._leave()
        if self._everyone is not None:
            dist.destroy_process_group(self._everyone)
        self._everyone, self._sent = None, []
