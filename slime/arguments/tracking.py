"""Flags: metrics, dumps, profiles and self-checks."""

from dataclasses import dataclass
from typing import Literal

from slime.arguments.flags import flag, refused


@dataclass(frozen=True)
class TrackingArgs:
    """Where metrics go. The JSONL file is always written."""

    run_name: str | None = flag(help="name of the run in trackers")
    metrics_file: str | None = flag(
        help="JSONL file of metrics; default metrics.jsonl in --save, else in outputs/"
    )
    use_wandb: bool = flag(False, help="log to Weights & Biases")
    wandb_mode: Literal["online", "offline", "disabled"] | None = flag(help="mode; default as wandb chooses")
    wandb_dir: str | None = flag(help="directory of wandb's local files")
    wandb_key: str | None = flag(help="API key")
    wandb_host: str | None = flag(help="address of a private server")
    wandb_team: str | None = flag(help="team (entity)")
    wandb_group: str | None = flag(help="group of the run")
    wandb_project: str | None = flag(help="project")
    wandb_run_id: str | None = flag(help="id of a run to go on with")
    disable_wandb_random_suffix: bool = flag(
        False, help="no random suffix on the group; sets wandb_random_suffix to False"
    )
    wandb_always_use_train_step: bool = flag(False, help="plot rollout metrics over training steps")
    use_tensorboard: bool = flag(False, help="log to tensorboard")
    tb_project_name: str | None = flag(help="directory of tensorboard files; default tensorboard_log")
    tb_experiment_name: str | None = flag(help="subdirectory of this run")
    log_multi_turn: bool = refused(False, help="log metrics of turns")
    log_passrate: bool = flag(False, help="log pass@k")
    log_reward_category: str | None = flag(help="count samples by this key of the reward")
    log_correct_samples: bool = refused(False, help="log length and entropy of correct samples")


@dataclass(frozen=True)
class DebugArgs:
    """Run one half of the loop, dump and reload what passes between the halves."""

    debug_rollout_only: bool = flag(False, help="engines only, no trainer")
    debug_train_only: bool = flag(False, help="trainer only, on --load-debug-rollout-data")
    load_debug_rollout_data: str | None = flag(help="dump to train on, with {rollout_id} in its name")
    load_debug_rollout_data_subsample: float | None = flag(help="part of the dump to use, between 0 and 1")
    save_debug_rollout_data: str | None = flag(help="file to dump samples to, with {rollout_id} in its name")
    save_debug_train_data: str | None = flag(help="file to dump train data to, with {rollout_id} in its name")
    dump_details: str | None = flag(help="directory of both dumps")
    load_forge_rollout_data: str | None = refused(help="dump of another framework to train on")
    memory_snapshot_dir: str = refused(".", help="directory of memory snapshots")
    memory_snapshot_num_steps: int | None = refused(help="steps to record memory for")
    memory_recorder: Literal["torch", "memray"] = refused("torch", help="what records memory")
    record_memory_history: bool = refused(False, help="record allocations")
    profile_target: list[Literal["train_overall", "train_actor", "train_log_probs"]] = refused(
        ["train_overall"], help="what the profiler records"
    )


@dataclass(frozen=True)
class CiArgs:
    """Self-checks of a run."""

    ci_test: bool = flag(False, help="stop the run when an invariant does not hold")
    ci_disable_kl_checker: bool = flag(False, help="leave out the checks on KL")
    ci_train_rollout_logprob_abs_diff_threshold: float = flag(
        0.1, help="largest mean gap between trainer and engine log-probs"
    )
    ci_save_grad_norm: str | None = refused(help="file to save gradient norms to")
    ci_load_grad_norm: str | None = refused(help="file of gradient norms to compare with")
