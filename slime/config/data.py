"""The prompts, and how often they are gone through."""

from dataclasses import dataclass
from typing import Any, Literal

from slime.config.flag import flag, path_flag, refused


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompt data.

    Attributes:
        rollout_global_dataset: whether prompts come from ``--prompt-data``.
    """

    prompt_data: str | None = flag(
        place=True,
        help="JSONL or parquet prompts: a file, a directory, a pattern, or a YAML file of weighted sources; "
        "PATH@[a:b] takes a slice",
    )
    disable_rollout_global_dataset: bool = flag(
        False, help="the rollout function brings its own data; sets rollout_global_dataset to False"
    )
    data_source_path: str = path_flag(
        "class that serves prompts", "slime.rollout.data_source.RolloutDataSourceWithBuffer"
    )
    num_rollout: int | None = flag(at_least=0, help="rollouts to run; 0 with --eval-interval only evaluates")
    num_epoch: int | None = flag(above=0, help="passes over the data, instead of --num-rollout")
    start_rollout_id: int | None = flag(
        at_least=0, help="first rollout; default 0 or the one after the checkpoint's"
    )
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
    rollout_buffer_url: str | None = flag(help="address of the rollout buffer service (slime_plugins)")
    fetch_trajectory_retry_times: int = flag(
        -1,
        at_least=-1,
        help="fetches in a row that may bring nothing from the rollout buffer; -1 for any number",
    )
    min_batch_collection_ratio: float = flag(
        1.0, above=0, at_most=1, help="part of a batch that suffices from the rollout buffer"
    )
    rollout_task_type: str = flag("math", help="what the generator of the rollout buffer makes")
    rollout_global_dataset: bool

    @property
    def total_rollouts(self) -> int:
        """The number of rollouts of the run, which with ``--num-epoch`` follows from the length of the data.

        Raises:
            RuntimeError: it is not known yet.
        """
        if self.num_rollout is None:
            raise RuntimeError("the number of rollouts was asked for before the data was there")
        return self.num_rollout
