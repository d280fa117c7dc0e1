"""How samples are cut into optimizer steps and micro-batches."""

from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.errors import UsageError
from slime.arguments.core.group import ConfigGroup
from slime.config.batches import BatchConfig


def notes(args: Namespace) -> Iterator[str]:
    """A limit that nothing is held to, one that another decides, and steps that nobody chose."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if args.global_batch_size is None and args.num_steps_per_rollout is None and _trains(args):
        step = _samples_by_default(args)
        if step != samples:
            yield (
                f"--global-batch-size: not given, so {step} as in Megatron-LM, a micro-batch on each "
                f"data-parallel rank: {samples // step} optimizer steps in a rollout ({samples} makes one)"
            )
    tokens, limit = args.max_tokens_per_gpu, args.log_probs_max_tokens_per_gpu
    if tokens is not None and not args.use_dynamic_batch_size:
        yield f"--max-tokens-per-gpu {tokens}: has no effect without --use-dynamic-batch-size"
    if limit is not None and limit != tokens:
        yield (
            f"--log-probs-max-tokens-per-gpu {limit}: has no effect, log-probs are computed in the "
            "micro-batches of training (--max-tokens-per-gpu)"
        )


def derive(args: Namespace) -> None:
    """The samples of an optimizer step, and limits that follow another flag."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if args.num_steps_per_rollout is not None:
        args.global_batch_size = _samples_of_a_step(args, samples, args.num_steps_per_rollout)
    if args.global_batch_size is None:
        args.global_batch_size = _samples_by_default(args) if _trains(args) else samples
    args.log_probs_max_tokens_per_gpu = args.max_tokens_per_gpu
    if args.balance_by_flops:
        args.balance_data = True


def _trains(args: Namespace) -> bool:
    return args.num_rollout != 0 and not args.debug_rollout_only


def _samples_by_default(args: Namespace) -> int:
    """A micro-batch on each data-parallel rank, as in Megatron-LM."""
    world = args.actor_num_nodes * args.actor_num_gpus_per_node
    sizes = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    return args.micro_batch_size * max(1, world // sizes)


def _samples_of_a_step(args: Namespace, samples: int, steps: int) -> int:
    if samples % steps:
        raise UsageError(f"--num-steps-per-rollout {steps}: does not divide {samples} samples of a rollout")
    if args.global_batch_size not in (None, samples // steps):
        raise UsageError(
            f"--global-batch-size {args.global_batch_size}: {samples} samples of a rollout and "
            f"--num-steps-per-rollout {steps} want {samples // steps}"
        )
    return samples // steps


def contradictions(args: Namespace) -> Iterator[str]:
    """Sizes that do not divide each other, and limits without the mode they belong to."""
    samples, step = args.rollout_batch_size * args.n_samples_per_prompt, args.global_batch_size
    shape = (
        f"--rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt {args.n_samples_per_prompt}"
    )
    if samples % step:
        yield f"--global-batch-size {step}: does not divide {samples} samples of a rollout ({shape})"
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None:
        yield "--use-dynamic-batch-size: needs --max-tokens-per-gpu"
    if args.balance_by_flops and not args.use_dynamic_batch_size:
        yield "--balance-by-flops: needs --use-dynamic-batch-size"
    if not args.debug_rollout_only:
        yield from _data_parallel(args, step)


def _data_parallel(args: Namespace, step: int) -> Iterator[str]:
    pp = args.pipeline_model_parallel_size
    dp = args.trainer_world_size // (args.tensor_model_parallel_size * pp * args.context_parallel_size)
    if not dp:
        return
    if step % dp:
        yield f"--global-batch-size {step}: not a multiple of the data-parallel size {dp}"
        return
    sizes = f"data-parallel size {dp}"
    multiple = dp
    if not args.use_dynamic_batch_size:
        sizes, multiple = f"--micro-batch-size {args.micro_batch_size} x {sizes}", dp * args.micro_batch_size
    if step % multiple:
        yield f"--global-batch-size {step}: not a multiple of {sizes}"
    elif args.virtual_pipeline_model_parallel_size:
        yield from _virtual_stages(
            args, step, f"{sizes} x --pipeline-model-parallel-size {pp}", multiple * pp
        )


def _virtual_stages(args: Namespace, step: int, sizes: str, multiple: int) -> Iterator[str]:
    """Each chunk of a stage computes one micro-batch per stage in a row; dynamic ones are split to fit."""
    if args.use_dynamic_batch_size and step < multiple:
        yield f"--global-batch-size {step}: below {sizes}, which virtual pipeline stages want"
    elif not args.use_dynamic_batch_size and step % multiple:
        yield f"--global-batch-size {step}: not a multiple of {sizes}, which virtual pipeline stages want"


CONFIG_GROUP = ConfigGroup(
    {"batches": BatchConfig},
    derive=derive,
    notes=notes,
    contradictions=contradictions,
)
