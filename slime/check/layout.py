"""How a model is spread over the trainer's ranks: which of them share what, and who has which layers."""

from dataclasses import dataclass
from itertools import accumulate

from slime.arguments.groups.parallelism import layers_of_chunks
from slime.config.memory import MemoryConfig

Stage = tuple[range, ...]
"""The layers of a pipeline rank, those of each of its model chunks."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the groups of ranks, under megatron-core's names.

    Attributes:
        world: trainer ranks of one role.
        tp, pp, cp, dp: that share a layer, the layers, a sequence, a batch.
        ep, etp, edp: that share the experts of a layer, one expert, and those that have the same ones.
        stages: of the pipeline ranks, in order.
    """

    world: int
    tp: int
    pp: int
    cp: int
    dp: int
    ep: int
    etp: int
    edp: int
    stages: tuple[Stage, ...]

    @property
    def vpp(self) -> int:
        """Model chunks of a rank."""
        return len(self.stages[0])

    def ranks(self, stage: int) -> range:
        """Returns the ranks of a stage: megatron-core counts tensor-parallel ranks first and pipeline ranks
        last.
        """
        size = self.world // self.pp
        return range(stage * size, (stage + 1) * size)


def layout_of(config: MemoryConfig) -> Layout:
    """The layout that flags without contradictions describe."""
    world, tp, pp = (
        config.cluster.trainer_world_size,
        config.megatron.tensor_model_parallel_size,
        config.megatron.pipeline_model_parallel_size,
    )
    cp, ep, etp = (
        config.parallelism.context_parallel_size,
        config.experts.expert_model_parallel_size,
        config.experts.expert_tensor_parallel_size,
    )
    etp = etp or tp  # a dense model has none
    shared = ep * etp * pp
    return Layout(
        world=world,
        tp=tp,
        pp=pp,
        cp=cp,
        dp=world // (tp * pp * cp),
        ep=ep,
        etp=etp,
        edp=max(1, world // shared),
        stages=_stages(config, pp, config.parallelism.virtual_pipeline_model_parallel_size or 1),
    )


def _stages(config: MemoryConfig, pp: int, chunks: int) -> tuple[Stage, ...]:
    """Chunk after chunk goes through all ranks: with two of each, rank 0 has the first and the third part."""
    counts = layers_of_chunks(config.model.num_layers, config.parallelism, config.megatron, chunks)
    bounds = [0, *accumulate(counts)]
    parts = [range(begin, begin + count) for begin, count in zip(bounds, counts, strict=False)]
    return tuple(tuple(parts[rank::pp]) for rank in range(pp))
