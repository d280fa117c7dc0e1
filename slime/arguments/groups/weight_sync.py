"""How weights travel from the trainer to the engines."""

import importlib.util
import os
from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.group import ConfigGroup
from slime.arguments.groups import release_train
from slime.arguments.groups.rollout import FULLY_ASYNC_FUNCTION, answers, is_fully_async
from slime.arguments.validate.followed_weights import bad_following, is_followed
from slime.arguments.validate.outputs import bad_output
from slime.config.lora import LoraConfig
from slime.config.run import filled
from slime.config.weight_sync import WeightSyncConfig
from slime.utils.stores import bad_url, is_url, shown


def notes(args: Namespace) -> Iterator[str]:
    """What is about a directory that nothing is written to, changes that are not sent, a pause of nothing."""
    yield from release_train.notes(args)
    yield from _idle_mode(args)
    if args.served_policy_interval is not None and not args.check_served_policy:
        where = f"--served-policy-interval {args.served_policy_interval}"
        yield f"{where}: has no effect with --no-check-served-policy"
    if args.update_weight_mode != "delta":
        yield from _idle_without_changes(args)
    if args.update_weight_transport == "disk":
        return
    unused = "has no effect without --update-weight-transport disk"
    if args.update_weight_disk_dir is not None:
        yield f"--update-weight-disk-dir {args.update_weight_disk_dir}: {unused}"
    if args.update_weight_disk_keep_files:
        yield f"--update-weight-disk-keep-files: {unused}"
    if args.update_weight_local_checkpoint_dir is not None:
        yield f"--update-weight-local-checkpoint-dir {args.update_weight_local_checkpoint_dir}: {unused}"
    if args.custom_update_weight_post_write_path is not None:
        yield (
            f"--custom-update-weight-post-write-path {args.custom_update_weight_post_write_path}: {unused}"
        )


def _idle_mode(args: Namespace) -> Iterator[str]:
    mode, path = args.pause_generation_mode, args.rollout_function_path
    if mode != "abort" and (args.colocate or (answers(path) and not is_fully_async(args))):
        yield (
            f"--pause-generation-mode {mode}: has no effect, no answer is under way when engines stop for "
            f"new weights without --rollout-function-path {FULLY_ASYNC_FUNCTION}"
        )


def _idle_without_changes(args: Namespace) -> Iterator[str]:
    unused = "has no effect without --update-weight-mode delta"
    if args.update_weight_delta_encoding != "xor":
        yield f"--update-weight-delta-encoding {args.update_weight_delta_encoding}: {unused}"
    if args.update_weight_delta_checksum != "xxh3-128" and args.update_weight_transport != "disk":
        yield f"--update-weight-delta-checksum {args.update_weight_delta_checksum}: {unused}"


def contradictions(args: Namespace) -> Iterator[str]:
    """A transport without its directories, engines that cannot read from them, a pause that hides tokens."""
    yield from release_train.contradictions(args)
    yield from _unmasked(args)
    yield from _unselectable(args)
    is_delta, is_disk = args.update_weight_mode == "delta", args.update_weight_transport == "disk"
    if is_disk and args.update_weight_disk_dir is None:
        yield (
            "--update-weight-disk-dir: missing (wanted: a directory that trainer and engines share, for "
            "--update-weight-transport disk)"
        )
    if args.update_weight_disk_dir is not None and is_url(args.update_weight_disk_dir):
        yield from _bad_store(args)
    if args.update_weight_transport == "nixl":
        yield from _no_reads(args)
    elif is_delta and not is_disk:
        yield from _no_changes_over_a_group(args)
    if is_delta and args.colocate:
        yield "--update-weight-mode delta: with --colocate (wanted: engines on GPUs of their own, or full)"
    yield from bad_following(args)
    if is_delta and is_disk and args.update_weight_local_checkpoint_dir is None and not is_followed(args):
        yield (
            "--update-weight-local-checkpoint-dir: missing (wanted: a directory on each engine's machine, "
            "for --update-weight-mode delta)"
        )
    if is_disk and args.update_weight_local_checkpoint_dir is not None:
        yield from _unreadable(args)


def _bad_store(args: Namespace) -> Iterator[str]:
    """What is about a URL in place of a directory of versions."""
    url = args.update_weight_disk_dir
    where = f"--update-weight-disk-dir {shown(url)}"
    if reason := bad_url(url):
        yield f"{where}: {reason}"
    if is_followed(args) and args.update_weight_mode == "delta":
        return
    if args.update_weight_transport == "disk" and args.update_weight_local_checkpoint_dir is None:
        yield (
            f"{where}: without --update-weight-local-checkpoint-dir, from which engines load what "
            "lies at a URL (wanted: it, or a directory that trainer and engines share)"
        )


