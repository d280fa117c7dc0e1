"""Flags that do not fit together. Each rule looks at a few flags and yields what is wrong with them."""

from argparse import Namespace
from collections.abc import Callable, Iterator

from slime.arguments.algorithm import GROUP_CENTRED, GROUP_SCALED
from slime.arguments.data import BUILT_IN_DATA_SOURCES
from slime.arguments.rollout import DEFAULT_ROLLOUT_FUNCTION, RM_TYPES, SFT_ROLLOUT_FUNCTION

Rule = Callable[[Namespace], Iterator[str]]


def contradictions(args: Namespace) -> Iterator[str]:
    """Everything wrong, one line each, in the order of the rules."""
    for rule in _RULES:
        yield from rule(args)


def _counts(args: Namespace) -> Iterator[str]:
    positive = (
        *("actor_num_nodes", "actor_num_gpus_per_node", "num_gpus_per_node", "rollout_num_gpus_per_engine"),
        *("rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "micro_batch_size"),
        *("num_epoch", "save_interval", "eval_interval", "update_weights_interval", "max_tokens_per_gpu"),
        *("rollout_max_response_len", "rollout_max_prompt_len", "ref_update_interval"),
        *("n_samples_per_eval_prompt", "update_weight_buffer_size", "data_pad_size_multiplier"),
        *("cluster_timeout", "engine_startup_timeout", "rollout_timeout", "train_timeout"),
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "sglang_server_concurrency"),
    )
    for name in positive:
        value = getattr(args, name)
        if value is not None and value <= 0:
            yield f"{_flag(name)} {value}: wanted more than 0"
    for name in ("num_rollout", "rollout_num_gpus", "start_rollout_id"):
        value = getattr(args, name)
        if value is not None and value < 0:
            yield f"{_flag(name)} {value}: wanted 0 or more"


def _layout(args: Namespace) -> Iterator[str]:
    tp, pp, world = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.trainer_world_size,
    )
    if world % (tp * pp) and not args.debug_rollout_only:
        yield (
            f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp}: "
            f"does not divide {world} trainer GPUs"
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
    if args.sequence_parallel and tp == 1:
        yield "--sequence-parallel: needs --tensor-model-parallel-size above 1"
    if args.padded_vocab_size < args.vocab_size:
        padded, size = args.padded_vocab_size, args.vocab_size
        yield f"--padded-vocab-size {padded}: below vocab_size {size} (config.json)"


def _engines(args: Namespace) -> Iterator[str]:
    total, each = args.rollout_num_gpus, args.rollout_num_gpus_per_engine
    if total % each:
        yield f"--rollout-num-gpus {total}: not a multiple of --rollout-num-gpus-per-engine {each}"
    if each > args.num_gpus_per_node:
        yield (
            f"--rollout-num-gpus-per-engine {each}: engines over several nodes are not supported "
            f"(wanted: at most --num-gpus-per-node {args.num_gpus_per_node})"
        )
    if total == 0 and not args.debug_train_only:
        yield "--rollout-num-gpus 0: engines are needed (wanted: 1 or more, or --debug-train-only)"
    if args.sglang_router_port is not None and not 0 < args.sglang_router_port < 65536:
        yield f"--sglang-router-port {args.sglang_router_port}: wanted 1 to 65535"
    if getattr(args, "sglang_admin_api_key", None):
        yield "--sglang-admin-api-key: not supported (wanted: --sglang-api-key, one key for all endpoints)"
    from slime.utils.accelerator import has_gpu  # imports torch, which a misspelt flag need not wait for

    if args.debug_train_only or args.rollout_engine != "embedded":
        return
    if each > 1:
        yield f"--rollout-num-gpus-per-engine {each}: the embedded engine takes one GPU (wanted: 1)"
    if has_gpu() and not args.debug_rollout_only:
        yield (
            "--rollout-engine embedded (also auto where SGLang is missing): a trainer on GPUs sends weights "
            "in ways that it does not speak (wanted: pip install -e '.[sglang]')"
        )


