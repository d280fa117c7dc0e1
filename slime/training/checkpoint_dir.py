"""The directory of a run's checkpoints, and how one becomes the latest.

    <save>/latest_checkpointed_iteration.txt     iteration of the last complete checkpoint
    <save>/iter_0000007/                         written as iter_0000007.tmp, then renamed

The marker is written last and atomically, and only what it names is ever loaded: a save that was killed
half-way is not chosen.
"""

import ctypes
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from slime.training.checkpoint_errors import on_every_rank
from slime.utils.checkpoint_record import Sums, remove_older, write_record

MARKER = "latest_checkpointed_iteration.txt"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_libc = ctypes.CDLL(None)
RELEASE = "release"
"""What a converter writes into the marker, and calls the directory of its weights."""


def iteration_dir(root: str | Path, iteration: int) -> Path:
    return Path(root) / f"iter_{iteration:07d}"


def find_checkpoint(root: str | Path, step: int | None = None) -> tuple[int, Path]:
    """Iteration and directory of a checkpoint: of ``step``, else the one that the marker names.

    What a converter wrote is iteration 0.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: the marker does not hold a number.
    """
    if step is None:
        text = (Path(root) / MARKER).read_text().strip()
        if not text.isdigit() and text != RELEASE:
            raise ValueError(f"{Path(root) / MARKER}: found {text!r}, wanted an iteration number")
        step = None if text == RELEASE else int(text)
    path = Path(root) / RELEASE if step is None else iteration_dir(root, step)
    if not (path / "metadata.json").is_file():
        wanted = RELEASE if step is None else f"iteration {step}"
        raise FileNotFoundError(f"checkpoint {path}: not there or incomplete, wanted {wanted}")
    return step or 0, path


def saved_version(root: str | Path, step: int | None, tag: str) -> Path | None:
    """Returns where a checkpoint of `find_checkpoint` has the weights saved along under ``tag``, if it has
    any.
    """
    path = find_checkpoint(root, step)[1] / tag
    return path if path.is_dir() else None


def on_first_rank(action: Callable[[], None]) -> None:
    """Runs ``action`` on rank 0 while the others wait; if it fails, it fails on all."""
    on_every_rank(action if dist.get_rank() == 0 else lambda: None)


def record(directory: Path, group: dist.ProcessGroup | None = None, known: Sums | None = None) -> None:
    """Collective. Records what the ranks have written; on return all have.

    Args:
        known: checksums of files of this rank that need not be read again.
    """
    on_every_rank(lambda: write_record(directory, dist.get_rank(), dist.get_world_size(), known or {}), group)


def fresh_directory(path: Path, subdirectories: Sequence[str] = ()) -> None:
    """An empty one, with these in it."""
    if path.exists():
        shutil.rmtree(path)
    for directory in (path, *(path / name for name in subdirectories)):
        directory.mkdir(parents=True)


def publish(temporary: Path, final: Path, iteration: int | str, keep: int | None = None) -> None:
    """Makes a finished checkpoint visible, replacing one of the same iteration; the marker names it.

    It may be called again after it failed.

    Args:
        keep: how many checkpoints are kept, this one among them; None for all.
    """
    replaced, marker = final.with_suffix(".replaced"), final.parent / MARKER
    new_marker = _written_marker(marker, iteration)
    if temporary.exists() or not final.exists():
        _put_in_place(temporary, final, replaced)
    new_marker.replace(marker)
    shutil.rmtree(replaced, ignore_errors=True)
    if keep is not None and isinstance(iteration, int):
        remove_older(final.parent, iteration, keep)


def _put_in_place(temporary: Path, final: Path, replaced: Path) -> None:
    """Renames both, or neither: the marker may name the one that is replaced."""
    if final.exists():
        if _exchange(temporary, final):
            # At once: a second call must not exchange them again.
            shutil.rmtree(temporary, ignore_errors=True)
            return
        # A run that was killed in here may have left one, to which nothing can be renamed.
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    try:
        temporary.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise


def _exchange(one: Path, other: Path) -> bool:
    """Gives each the other's name in one step, so that whoever is killed leaves both.

    Returns:
        Whether it was done: some file systems, as NFS, cannot.
    """
    call = getattr(_libc, "renameat2", None)  # glibc has it since 2.28
    here, there = (_AT_FDCWD, os.fsencode(one)), (_AT_FDCWD, os.fsencode(other))
    return call is not None and call(*here, *there, _RENAME_EXCHANGE) == 0


def _written_marker(marker: Path, iteration: int | str) -> Path:
    """The next marker beside the present one: all that needs room is written before anything is renamed."""
    partial = marker.with_suffix(".partial")
    try:
        with partial.open("w") as file:
            file.write(str(iteration))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return partial