def _no_changes_over_a_group(args: Namespace) -> Iterator[str]:
    """Engines that take whole weights over a process group."""
    where = f"--update-weight-mode delta: with --update-weight-transport {args.update_weight_transport}"
    if args.rollout_external:
        yield (
            f"{where} and --rollout-external-engine-addrs, whose engines may have nothing that makes weights "
            "of changes (wanted: full, or --update-weight-transport disk with slime weights follow)"
        )
    elif args.rollout_engine == "sglang":
        yield (
            f"{where} and --rollout-engine sglang, which takes whole weights over a process group (wanted: "
            "--update-weight-transport disk, or --rollout-engine embedded)"
        )
    if filled(LoraConfig, args).serves_adapter:
        yield f"{where} and --no-lora-merge, whose base is sent once (wanted: full)"


def _no_reads(args: Namespace) -> Iterator[str]:
    """What cannot read weights out of the trainer's memory, or has no need to."""
    where = "--update-weight-transport nixl"
    if args.update_weight_mode != "full":
        yield f"{where}: with --update-weight-mode {args.update_weight_mode} (wanted: full)"
    if args.colocate:
        yield f"{where}: with --colocate (wanted: nccl, by which engines share the trainer's memory)"
    if args.rollout_external:
        yield f"{where}: with --rollout-external-engine-addrs, which may have no NIXL (wanted: nccl or disk)"
    elif args.rollout_engine == "sglang":
        yield f"{where}: with --rollout-engine sglang, which reads no trainer's memory (wanted: nccl or disk)"
    if not _has_nixl():
        yield f"{where}: NIXL is not installed (wanted: pip install -c constraints/cpu.txt -e '.[nixl]')"


def _has_nixl() -> bool:
    """Whether it is installed; as names alone say, for importing it takes long."""
    found = importlib.util.find_spec
    return found("nixl") is not None and any(map(found, ("nixl_cu13", "nixl_cu12", "nixl_rocm")))


def _unmasked(args: Namespace) -> Iterator[str]:
    mode = args.pause_generation_mode
    if mode != "abort" and args.partial_rollout and args.mask_offpolicy_in_partial_rollout:
        yield (
            f"--pause-generation-mode {mode}: with --mask-offpolicy-in-partial-rollout, which leaves out the "
            "tokens of requests that an update has ended, and none ends (wanted: abort)"
        )


def _unselectable(args: Namespace) -> Iterator[str]:
    """Some models of an engine alone where its route takes all, or where there is no such model."""
    selector, transport, mode = (
        args.update_weight_selector,
        args.update_weight_transport,
        args.update_weight_mode,
    )
    where = f"--update-weight-selector {selector}"
    if selector == "all":
        return
    if transport != "nccl" or mode != "full":
        yield (
            f"{where}: with --update-weight-transport {transport} and --update-weight-mode {mode}, by which "
            "an engine loads all its models (wanted: nccl and full)"
        )
    if selector != "draft":
        return
    if not args.rollout_external and args.rollout_engine == "embedded":
        yield f"{where}: with --rollout-engine embedded, which drafts no tokens (wanted: all or target)"
    if not args.enable_mtp_training:
        yield f"{where}: without --enable-mtp-training, which trains what engines draft with"


def _unreadable(args: Namespace) -> Iterator[str]:
    """What is about versions that each engine's machine makes a checkpoint of its own."""
    local = args.update_weight_local_checkpoint_dir
    where = f"--update-weight-local-checkpoint-dir {local}"
    if not os.path.isabs(local):
        yield f"{where}: is no absolute path (wanted: one, as it names a directory on other machines)"
    if args.update_weight_disk_dir is not None and _same(
        local, args.update_weight_disk_dir.removeprefix("file://")
    ):
        yield f"{where}: is --update-weight-disk-dir (wanted: another directory)"
    if args.rollout_external:
        yield (
            f"{where}: with --rollout-external-engine-addrs, on whose machines this run makes no checkpoints "
            "(wanted: without it; each slime weights follow has a --local-checkpoint-dir of its own)"
        )
    for model in args.served_models:
        for group in model.server_groups if model.update_weights else ():
            if group.worker_type != "placeholder" and group.size > args.num_gpus_per_node:
                yield (
                    f"{where}: with engines of {group.size} GPUs, which span machines of "
                    f"{args.num_gpus_per_node} (wanted: engines within a machine)"
                )


def _same(first: str, second: str) -> bool:
    return os.path.realpath(first) == os.path.realpath(second)


def missing(args: Namespace) -> Iterator[str]:
    """The directory of versions, if it cannot be written."""
    if not is_url(args.update_weight_disk_dir or ""):
        yield from bad_output(args, "update_weight_disk_dir", is_directory=True)


CONFIG_GROUP = ConfigGroup(
    {"weight sync": WeightSyncConfig},
    derive=release_train.derive,
    notes=notes,
    contradictions=contradictions,
    missing=missing,
)
