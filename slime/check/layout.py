"""How a model is spread over the trainer's ranks: which of them share what, and who has which layers."""

from argparse import Namespace
from dataclasses import dataclass
from itertools import accumulate

from slime.arguments.groups.parallelism import layers_of_chunks

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


def layout_of(args: Namespace) -> Layout:
    """The layout that flags without contradictions describe."""
    world, tp, pp = (
        args.trainer_world_size,
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
    )
    cp, ep, etp = (
        args.context_parallel_size,
        args.expert_model_parallel_size,
        args.expert_tensor_parallel_size,
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
        stages=_stages(args, pp, args.virtual_pipeline_model_parallel_size or 1),
    )


def _stages(args: Namespace, pp: int, chunks: int) -> tuple[Stage, ...]:
    """Chunk after chunk goes through all ranks: with two of each, rank 0 has the first and the third part."""
    counts = layers_of_chunks(args, pp, chunks)
    bounds = [0, *accumulate(counts)]
    parts = [range(begin, begin + count) for begin, count in zip(bounds, counts, strict=False)]
    return tuple(tuple(parts[rank::pp]) for rank in range(pp))