def _data(args: Namespace) -> Iterator[str]:
    if args.num_rollout is None and args.num_epoch is None:
        yield "--num-rollout: missing (wanted: a number of rollouts, or --num-epoch)"
    if args.num_rollout is None and not args.rollout_global_dataset:
        yield "--num-epoch: needs the global dataset (wanted: without --disable-rollout-global-dataset)"
    built_in = args.data_source_path.startswith(BUILT_IN_DATA_SOURCES)
    needs_data = args.rollout_global_dataset and args.load_debug_rollout_data is None and built_in
    if args.prompt_data is None and needs_data and args.num_rollout != 0:
        yield "--prompt-data: missing (wanted: a .jsonl or .parquet file)"
    if args.eval_interval is not None and not args.eval_datasets:
        yield "--eval-interval: needs --eval-prompt-data or --eval-config"
    if args.eval_interval is not None and args.debug_train_only:
        yield "--eval-interval: needs engines (wanted: without --debug-train-only)"
    if args.save_interval is not None and args.save is None and args.save_hf is None:
        yield "--save-interval: needs --save or --save-hf"
    if args.save_hf is not None and args.save_interval is None and not args.debug_rollout_only:
        yield "--save-hf: needs --save-interval (a run without one would save nothing)"
    if args.save is not None and args.save_interval is None and not args.debug_rollout_only:
        yield "--save: needs --save-interval (a run without one would save nothing)"
    if (
        args.load_debug_rollout_data_subsample is not None
        and not 0 < args.load_debug_rollout_data_subsample <= 1
    ):
        yield f"--load-debug-rollout-data-subsample {args.load_debug_rollout_data_subsample}: wanted 0 to 1"


def _batches(args: Namespace) -> Iterator[str]:
    samples, step = args.rollout_batch_size * args.n_samples_per_prompt, args.global_batch_size
    shape = (
        f"--rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt {args.n_samples_per_prompt}"
    )
    if samples % step:
        yield f"--global-batch-size {step}: does not divide {samples} samples of a rollout ({shape})"
    if args.log_probs_max_tokens_per_gpu != args.max_tokens_per_gpu:
        yield (
            f"--log-probs-max-tokens-per-gpu {args.log_probs_max_tokens_per_gpu}: log-probs and training "
            f"share micro-batches (wanted: as --max-tokens-per-gpu {args.max_tokens_per_gpu})"
        )
    if args.over_sampling_batch_size < args.rollout_batch_size:
        yield (
            f"--over-sampling-batch-size {args.over_sampling_batch_size}: "
            f"below --rollout-batch-size {args.rollout_batch_size}"
        )
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None:
        yield "--use-dynamic-batch-size: needs --max-tokens-per-gpu"
    if args.balance_by_flops and not args.use_dynamic_batch_size:
        yield "--balance-by-flops: needs --use-dynamic-batch-size"
    if args.debug_rollout_only:
        return
    dp = args.trainer_world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size)
    if dp and step % dp:
        yield f"--global-batch-size {step}: not a multiple of the data-parallel size {dp}"
    elif dp and not args.use_dynamic_batch_size and step % (dp * args.micro_batch_size):
        yield (
            f"--global-batch-size {step}: not a multiple of --micro-batch-size {args.micro_batch_size} "
            f"x data-parallel size {dp}"
        )


def _sampling(args: Namespace) -> Iterator[str]:
    if args.rollout_temperature <= 0:
        yield f"--rollout-temperature {args.rollout_temperature}: wanted more than 0"
    if args.rollout_max_response_len is None and not args.debug_train_only:
        yield "--rollout-max-response-len: missing (wanted: the longest response in tokens)"
    limit = args.rollout_max_context_len
    if limit is not None and args.rollout_max_prompt_len > limit - 1:
        longest = args.rollout_max_prompt_len
        yield f"--rollout-max-prompt-len {longest}: above --rollout-max-context-len {limit} - 1"
    known = args.max_position_embeddings
    if limit is not None and limit > known:
        yield f"--rollout-max-context-len {limit}: above max_position_embeddings {known} (config.json)"
    if args.rollout_function_path == DEFAULT_ROLLOUT_FUNCTION and not args.debug_train_only:
        yield from _default_rollout(args)
    if args.rollout_function_path == SFT_ROLLOUT_FUNCTION and args.n_samples_per_prompt != 1:
        yield f"--n-samples-per-prompt {args.n_samples_per_prompt}: SFT takes each row once (wanted: 1)"
    if args.group_rm and _default_evaluation(args):
        yield "--group-rm: evaluation scores samples one by one (wanted: without --eval-interval)"


