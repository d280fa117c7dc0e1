"""The checkpoint from which ranks that were lost are built again."""

from pathlib import Path

from slime.arguments.core.run_args import copied
from slime.arguments.validate.checkpoint_files import has_checkpoint, marked_iteration, newest_whole
from slime.config.run import RunConfig, run_config


def whole_checkpoint(
    role: str, load: str | Path, verify: str, up_to: int | None
) -> tuple[int | None, list[str]]:
    """Returns the iteration to go on from, None with Hugging Face weights; and what is wrong with newer ones.

    Args:
        verify: how files are looked at, as --verify-checkpoint says.
        up_to: no checkpoint after this iteration.

    Raises:
        ValueError: there is no checkpoint, or none that is whole.
    """
    if not has_checkpoint(load):
        raise ValueError(f"{role}: no checkpoint in {load} to build the ranks again from")
    step, skipped = newest_whole(load, verify, up_to)
    marked = marked_iteration(load)
    if step is None and marked is not None:
        why = "; ".join(skipped) or f"iteration {marked}, which its marker names, is missing"
        raise ValueError(f"{role}: no whole checkpoint in {load} to build the ranks again from: {why}")
    return step, skipped


def resumed(config: RunConfig, load: str | Path, step: int | None) -> RunConfig:
    """With which ranks go on from a checkpoint of their run.

    A run that began with fresh weights says otherwise: its optimizer and noise are in the checkpoint now.
    """
    without = config.weight_sync.release_train and bool(config.checkpoints.no_save_optim)
    state = {"finetune": False, "no_load_optim": without, "no_load_rng": False}
    return run_config(copied(config.flat, load=str(load), ckpt_step=step, **state))
