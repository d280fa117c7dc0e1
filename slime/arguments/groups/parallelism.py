"""How the trainer's model is spread over its processes."""

from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.errors import UsageError
from slime.arguments.core.flag import given
from slime.arguments.core.group import ConfigGroup
from slime.config.megatron import MegatronConfig
from slime.config.parallelism import ParallelConfig
from slime.config.run import filled
from slime.config.trainers import trainer_of

# Each of them counts as a layer when layers are dealt out to pipeline stages.
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def notes(args: Namespace) -> Iterator[str]:
    """What splits something over ranks of which there is only one."""
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        yield "--sequence-parallel: is off at --tensor-model-parallel-size 1"
    if args.allgather_cp and args.context_parallel_size == 1:
        yield "--allgather-cp: has no effect at --context-parallel-size 1"
    if args.pipeline_model_parallel_size == 1:
        for name, _ in given(args, *_COUNTED):
            yield f"{name}: has no effect at --pipeline-model-parallel-size 1"


def derive(args: Namespace) -> None:
    """What megatron-core would refuse, and the number of virtual stages."""
    if args.tensor_model_parallel_size == 1:
        args.sequence_parallel = False
    args.virtual_pipeline_model_parallel_size = _virtual_stages(args)


def _virtual_stages(args: Namespace) -> int | None:
    """More than 1, or None."""
    stages = args.num_virtual_stages_per_pipeline_rank
    if layers := args.num_layers_per_virtual_pipeline_stage:
        in_all = args.pipeline_model_parallel_size * layers
        stages, rest = divmod(_layers(args), in_all)
        if rest or not stages:
            raise UsageError(
                f"--num-layers-per-virtual-pipeline-stage {layers} x --pipeline-model-parallel-size "
                f"{args.pipeline_model_parallel_size}: does not divide {_described_layers(args)}"
            )
    return stages if stages > 1 else None


def contradictions(args: Namespace) -> Iterator[str]:
    """Sizes that do not divide the GPUs or the model."""
    tp, pp, cp = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    )
    if args.trainer_world_size % (tp * pp * cp) and not args.debug_rollout_only:
        sizes = f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp}"
        sizes += f" x --context-parallel-size {cp}" if cp > 1 else ""
        yield f"{sizes}: does not divide {args.trainer_world_size} trainer GPUs"
    for name in ("num_attention_heads", "ffn_hidden_size", "padded_vocab_size", "linear_num_key_heads"):
        size = getattr(args, name) or 0  # models without delta nets have no heads of theirs
        if size % tp:
            yield f"--tensor-model-parallel-size {tp} does not divide {name} {size} (config.json)"
    yield from _query_groups(args, tp)
    uneven = bool(args.decoder_first_pipeline_num_layers or args.decoder_last_pipeline_num_layers)
    if uneven:
        yield from _uneven_stages(args)
    elif _layers(args) % pp:
        yield f"--pipeline-model-parallel-size {pp} does not divide {_described_layers(args)}"
    yield from _virtual_pipeline(args, uneven)
    yield from _uniform_recomputation(args)


def _query_groups(args: Namespace, tp: int) -> Iterator[str]:
    """Ranks have some key-value heads each, or as many ranks share each of them."""
    groups = args.num_query_groups
    name, found = f"--tensor-model-parallel-size {tp}", f"num_query_groups {groups} (config.json)"
    if groups % tp and tp % groups:
        yield f"{name} neither divides {found} nor is a multiple of it"
    elif groups % tp and args.qk_norm_over_heads:
        yield f"{name} does not divide {found}: norms over all heads count shared key heads several times"


def _layers(args: Namespace) -> int:
    """What is dealt out to pipeline stages."""
    layers: int = args.num_layers
    return layers + sum(1 for _ in given(args, *_COUNTED))


def _described_layers(args: Namespace) -> str:
    more = "".join(f" + 1 for {name}" for name, _ in given(args, *_COUNTED))
    return f"num_layers {args.num_layers} (config.json){more}"


def _uneven_stages(args: Namespace) -> Iterator[str]:
    """The stages between the first and the last share equally what these leave."""
    pp = args.pipeline_model_parallel_size
    ends = dict(given(args, "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"))
    if pp == 1:
        yield "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers: need a pipeline"
        return
    for name, _ in given(args, *_COUNTED):
        yield f"{name}: not together with {' and '.join(ends)}"
    shown = ", ".join(f"{name} {layers}" for name, layers in ends.items())
    layers, stages = args.num_layers - sum(ends.values()), pp - len(ends)
    if layers < stages or (layers % stages if stages else layers):
        yield f"{shown}: cannot deal {layers} of {args.num_layers} layers out to {stages} other stages"


def layers_of_chunks(
    layers: int, parallelism: ParallelConfig, megatron: MegatronConfig, chunks: int
) -> list[int]:
    """Layers of each chunk of the pipeline, in the order in which a micro-batch goes through them."""
    pp = megatron.pipeline_model_parallel_size
    first, last = parallelism.decoder_first_pipeline_num_layers, parallelism.decoder_last_pipeline_num_layers
    if first or last:
        between = pp - bool(first) - bool(last)
        each = (layers - (first or 0) - (last or 0)) // between if between else 0
        return [*([first] if first else []), *[each] * between, *([last] if last else [])]
    embedding = int(megatron.account_for_embedding_in_pipeline_split and pp > 1)
    loss = int(megatron.account_for_loss_in_pipeline_split and pp > 1)
    counts = [(layers + embedding + loss) // (pp * chunks)] * (pp * chunks)
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def _uniform_recomputation(args: Namespace) -> Iterator[str]:
    """megatron-core cuts the layers of a chunk into groups of one size."""
    size = args.recompute_num_layers
    uniform = (args.recompute_granularity, args.recompute_method) == ("full", "uniform")
    if not uniform or not size or not trainer_of(args).recomputes_layers:
        return
    parallelism, megatron = filled(ParallelConfig, args), filled(MegatronConfig, args)
    chunks = parallelism.virtual_pipeline_model_parallel_size or 1
    counts = layers_of_chunks(args.num_layers, parallelism, megatron, chunks)
    if left := [count for count in counts if count % size]:
        yield (
            f"--recompute-num-layers {size}: does not divide the {left[0]} layers of a pipeline stage "
            "(wanted: a number that does, or --recompute-method block)"
        )


def _virtual_pipeline(args: Namespace, uneven: bool) -> Iterator[str]:
    pp, virtual = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    layers, stages = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    if layers and stages > 1:
        yield (
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank: "
            "only one of them at a time"
        )
    if virtual is None:
        return
    flag_given = (
        f"--num-layers-per-virtual-pipeline-stage {layers}"
        if layers
        else f"--num-virtual-stages-per-pipeline-rank {stages}"
    )
    if pp == 1:
        yield f"{flag_given}: needs a pipeline (wanted: --pipeline-model-parallel-size above 1)"
    elif uneven:
        yield (
            f"{flag_given}: not together with --decoder-first-pipeline-num-layers and "
            "--decoder-last-pipeline-num-layers"
        )
    elif _layers(args) % (pp * virtual):
        yield f"{flag_given} x --pipeline-model-parallel-size {pp}: does not divide {_described_layers(args)}"


CONFIG_GROUP = ConfigGroup(
    {"parallelism": ParallelConfig},
    derive=derive,
    notes=notes,
    contradictions=contradictions,
)
