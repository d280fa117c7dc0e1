"""What went wrong with a checkpoint, in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


@contextmanager
def explained(path: str | Path, doing: str, advice: str) -> Iterator[None]:
    """Says which file system or which shard failed, and on which rank.

    torch keeps the failures of all ranks in a ``BaseException`` whose first line holds none of them.

    Args:
        doing: "written" or "read".
        advice: what is wanted.

    Raises:
        CheckpointError: in place of torch's exception and of an OSError.
    """
    try:
        yield
    except CheckpointException as error:
        raise CheckpointError(_line(path, doing, _of_ranks(error), advice)) from error
    except OSError as error:
        raise CheckpointError(_line(path, doing, _words(error), advice)) from error


def other_optimizer(path: str | Path, saved: str, own: str) -> ValueError:
    """Moments of an optimizer that another one cannot go on with.

    Args:
        saved: flags of the optimizer that made them.
        own: flags of this run.
    """
    return ValueError(
        f"checkpoint {path}: its optimizer state was made with {saved}, this run has {own} "
        f"(wanted: {saved}, or --no-load-optim, which begins optimizer and learning-rate schedule anew)"
    )


def _of_ranks(error: CheckpointException) -> str:
    """The first failure. Of a write megatron-core gives it to rank 0 alone, and makes all ranks fail."""
    failures = sorted(error.failures.items(), key=lambda item: item[0])
    found = [f"rank {rank}: {_words(failure)}" for rank, (failure, _) in failures[:1]] or [""]
    if error.args[0] == "write":
        dist.broadcast_object_list(found, src=0)
    return found[0]


def _line(path: str | Path, doing: str, why: str, advice: str) -> str:
    return f"checkpoint {path} could not be {doing}: {why} (wanted: {advice})"


def _words(error: BaseException) -> str:
    text, name = str(error).strip(), type(error).__name__
    if not text:
        return f"{name}, as a file that was cut gives it"
    # What torch's zip writer says where the file system took no more of its bytes.
    cut = ", as on a full disk" if "inline_container" in text and "unexpected pos" in text else ""
    return f"{name}: {text.splitlines()[0]}{cut}"
