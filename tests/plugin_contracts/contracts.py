"""How each hook is called, by position and by keyword, and functions that comply."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Contract:
    option: str
    positional: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    is_async: bool | None = None
    functions: tuple[str, ...] = field(default=())

    @property
    def variable(self) -> str:
        """Environment variable with a dotted path of one's own to check."""
        return "SLIME_CONTRACT_" + self.option.upper().replace("-", "_")


RECORDERS = "tests.plugin_contracts.recorders."

CONTRACTS = (
    Contract(
        "rollout-function-path",
        ("args", "rollout_id", "data_source"),
        ("evaluation",),
        is_async=False,
        functions=(
            "slime.rollout.sglang_rollout.generate_rollout",
            "slime.rollout.sft_rollout.generate_rollout",
        ),
    ),
    Contract(
        "eval-function-path",
        ("args", "rollout_id", "data_source"),
        ("evaluation",),
        is_async=False,
        functions=("slime.rollout.sglang_rollout.generate_rollout",),
    ),
    Contract(
        "custom-generate-function-path",
        ("args", "sample", "sampling_params"),
        is_async=True,
        functions=(
            "slime.rollout.sglang_rollout.generate",
            "examples.calculator_tool.generate.generate",
            RECORDERS + "generate",
        ),
    ),
    Contract(
        "custom-rm-path",
        ("args", "sample"),
        functions=("examples.calculator_tool.reward.reward", RECORDERS + "rm"),
    ),
    Contract(
        "dynamic-sampling-filter-path",
        ("args", "group"),
        is_async=False,
        functions=(
            "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
            "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback",
            RECORDERS + "dynamic_filter",
        ),
    ),
    Contract(
        "buffer-filter-path",
        ("args", "rollout_id", "buffer", "num_samples"),
        is_async=False,
        functions=("slime.rollout.data_source.pop_first", RECORDERS + "buffer_filter"),
    ),
    Contract(
        "data-source-path",
        ("args",),
        is_async=False,
        functions=(
            "slime.rollout.data_source.RolloutDataSource",
            "slime.rollout.data_source.RolloutDataSourceWithBuffer",
        ),
    ),
    Contract(
        "rollout-sample-filter-path",
        ("args", "groups"),
        is_async=False,
        functions=(RECORDERS + "sample_filter",),
    ),
    Contract(
        "rollout-all-samples-process-path",
        ("args", "all_groups", "get_samples"),
        is_async=False,
        functions=(RECORDERS + "all_samples",),
    ),
    Contract(
        "rollout-sample-hook-path",
        ("args", "sample"),
        ("rollout_id", "evaluation"),
        functions=(RECORDERS + "sample_hook",),
    ),
    Contract(
        "custom-reward-post-process-path",
        ("args", "samples"),
        is_async=False,
        functions=(RECORDERS + "post_process",),
    ),
    Contract(
        "custom-convert-samples-to-train-data-path",
        ("args", "samples"),
        is_async=False,
        functions=(RECORDERS + "convert",),
    ),
    Contract(
        "custom-rollout-log-function-path",
        ("rollout_id", "args", "samples", "extra_metrics", "rollout_time"),
        is_async=False,
        functions=(RECORDERS + "rollout_log",),
    ),
    Contract(
        "custom-eval-rollout-log-function-path",
        ("rollout_id", "args", "data", "extra_metrics"),
        is_async=False,
        functions=(RECORDERS + "eval_log",),
    ),
)