def _default_rollout(args: Namespace) -> Iterator[str]:
    scored = args.custom_rm_path or args.rm_type or args.custom_generate_function_path
    if not scored and args.num_rollout != 0:
        yield "--rm-type: missing (wanted: a reward type, or --custom-rm-path)"
    for dataset in args.eval_datasets if _default_evaluation(args) else []:
        own = dataset.rm_type or dataset.metadata_overrides.get("rm_type")
        own = own or dataset.custom_rm_path or dataset.custom_generate_function_path
        if not (scored or own):
            yield f"eval dataset {dataset.name}: no reward (wanted: rm_type or custom_rm_path)"
    if not args.rollout_global_dataset and args.num_rollout != 0:
        yield "--disable-rollout-global-dataset: needs a --rollout-function-path of your own"


def _default_evaluation(args: Namespace) -> bool:
    return args.eval_interval is not None and args.eval_function_path == DEFAULT_ROLLOUT_FUNCTION


def _rewards(args: Namespace) -> Iterator[str]:
    named = [("--rm-type", args.rm_type)]
    named += [(f"eval dataset {dataset.name}: rm_type", dataset.rm_type) for dataset in args.eval_datasets]
    for where, rm_type in named:
        kind = (rm_type or "").strip().removeprefix("boxed_")
        if kind and kind not in RM_TYPES:
            yield f"{where} {rm_type}: unknown (wanted: {', '.join(RM_TYPES)}, or boxed_ before one)"
        if kind == "remote_rm" and args.rm_url is None:
            yield f"{where} {rm_type}: needs --rm-url"


def _algorithm(args: Namespace) -> Iterator[str]:
    if args.kl_coef and args.kl_loss_coef:
        yield f"--kl-coef {args.kl_coef} and --kl-loss-coef {args.kl_loss_coef}: only one of them above 0"
    if args.advantage_estimator.startswith("reinforce_plus_plus") and not args.normalize_advantages:
        yield f"--advantage-estimator {args.advantage_estimator}: needs --normalize-advantages"
    if args.use_rollout_logprobs and args.use_tis:
        yield "--use-rollout-logprobs and --use-tis: only one of them at a time"
    if args.get_mismatch_metrics and not args.custom_tis_function_path and not args.use_tis:
        yield "--get-mismatch-metrics: needs --custom-tis-function-path"
    if args.eps_clip_c is not None and args.eps_clip_c <= 1:
        yield f"--eps-clip-c {args.eps_clip_c}: wanted above 1"
    if args.only_train_params_name_list and args.freeze_params_name_list:
        yield "--only-train-params-name-list and --freeze-params-name-list: only one of them at a time"
    if (args.loss_type == "custom_loss") != (args.custom_loss_function_path is not None):
        yield "--loss-type custom_loss and --custom-loss-function-path: each needs the other"
    if args.ref_update_interval is not None and not (args.kl_coef or args.use_kl_loss):
        yield "--ref-update-interval: there is no reference model (wanted: --use-kl-loss or --kl-coef)"
    if args.save_debug_rollout_data and args.save_debug_rollout_data == args.save_debug_train_data:
        yield "--save-debug-rollout-data and --save-debug-train-data: the same file"


