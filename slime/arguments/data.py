"""Flags: the prompts, and how samples are cut into batches."""

from dataclasses import dataclass
from typing import Any, Literal

from slime.arguments.flags import flag, path_flag, refused

BUILT_IN_DATA_SOURCES = "slime.rollout.data_source."
"""Where those classes live that read ``--prompt-data``; another one may bring its own data."""


@dataclass(frozen=True)
class DataArgs:
    """Prompt data."""

    prompt_data: str | None = flag(help="JSONL or parquet file of prompts; file@[a:b] takes a slice")
    disable_rollout_global_dataset: bool = flag(
        False, help="the rollout function brings its own data; sets rollout_global_dataset to False"
    )
    data_source_path: str = path_flag(
        "class that serves prompts", "slime.rollout.data_source.RolloutDataSourceWithBuffer"
    )
    num_rollout: int | None = flag(help="rollouts to run; 0 with --eval-interval only evaluates")
    num_epoch: int | None = flag(help="passes over the data, instead of --num-rollout")
    start_rollout_id: int | None = flag(help="first rollout; default 0 or the one after the checkpoint's")
    apply_chat_template: bool = flag(False, help="render prompts with the tokenizer's chat template")
    apply_chat_template_kwargs: dict[str, Any] = flag({}, help="arguments of the template, a JSON object")
    input_key: str = flag("input", help="field of a record that holds the prompt")
    label_key: str | None = flag(help="field that holds the label")
    metadata_key: str = flag("metadata", help="field that holds metadata")
    tool_key: str = flag("tools", help="field that holds tool definitions")
    multimodal_keys: dict[str, Any] | None = refused(help="fields that hold images, videos or audio")
    loss_mask_type: Literal["qwen", "qwen3", "qwen3_5", "distill_qwen"] = flag(
        "qwen", help="how SFT finds the assistant's tokens in a conversation"
    )


@dataclass(frozen=True)
class BatchArgs:
    """Batch sizes."""

    rollout_batch_size: int = flag(required=True, help="prompts of one rollout")
    n_samples_per_prompt: int = flag(1, help="samples of one prompt, a group")
    global_batch_size: int | None = flag(
        help="samples of one optimizer step; default all samples of a rollout"
    )
    num_steps_per_rollout: int | None = flag(help="optimizer steps of a rollout; sets --global-batch-size")
    micro_batch_size: int = flag(1, help="samples of one micro-batch, without --use-dynamic-batch-size")
    use_dynamic_batch_size: bool = flag(False, help="fill micro-batches up to --max-tokens-per-gpu")
    max_tokens_per_gpu: int | None = flag(help="tokens of one micro-batch on one GPU")
    log_probs_max_tokens_per_gpu: int | None = flag(
        help="the same for log-probs; default --max-tokens-per-gpu"
    )
    balance_data: bool = flag(False, help="spread micro-batches over data-parallel ranks by FLOPs")
    balance_by_flops: bool = flag(False, help="also fill micro-batches by FLOPs")


@dataclass(frozen=True)
class EvalArgs:
    """Evaluation; what is not given is as for training."""

    eval_interval: int | None = flag(help="rollouts between two evaluations")
    eval_prompt_data: list[str] | None = flag(help="pairs of name and file; a single file is named aime")
    eval_config: str | None = flag(help="YAML file of datasets with their own settings")
    eval_function_path: str | None = path_flag("as --rollout-function-path, which is the default")
    skip_eval_before_train: bool = flag(False, help="do not evaluate before the first rollout")
    eval_input_key: str | None = flag(help="field that holds the prompt")
    eval_label_key: str | None = flag(help="field that holds the label")
    eval_tool_key: str | None = flag(help="field that holds tool definitions")
    n_samples_per_eval_prompt: int = flag(1, help="samples of one prompt")
    eval_temperature: float | None = flag(help="sampling temperature; 0 is greedy")
    eval_top_p: float | None = flag(help="nucleus sampling")
    eval_top_k: int | None = flag(help="sample among the k likeliest tokens")
    eval_max_response_len: int | None = flag(help="longest response, in tokens")
    eval_max_prompt_len: int | None = flag(help="longer prompts are dropped, in tokens")
    eval_min_new_tokens: int | None = flag(help="shortest response, in tokens")
    eval_max_context_len: int | None = refused(
        help="longest prompt plus response, in tokens",
        wanted="--eval-max-response-len",
    )
