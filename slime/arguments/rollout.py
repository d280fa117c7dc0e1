"""Flags: how samples are generated."""

from dataclasses import dataclass

from slime.arguments.flags import flag, path_flag, refused

# Names that slime.rollout.rm_hub scores by; any of them may follow "boxed_".
RM_TYPES = ("math", "deepscaler", "dapo", "f1", "gpqa", "random", "remote_rm")
DEFAULT_ROLLOUT_FUNCTION = "slime.rollout.sglang_rollout.generate_rollout"
SFT_ROLLOUT_FUNCTION = "slime.rollout.sft_rollout.generate_rollout"


@dataclass(frozen=True)
class RolloutArgs:
    """Generation of samples by the engines."""

    hf_checkpoint: str = flag(
        required=True, help="HF directory: tokenizer, config, first weights of the engines"
    )
    model_name: str | None = refused(
        help="name of the weight converter", wanted="leave it out, config.json names the model"
    )
    trust_remote_code: bool = flag(False, help="run Python code that comes with the checkpoint")
    rollout_function_path: str = path_flag(
        "fn(args, rollout_id, data_source, evaluation=False) that makes the samples of a rollout",
        DEFAULT_ROLLOUT_FUNCTION,
    )
    rollout_temperature: float = flag(1.0, help="sampling temperature, above 0")
    rollout_top_p: float = refused(
        1.0, help="nucleus sampling; other values need the engine to return the nucleus", wanted="1.0"
    )
    rollout_top_k: int = flag(-1, help="sample among the k likeliest tokens; -1 for all")
    rollout_max_context_len: int | None = flag(help="longest prompt plus response, in tokens")
    rollout_max_prompt_len: int | None = flag(help="longer prompts are dropped from the data, in tokens")
    rollout_max_response_len: int | None = flag(help="longest response, in tokens")
    rollout_skip_special_tokens: bool = flag(False, help="leave special tokens out of the response text")
    rollout_stop: list[str] | None = flag(help="strings that end a response")
    rollout_stop_token_ids: list[int] | None = flag(help="token ids that end a response")
    rollout_shuffle: bool = flag(False, help="shuffle the prompts of each epoch")
    rollout_seed: int = flag(42, help="seed of the shuffle and of sampling")
    over_sampling_batch_size: int | None = flag(help="prompts fetched at once; default --rollout-batch-size")
    dynamic_sampling_filter_path: str | None = path_flag("fn(args, group) that keeps or drops a group")
    partial_rollout: bool = flag(
        False, help="keep unfinished samples and go on with them in the next rollout"
    )
    mask_offpolicy_in_partial_rollout: bool = flag(False, help="do not train on tokens of earlier rollouts")
    custom_generate_function_path: str | None = path_flag(
        "async fn(args, sample, sampling_params) that generates one sample"
    )
    rollout_sample_hook_path: list[str] = flag(
        [], append=True, dotted_path=True, help="fn(args, sample, *, rollout_id, evaluation); may be repeated"
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
    keep_old_actor: bool = refused(False, help="keep a separate old policy for log-probs")
    rollout_external_engine_addrs: list[str] | None = refused(help="host:port of engines started elsewhere")
    prefill_num_servers: int | None = refused(help="engines that only prefill")


@dataclass(frozen=True)
class RewardArgs:
    """Where rewards come from, and the services that help to make samples."""

    rm_type: str | None = flag(help="built-in reward: math, f1, ...; a boxed_ prefix grades the boxed answer")
    reward_key: str | None = flag(help="key of the reward to train on, when rewards are mappings")
    eval_reward_key: str | None = flag(help="the same for evaluation; default --reward-key")
    group_rm: bool = flag(False, help="score a whole group in one call")
    rm_url: str | None = flag(help="address of the remote reward model (rm_type remote_rm)")
    custom_rm_path: str | None = path_flag("async fn(args, sample) that returns the reward")
    custom_reward_post_process_path: str | None = path_flag("fn(args, samples) -> (raw, rewards)")
    custom_convert_samples_to_train_data_path: str | None = path_flag("fn(args, samples) -> train data")
    http_proxy: str | None = refused(help="proxy of requests to the engines")
    use_distributed_post: bool = refused(False, help="send requests from every node")
    rollout_buffer_url: str | None = refused(help="address of the rollout buffer service")
    fetch_trajectory_retry_times: int = refused(-1, help="tries to fetch from the rollout buffer")
    min_batch_collection_ratio: float = refused(1.0, help="part of a batch the rollout buffer may return")
    rollout_task_type: str = refused("math", help="task type of the rollout buffer")
