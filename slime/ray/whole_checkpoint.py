"""The checkpoint from which ranks that were lost are built again."""

import logging
from pathlib import Path

from slime.arguments.core.run_args import copied
from slime.arguments.validate.checkpoint_files import has_checkpoint, marked_iteration, newest_whole
from slime.config.run import RunConfig, run_config
from slime.ray.snapshot_place import is_on_hosts

logger = logging.getLogger(__name__)


def whole_checkpoint(
    role: str, load: str | Path, verify: str, up_to: int | None
) -> tuple[int | None, list[str]]:
    """Returns the iteration to go on from, None with Hugging Face weights; and what is wrong with newer ones.

    Args:
        verify: how files are looked at, as --verify-checkpoint says.
        up_to: no checkpoint after this iteration. Of snapshots on hosts, which this process does not see,
            the one that was brought there.

    Raises:
        ValueError: there is no checkpoint, or none that is whole.
    """
    if is_on_hosts(load):
        return up_to, []
    if not has_checkpoint(load):
        raise ValueError(f"{role}: no checkpoint in {load} to build the ranks again from")
    step, skipped = newest_whole(load, verify, up_to)
    marked = marked_iteration(load)
    if step is None and marked is not None:
        why = "; ".join(skipped) or f"iteration {marked}, which its marker names, is missing"
        raise ValueError(f"{role}: no whole checkpoint in {load} to build the ranks again from: {why}")
    return step, skipped


def resumed_from_newest(
    config: RunConfig, role: str, load: str | Path, verify: str, up_to: int | None
) -> RunConfig:
    """With which ranks go on from what `whole_checkpoint` finds; says what that leaves out.

    Raises:
        ValueError: there is no checkpoint, or none that is whole.
    """
    step, skipped = whole_checkpoint(role, load, verify, up_to)
    for reason in skipped:
        logger.warning("%s: %s: %s: iteration %s is loaded", role, load, reason, step)
    found = resumed(config, load, None if step == marked_iteration(load) else step)
    if found.checkpoints.no_load_optim and step is not None:
        anew = "optimizer and learning-rate schedule begin anew (--no-save-optim)"
        logger.warning("%s: iteration %d of %s has no optimizer state: %s", role, step, load, anew)
    return found


def resumed(config: RunConfig, load: str | Path, step: int | None) -> RunConfig:
    """With which ranks go on from a checkpoint of their run.

    A run that began with fresh weights says otherwise: its optimizer and noise are in the checkpoint now, but
    for those that flags leave out of it. Snapshots in memory have all.
    """
    memory, saves = config.fault_tolerance.trainer_snapshots, config.checkpoints
    whole = memory is not None and Path(load).is_relative_to(memory)
    without = {"no_load_optim": bool(saves.no_save_optim), "no_load_rng": bool(saves.no_save_rng)}
    state = {"finetune": False, **(dict.fromkeys(without, False) if whole else without)}
    return run_config(copied(config.flat, load=str(load), ckpt_step=step, **state))
