"""What follows from the flags: defaults that depend on other flags, and names that hooks expect.

The steps run in the order in which one needs another's result.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.arguments.errors import UsageError
from slime.models import HfConfigError, shape_from_hf_config
from slime.models.shape import pad_vocab_size
from slime.utils.eval_config import resolve_eval_datasets

CHECKPOINT_MARKER = "latest_checkpointed_iteration.txt"

# Flags that switch something off, and the attribute that says whether it is on.
_NEGATED = {
    "disable_compute_advantages_and_returns": "compute_advantages_and_returns",
    "disable_grpo_std_normalization": "grpo_std_normalization",
    "disable_rewards_normalization": "rewards_normalization",
    "disable_rollout_global_dataset": "rollout_global_dataset",
    "disable_wandb_random_suffix": "wandb_random_suffix",
}


def derive(args: Namespace) -> None:
    """Fills in ``args`` in place.

    Raises:
        UsageError: flags, or a flag and the checkpoint, contradict each other.
    """
    for negative, positive in _NEGATED.items():
        setattr(args, positive, not getattr(args, negative))
    _modes(args)
    _placement(args)
    _model_shape(args)
    _precision(args)
    _loading(args)
    _batches(args)
    _algorithm(args)
    _dumps(args)
    _rollout(args)
    resolve_eval_datasets(args)


def _modes(args: Namespace) -> None:
    if args.load_debug_rollout_data is not None:
        args.debug_train_only = True
    if args.debug_train_only and args.debug_rollout_only:
        raise UsageError("--debug-train-only and --debug-rollout-only: only one of them at a time")
    args.rollout_external, args.use_critic = False, False
    if args.offload:
        args.offload_train = args.offload_rollout = True
    del args.offload


def _placement(args: Namespace) -> None:
    trainer = args.actor_num_nodes * args.actor_num_gpus_per_node
    if args.rollout_num_gpus is None and args.debug_train_only:
        args.rollout_num_gpus = 0
    if args.rollout_num_gpus is None and args.colocate:
        args.rollout_num_gpus = trainer
    if args.rollout_num_gpus is None:
        raise UsageError("--rollout-num-gpus: missing (wanted: the GPUs of all engines, or --colocate)")
    if args.debug_train_only or args.debug_rollout_only:
        args.colocate = args.offload_train = args.offload_rollout = False
    args.offload_train = args.colocate if args.offload_train is None else args.offload_train
    args.offload_rollout = args.colocate if args.offload_rollout is None else args.offload_rollout
    args.trainer_world_size = args.world_size = trainer
    args.rank = 0
    args.sglang_tp_size = args.rollout_num_gpus_per_engine


def _model_shape(args: Namespace) -> None:
    """Takes the model's shape from config.json; a flag that says otherwise is an error."""
    try:
        shape = shape_from_hf_config(args.hf_checkpoint)
    except HfConfigError as error:
        raise UsageError(f"--hf-checkpoint {args.hf_checkpoint}: {error}") from error
    for name, value in (shape | _FIXED_SHAPE).items():
        given = getattr(args, name, None)
        if given is not None and not _agrees(given, value):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {given}: config.json of --hf-checkpoint says {value}")
        setattr(args, name, value)
    if args.group_query_attention and args.num_query_groups == args.num_attention_heads:
        raise UsageError("--group-query-attention: config.json has as many key-value heads as query heads")
    if args.disable_bias_linear and args.add_bias_linear:
        raise UsageError("--add-bias-linear and --disable-bias-linear: only one of them at a time")
    args.group_query_attention = args.num_query_groups != args.num_attention_heads
    args.use_rotary_position_embeddings = True
    if args.padded_vocab_size is None:
        tp = args.tensor_model_parallel_size
        args.padded_vocab_size = pad_vocab_size(args.vocab_size, args.make_vocab_size_divisible_by, tp)


# What all supported families share.
_FIXED_SHAPE: dict[str, Any] = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rope_type": "rope",
    "rotary_percent": 1.0,
    "swiglu": True,
    "add_bias_linear": False,
}


def _agrees(given: Any, value: Any) -> bool:
    if isinstance(value, float):
        return abs(float(given) - value) <= 1e-9 * max(1.0, abs(value))
    return given == value


def _precision(args: Namespace) -> None:
    import torch

    chosen = [name for name in ("bf16", "fp16", "fp32") if getattr(args, name)]
    if len(chosen) > 1:
        raise UsageError(f"--{chosen[0]} and --{chosen[1]}: only one precision at a time")
    args.bf16 = not (args.fp16 or args.fp32)
    args.params_dtype = torch.float16 if args.fp16 else torch.float32 if args.fp32 else torch.bfloat16


def _loading(args: Namespace) -> None:
    """``--load`` that holds no checkpoint yet is a run that starts: weights come from elsewhere."""
    has_checkpoint = args.load is not None and (Path(args.load) / CHECKPOINT_MARKER).is_file()
    if has_checkpoint:
        return
    args.no_load_optim = args.no_load_rng = args.finetune = True
    if args.start_rollout_id is None:
        args.start_rollout_id = 0


def _batches(args: Namespace) -> None:
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if args.num_steps_per_rollout is not None:
        steps = args.num_steps_per_rollout
        if samples % steps:
            raise UsageError(
                f"--num-steps-per-rollout {steps}: does not divide {samples} samples of a rollout"
            )
        if args.global_batch_size not in (None, samples // steps):
            raise UsageError(
                f"--global-batch-size {args.global_batch_size}: {samples} samples of a rollout and "
                f"--num-steps-per-rollout {steps} want {samples // steps}"
            )
        args.global_batch_size = samples // steps
    if args.global_batch_size is None:
        args.global_batch_size = samples
    if args.log_probs_max_tokens_per_gpu is None:
        args.log_probs_max_tokens_per_gpu = args.max_tokens_per_gpu
    if args.balance_by_flops:
        args.balance_data = True


def _algorithm(args: Namespace) -> None:
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    if args.eval_reward_key is None:
        args.eval_reward_key = args.reward_key
    if args.n_samples_per_prompt == 1:
        args.grpo_std_normalization = False


def _dumps(args: Namespace) -> None:
    if args.dump_details is None:
        return
    args.save_debug_rollout_data = f"{args.dump_details}/rollout_data/{{rollout_id}}.pt"
    args.save_debug_train_data = f"{args.dump_details}/train_data/{{rollout_id}}.pt"


def _rollout(args: Namespace) -> None:
    args.eval_function_path = args.eval_function_path or args.rollout_function_path
    if args.over_sampling_batch_size is None:
        args.over_sampling_batch_size = args.rollout_batch_size
    if args.eval_max_context_len is None:
        args.eval_max_context_len = args.rollout_max_context_len
    if args.rollout_max_context_len is not None and args.rollout_max_prompt_len is None:
        args.rollout_max_prompt_len = args.rollout_max_context_len - 1
    if args.rollout_max_response_len is None and args.rollout_max_context_len is not None:
        args.rollout_max_response_len = args.rollout_max_context_len
