"""Evaluation: when, on what, and how its samples are drawn and scored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.config.flag import flag, path_flag, place_flag


@dataclass
class EvalDatasetConfig:
    """One dataset to evaluate on. None leaves the choice to the rollout's own default."""

    name: str = flag(required=True, help="name of its metrics, eval/NAME")
    path: str = place_flag(
        "JSONL or parquet file, directory or pattern; PATH@[a:b] takes a slice", required=True
    )
    rm_type: str | None = flag(help="built-in reward")
    custom_rm_path: str | None = path_flag("reward function", awaited=True)
    input_key: str = flag(help="field that holds the prompt")
    label_key: str | None = flag(help="field that holds the label")
    tool_key: str | None = flag(help="field that holds tool definitions")
    metadata_key: str | None = flag(help="field that holds metadata")
    apply_chat_template: bool | None = flag(help="render prompts with the tokenizer's chat template")
    apply_chat_template_kwargs: dict[str, Any] | None = flag(help="arguments of the template")
    n_samples_per_eval_prompt: int = flag(above=0, help="samples of one prompt")
    temperature: float | None = flag(at_least=0, help="sampling temperature; 0 is greedy")
    top_p: float | None = flag(above=0, at_most=1, help="nucleus sampling")
    top_k: int | None = flag(at_least=1, also=(-1,), help="sample among the k likeliest tokens; -1 for all")
    max_response_len: int | None = flag(above=0, help="longest response, in tokens")
    stop: list[str] | None = flag(help="strings that end a response")
    stop_token_ids: list[int] | None = flag(at_least=0, help="token ids that end a response")
    min_new_tokens: int | None = flag(at_least=0, help="shortest response, in tokens")
    repetition_penalty: float | None = flag(above=0, at_most=2, help="divides the logits of seen tokens")
    skip_special_tokens: bool | None = flag(help="leave special tokens out of the response text")
    no_stop_trim: bool | None = flag(help="leave the stop string in the response text")
    custom_generate_function_path: str | None = path_flag("generates one sample", awaited=True)
    metadata_overrides: dict[str, Any] = flag({}, help="added to the metadata of every sample")
    # For evaluation functions of users, as --eval-function-path; the one here does not read them.
    min_eval_samples: int | None = flag(above=0, help="fewest samples, for --eval-function-path")
    eval_task_timeout: float | None = flag(above=0, help="seconds, for --eval-function-path")
    eval_early_stop_remaining: int | None = flag(at_least=0, help="samples, for --eval-function-path")
    eval_early_stop_idle_timeout: float | None = flag(at_least=0, help="seconds, for --eval-function-path")
    app_service: Any = flag(help="anything, for --eval-function-path")
    message_processor: Any = flag(help="anything, for --eval-function-path")
    reward_model: Any = flag(help="anything, for --eval-function-path")
    remote_environment: Any = flag(help="anything, for --eval-function-path")

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """What decides which samples the file gives."""
        return (self.name, self.path, self.input_key, self.label_key, self.tool_key, self.metadata_key)

    def inject_metadata(self, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
        """A copy of a sample's metadata with this dataset's reward type and overrides."""
        own = {"rm_type": self.rm_type} if self.rm_type is not None else {}
        return {**(metadata or {}), **own, **self.metadata_overrides}


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation; what is not given is as for training.

    Attributes:
        eval_datasets: the datasets with every field filled in.
    """

    eval_interval: int | None = flag(above=0, help="rollouts between two evaluations")
    eval_prompt_data: list[str] | None = flag(
        place=True, help="pairs of name and file; a single file is named aime"
    )
    eval_config: str | None = flag(place=True, help="YAML file of datasets with their own settings")
    eval_function_path: str = path_flag("as --rollout-function-path, which is the default")
    eval_model: str | None = flag(
        help="model of --sglang-config that answers evaluations, while training goes on"
    )
    skip_eval_before_train: bool = flag(False, help="do not evaluate before the first rollout")
    eval_input_key: str | None = flag(help="field that holds the prompt")
    eval_label_key: str | None = flag(help="field that holds the label")
    eval_tool_key: str | None = flag(help="field that holds tool definitions")
    n_samples_per_eval_prompt: int = flag(1, above=0, help="samples of one prompt")
    eval_temperature: float | None = flag(at_least=0, help="sampling temperature; 0 is greedy")
    eval_top_p: float | None = flag(above=0, at_most=1, help="nucleus sampling")
    eval_top_k: int | None = flag(at_least=1, also=(-1,), help="sample among the k likeliest tokens")
    eval_max_response_len: int | None = flag(above=0, help="longest response, in tokens")
    eval_max_prompt_len: int | None = flag(above=0, help="longer prompts are dropped, in tokens")
    eval_min_new_tokens: int | None = flag(at_least=0, help="shortest response, in tokens")
    eval_max_context_len: int | None = flag(
        at_least=2, help="longest prompt plus response, in tokens; default --rollout-max-context-len"
    )
    eval_datasets: list[EvalDatasetConfig]
