"""How samples are cut into optimizer steps and micro-batches."""

from dataclasses import dataclass

from slime.config.flag import flag, path_flag


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Optimizer steps and micro-batches."""

    rollout_batch_size: int = flag(required=True, above=0, help="prompts of one rollout")
    n_samples_per_prompt: int = flag(1, above=0, help="samples of one prompt, a group")
    global_batch_size: int = flag(
        above=0, help="samples of one optimizer step; default --micro-batch-size x data-parallel size"
    )
    num_steps_per_rollout: int | None = flag(
        above=0, help="optimizer steps of a rollout; sets --global-batch-size"
    )
    micro_batch_size: int = flag(
        1, above=0, help="samples of one micro-batch, without --use-dynamic-batch-size"
    )
    use_dynamic_batch_size: bool = flag(False, help="fill micro-batches up to --max-tokens-per-gpu")
    max_tokens_per_gpu: int | None = flag(above=0, help="tokens of one micro-batch on one GPU")
    log_probs_max_tokens_per_gpu: int | None = flag(
        above=0, help="the same for log-probs; default --max-tokens-per-gpu"
    )
    balance_data: bool = flag(False, help="spread micro-batches over data-parallel ranks by FLOPs")
    balance_by_flops: bool = flag(False, help="also fill micro-batches by FLOPs")
    data_pad_size_multiplier: int = flag(
        128, above=0, help="packed batches are padded to a multiple of this times TP"
    )
    custom_convert_samples_to_train_data_path: str | None = path_flag("fn(args, samples) -> train data")
