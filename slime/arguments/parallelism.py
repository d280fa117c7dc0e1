"""How the trainer's model is spread over its processes."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from slime.arguments.concern import Concern
from slime.arguments.flags import flag, refused


@dataclass(frozen=True)
class ParallelArgs:
    """Layout of the trainer's processes."""

    decoder_first_pipeline_num_layers: int | None = flag(above=0, help="layers of the first pipeline stage")
    decoder_last_pipeline_num_layers: int | None = flag(above=0, help="layers of the last pipeline stage")
    num_layers_per_virtual_pipeline_stage: int | None = refused(help="layers of a virtual stage")
    num_virtual_stages_per_pipeline_rank: int | None = refused(
        help="virtual stages of a pipeline rank", same_as_default=(1,), wanted="1"
    )
    context_parallel_size: int = refused(1, help="context parallel size", wanted="1")
    allgather_cp: bool = refused(False, help="contiguous context parallelism with gathered keys and values")


def notes(args: Namespace) -> Iterator[str]:
    """Sequences are split over the tensor-parallel ranks, of which there may be only one."""
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        yield "--sequence-parallel: is off at --tensor-model-parallel-size 1"


def derive(args: Namespace) -> None:
    """What megatron-core would refuse."""
    if args.tensor_model_parallel_size == 1:
        args.sequence_parallel = False


def contradictions(args: Namespace) -> Iterator[str]:
    """Sizes that do not divide the GPUs or the model."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    if args.trainer_world_size % (tp * pp) and not args.debug_rollout_only:
        yield (
            f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp}: "
            f"does not divide {args.trainer_world_size} trainer GPUs"
        )
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "padded_vocab_size"):
        size = getattr(args, name)
        if size % tp:
            yield f"--tensor-model-parallel-size {tp} does not divide {name} {size} (config.json)"
    uneven = args.decoder_first_pipeline_num_layers or args.decoder_last_pipeline_num_layers
    if args.num_layers % pp and not uneven:
        layers = args.num_layers
        yield f"--pipeline-model-parallel-size {pp} does not divide num_layers {layers} (config.json)"
    if uneven and pp == 1:
        yield "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers: need a pipeline"


CONCERN = Concern(
    {"parallelism": ParallelArgs},
    derive=derive,
    notes=notes,
    contradictions=contradictions,
)
