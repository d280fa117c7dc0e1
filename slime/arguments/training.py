"""Flags: how the trainer runs and how its weights reach the engines."""

from dataclasses import dataclass
from typing import Any, Literal

from slime.arguments.flags import flag, path_flag, refused


@dataclass(frozen=True)
class TrainingArgs:
    """The trainer process and weight sync."""

    train_env_vars: dict[str, Any] = flag({}, help="extra environment of trainer processes, a JSON object")
    qwen_gdn_backend: Literal["fla", "flashqla"] = refused("fla", help="kernel of Qwen's gated delta net")
    custom_model_provider_path: str | None = path_flag(
        "fn(pre_process, post_process, vp_stage=None) that returns the model"
    )
    recompute_loss_function: bool = flag(False, help="recompute the loss in backward to save memory")
    log_probs_chunk_size: int = flag(-1, help="rows per chunk of the log-prob computation; 0 or less for all")
    only_train_params_name_list: list[str] | None = flag(help="regexes; only matching parameters train")
    freeze_params_name_list: list[str] | None = flag(help="regexes; matching parameters are frozen")
    freeze_indexer: bool = refused(False, help="freeze the parameters of the sparse-attention indexer")
    allgather_cp: bool = refused(False, help="contiguous context parallelism with gathered keys and values")
    data_pad_size_multiplier: int = flag(128, help="packed batches are padded to a multiple of this times TP")
    calculate_per_token_loss: bool = flag(False, help="mean over tokens instead of over samples")
    seed: int = flag(1234, help="seed of the trainer's random numbers")
    fp32: bool = flag(False, help="train in float32; the default is bfloat16")
    megatron_config_path: str | None = refused(help="YAML file of overrides per role")
    custom_config_path: str | None = flag(
        help="YAML file whose keys are set on args before anything is derived"
    )


@dataclass(frozen=True)
class WeightSyncArgs:
    """How weights travel from the trainer to the engines."""

    update_weight_buffer_size: int = flag(512 * 1024**2, help="bytes of one bucket of weights")
    update_weights_interval: int = flag(1, help="rollouts between two weight syncs (train_async.py only)")
    check_weight_update_equal: bool = flag(
        False, help="verify after the first sync that no weight was missed"
    )
    update_weight_mode: Literal["full", "delta"] = refused("full", help="what one sync sends")
    update_weight_transport: Literal["nccl", "disk"] = refused(
        "nccl", help="process group (nccl or gloo), or shared memory when colocated"
    )
    release_train: bool = refused(False, help="destroy trainer processes while engines generate")
    update_weight_disk_dir: str | None = refused(help="directory that trainer and engines share")
    update_weight_disk_keep_files: bool = refused(False, help="keep old version directories")
    update_weight_delta_encoding: Literal["xor", "overwrite"] = refused(
        "xor", help="form of a byte difference"
    )
    update_weight_delta_checksum: Literal["xxh3-128", "blake3", "adler32"] = refused(
        "xxh3-128", help="digest of a tensor's new state"
    )
    update_weight_local_checkpoint_dir: str | None = refused(help="checkpoint directory on the engine's host")
    custom_update_weight_post_write_path: str | None = refused(
        help="fn(args, version_dir, rollout_engines) after weights were written", dotted_path=True
    )
    rollout_data_transport: Literal["object-store", "nixl"] = refused(
        "object-store", help="how train data reaches the trainer"
    )


@dataclass(frozen=True)
class HookArgs:
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
