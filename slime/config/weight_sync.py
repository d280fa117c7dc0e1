"""How weights travel from the trainer to the engines."""

from dataclasses import dataclass
from typing import Literal

from slime.config.flag import flag, path_flag, place_flag, refused


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    """How weights travel from the trainer to the engines."""

    update_weight_buffer_size: int = flag(
        512 * 1024**2,
        above=0,
        help="bytes of one bucket of weights; by handle and over gloo of two that take turns",
    )
    update_weights_interval: int = flag(
        1, above=0, help="rollouts between two weight syncs (train_async.py only)"
    )
    pause_generation_mode: Literal["abort", "retract", "in_place"] = flag(
        "abort",
        help="what becomes of answers under way when engines stop for new weights. abort: they end, and "
        "whoever asked goes on from their tokens; retract, in_place: they go on by themselves, what was "
        "computed of them is computed anew or kept",
    )
    check_weight_update_equal: bool = flag(
        False, help="verify that the first sync brings back every weight that the engines had loaded"
    )
    check_weight_checksums: bool = flag(
        False,
        help="after each sync hold the checksum of each weight that engines have against what was sent, and "
        "engines against each other",
    )
    check_served_policy: bool = flag(
        True,
        names=("--no-check-served-policy",),
        help="do not compare log-probs of trainer and engines on a prompt, which happens before the first "
        "step and, with --check-weight-update-equal, after each sync",
    )
    served_policy_interval: int | None = flag(
        above=0, help="compare them again after so many syncs; by default not, where the first one is enough"
    )
    served_policy_bound: float | None = flag(
        above=0, help="how far apart they may be on average; default by number format: docs/usage.md"
    )
    update_weight_mode: Literal["full", "delta"] = flag(
        "full",
        help="what one sync sends: all weights, or what has changed (over a process group to the embedded "
        "engine alone)",
    )
    update_weight_selector: Literal["all", "target", "draft"] = flag(
        "all",
        help="which models of an engine take them: target is the policy, draft the one of speculative "
        "decoding, which takes the layers of --enable-mtp-training",
    )
    update_weight_transport: Literal["nccl", "shards", "disk", "nixl"] = flag(
        "nccl",
        help="nccl: process group (nccl or gloo), or shared memory when colocated; shards: over these, to "
        "each engine rank what it keeps; disk: checkpoints in --update-weight-disk-dir; nixl: the embedded "
        "engine reads the trainer's memory (extra nixl)",
    )
    release_train: bool = flag(
        False,
        help="end trainer processes while engines generate; they start again from the run's own latest save, "
        "which is made after each rollout (with --save, and --update-weight-transport disk)",
    )
    update_weight_disk_dir: str | None = place_flag(
        help="directory of this run alone that trainer and engines share, for --update-weight-transport "
        "disk; with --update-weight-local-checkpoint-dir, or followers, a URL too (s3://bucket/run7)"
    )
    update_weight_disk_keep_files: bool = flag(
        False, help="keep the versions there that all engines have left behind"
    )
    update_weight_delta_encoding: Literal["xor", "overwrite"] = flag(
        "xor", help="form of a byte difference: new ^ old, or positions and new bytes"
    )
    update_weight_delta_checksum: Literal["xxh3-128", "blake3", "adler32"] = flag(
        "xxh3-128", help="digest of a tensor's new state"
    )
    update_weight_local_checkpoint_dir: str | None = place_flag(
        help="directory on each engine's machine, of this run alone, where versions of "
        "--update-weight-disk-dir are made whole checkpoints that engines load; a follower has its own"
    )
    publish_weights: bool = flag(
        False,
        help="write changes to --update-weight-disk-dir in a run that has no engines (--debug-train-only), "
        "for engines of others that slime weights follow brings them to",
    )
    custom_update_weight_post_write_path: str | None = path_flag(
        "fn(args, version_dir, rollout_engines), runs on the rank that has written a version to "
        "--update-weight-disk-dir, before engines read it",
        awaited=False,
    )
    rollout_data_transport: Literal["object-store", "nixl"] = refused(
        "object-store", help="how train data reaches the trainer"
    )