def _without_effect(args: Namespace) -> Iterator[str]:
    """Values that would be accepted and change nothing, or leave nothing to learn."""
    if args.kl_loss_coef and not args.use_kl_loss:
        yield f"--kl-loss-coef {args.kl_loss_coef}: needs --use-kl-loss"
    if args.use_unbiased_kl and not args.use_kl_loss:
        yield "--use-unbiased-kl: needs --use-kl-loss"
    if args.custom_tis_function_path and not (args.use_tis or args.get_mismatch_metrics):
        yield "--custom-tis-function-path: needs --use-tis or --get-mismatch-metrics"
    if args.loss_type != "policy_loss":
        return
    if not args.compute_advantages_and_returns and not args.rollout_data_postprocess_path:
        yield (
            "--disable-compute-advantages-and-returns: the policy loss needs advantages "
            "(wanted: --rollout-data-postprocess-path that makes them, or without)"
        )
    if args.use_rollout_entropy and args.use_rollout_logprobs and not args.get_mismatch_metrics:
        yield "--use-rollout-entropy: --use-rollout-logprobs leaves out the pass that would compute it"
    if args.compute_advantages_and_returns and args.custom_advantage_function_path is None:
        yield from _estimator_without_effect(args)


def _estimator_without_effect(args: Namespace) -> Iterator[str]:
    estimator = args.advantage_estimator
    if args.kl_coef and estimator in GROUP_SCALED:
        yield f"--kl-coef {args.kl_coef}: {estimator} has no KL in its rewards (wanted: --use-kl-loss)"
    if args.gamma != 1 and estimator != "reinforce_plus_plus":
        yield f"--gamma {args.gamma}: {estimator} does not discount (wanted: 1)"
    centred = estimator in GROUP_CENTRED and args.rewards_normalization
    learns = args.num_rollout != 0 and not args.debug_rollout_only
    if args.n_samples_per_prompt == 1 and centred and learns and not _makes_own_groups(args):
        yield (
            f"--n-samples-per-prompt 1: {estimator} compares the samples of a prompt, so every advantage "
            "would be 0 (wanted: 2 or more, or --disable-rewards-normalization)"
        )


def _makes_own_groups(args: Namespace) -> bool:
    """Whether user code may compare rewards otherwise, or make several samples of one prompt."""
    return bool(
        args.custom_reward_post_process_path
        or args.custom_convert_samples_to_train_data_path
        or args.custom_generate_function_path
        or args.rollout_data_postprocess_path
        or args.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION
    )


def _gradients(args: Namespace) -> Iterator[str]:
    if args.accumulate_allreduce_grads_in_fp32 and args.grad_reduce_in_bf16:
        yield "--accumulate-allreduce-grads-in-fp32 and --grad-reduce-in-bf16: only one of them at a time"
    if args.grad_reduce_in_bf16 and not args.bf16:
        yield "--grad-reduce-in-bf16: needs --bf16"


def _schedule(args: Namespace) -> Iterator[str]:
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        yield "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler: only one of them"
    if args.lr_warmup_fraction is not None and args.lr_warmup_iters:
        yield "--lr-warmup-fraction and --lr-warmup-iters: only one of them at a time"
    if args.lr_warmup_fraction is not None and not 0 <= args.lr_warmup_fraction <= 1:
        yield f"--lr-warmup-fraction {args.lr_warmup_fraction}: wanted 0 to 1"
    steps = (args.num_rollout or 0) * args.rollout_batch_size * args.n_samples_per_prompt
    steps = args.lr_decay_iters or steps // args.global_batch_size
    if steps and args.lr_warmup_iters >= steps:
        yield f"--lr-warmup-iters {args.lr_warmup_iters}: wanted less than the {steps} steps of the decay"
    if args.min_lr > args.lr:
        yield f"--min-lr {args.min_lr}: above --lr {args.lr}"
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        yield "--lr-decay-style WSD: needs --lr-wsd-decay-iters"
    if args.weight_decay_incr_style != "constant" and None in (
        args.start_weight_decay,
        args.end_weight_decay,
    ):
        style = args.weight_decay_incr_style
        yield f"--weight-decay-incr-style {style}: needs --start-weight-decay and --end-weight-decay"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


_RULES: tuple[Rule, ...] = (
    _counts,
    _layout,
    _engines,
    _data,
    _batches,
    _sampling,
    _rewards,
    _algorithm,
    _without_effect,
    _gradients,
    _schedule,
)
