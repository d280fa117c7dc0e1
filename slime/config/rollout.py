"""How samples are generated."""

from dataclasses import dataclass

from slime.config.flag import flag, path_flag
from slime.config.limits import MAX_SEED

DEFAULT_ROLLOUT_FUNCTION = "slime.rollout.sglang_rollout.generate_rollout"


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Generation of samples by the engines."""

    rollout_function_path: str = path_flag(
        "fn(args, rollout_id, data_source, evaluation=False) that makes the samples of a rollout",
        DEFAULT_ROLLOUT_FUNCTION,
    )
    rollout_temperature: float = flag(1.0, above=0, help="sampling temperature, above 0")
    rollout_max_context_len: int | None = flag(at_least=2, help="longest prompt plus response, in tokens")
    rollout_max_prompt_len: int | None = flag(
        above=0, help="longer prompts are dropped from the data, in tokens"
    )
    rollout_max_response_len: int | None = flag(above=0, help="longest response, in tokens")
    rollout_skip_special_tokens: bool = flag(False, help="leave special tokens out of the response text")
    rollout_stop: list[str] | None = flag(help="strings that end a response")
    rollout_stop_token_ids: list[int] | None = flag(at_least=0, help="token ids that end a response")
    rollout_shuffle: bool = flag(False, help="shuffle the prompts of each epoch")
    rollout_seed: int = flag(42, at_least=0, at_most=MAX_SEED, help="seed of the shuffle and of sampling")
    over_sampling_batch_size: int = flag(
        above=0, help="prompts fetched at once; default --rollout-batch-size"
    )
    dynamic_sampling_filter_path: str | None = path_flag("fn(args, group) that keeps or drops a group")
    partial_rollout: bool = flag(
        False, help="keep unfinished samples and go on with them in the next rollout"
    )
    keep_surplus_groups: bool = flag(
        False,
        help="train in the next rollout on groups that finish when the batch is full, rather than drop them; "
        "--partial-rollout keeps them too",
    )
    mask_offpolicy_in_partial_rollout: bool = flag(False, help="do not train on tokens of earlier rollouts")
    custom_generate_function_path: str | None = path_flag(
        "async fn(args, sample, sampling_params) that generates one sample", awaited=True
    )
    rollout_sample_hook_path: list[str] = flag(
        [],
        append=True,
        dotted_path=True,
        awaited=True,
        help="fn(args, sample, *, rollout_id, evaluation); may be repeated",
    )
    custom_rollout_log_function_path: str | None = path_flag(
        "fn(rollout_id, args, samples, extra_metrics, rollout_time); truthy replaces the default log"
    )
    custom_eval_rollout_log_function_path: str | None = path_flag(
        "fn(rollout_id, args, data, extra_metrics); truthy replaces the default log"
    )
    buffer_filter_path: str | None = path_flag(
        "fn(args, rollout_id, buffer, num_samples) that takes groups from the buffer"
    )
    rollout_sample_filter_path: str | None = path_flag("fn(args, groups) that marks samples to leave out")
    rollout_all_samples_process_path: str | None = path_flag("fn(args, all_groups, get_samples)")
    max_staleness: int | None = flag(
        at_least=0,
        help="fully async: weight versions that the oldest token of a group may be behind the trainer's",
    )
