"""By handle to engines on the trainer's GPUs, each of whose ranks gets what it keeps and nothing else."""

from collections.abc import Sequence
from datetime import timedelta

from slime.backends.sglang_utils.client import EngineClient
from slime.config.weight_update import WeightUpdateConfig
from slime.training.weights import ShardedWeights
from slime.utils.tensor_bucket import FlattenedTensorBucket, serialize_tensors
from slime.weight_sync.plan import WeightPlan
from slime.weight_sync.proof import Digests, require_ranks_hold
from slime.weight_sync.shards.source import EngineShards
from slime.weight_sync.transports.handle import HandleTransport


class ShardTransport(HandleTransport):
    """SGLang's ``load_format="direct"``: a rank copies each tensor into its own parameter of that name.

    It is given buckets of `slime.weight_sync.shards`, of each rank others.
    """

    choice = "shards"
    _load_format = "direct"

    def __init__(self, config: WeightUpdateConfig) -> None:
        super().__init__(config)
        self._sent: list[Digests] = []

    def shards_of(self, weights: ShardedWeights, timeout: timedelta) -> EngineShards:
        return EngineShards(weights, timeout)

    def _serialize(self, flat: FlattenedTensorBucket) -> str:
        # Views of one storage, of which there is one handle then.
        return serialize_tensors(flat.reconstruct_tensors())

    def commit(self) -> None:
        """
        Raises:
            RuntimeError: an engine's rank holds other numbers than were sent, under
                ``--check-weight-checksums``.
        """
        self._sent = self._digests_of_all()  # before anything that fails on rank 0 alone
        super().commit()

    def _require_held(self, plan: WeightPlan, engines: Sequence[EngineClient]) -> None:
        if engines:
            places = [(one.endpoint.gpu_offset or 0, one.endpoint.num_gpus) for one in engines]
            require_ranks_hold(engines, [self._sent[first : first + count] for first, count in places])
