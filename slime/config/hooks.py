"""Code of the user's that runs inside the trainer."""

from dataclasses import dataclass

from slime.config.flag import path_flag, refused


@dataclass(frozen=True, kw_only=True)
class HookConfig:
    """Code of the user's that runs inside the trainer."""

    custom_megatron_init_path: str | None = path_flag("fn(args), runs after Megatron is initialised")
    custom_megatron_before_log_prob_hook_path: str | None = path_flag(
        "fn(args, model, store_prefix), runs before log-probs are computed"
    )
    custom_megatron_before_train_step_hook_path: str | None = path_flag(
        "fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler), runs before each step"
    )
    rollout_data_postprocess_path: str | None = path_flag(
        "fn(args, rollout_id, rollout_data), runs in each trainer process after advantages are computed"
    )
    megatron_deepgemm_forward_layers: list[int] | None = refused(help="layers that use DeepGEMM")
    megatron_deepgemm_forward_modules: list[str] | None = refused(help="modules that use DeepGEMM")
    megatron_deepgemm_moe_forward_layers: list[int] | None = refused(help="MoE layers that use DeepGEMM")
    megatron_deepgemm_moe_forward_modules: list[str] | None = refused(help="MoE modules that use DeepGEMM")
