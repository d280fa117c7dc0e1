"""The checkpoint from which ranks that were lost are built again."""

from pathlib import Path

from slime.arguments.validate.checkpoint_files import has_checkpoint, marked_iteration, newest_whole


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
