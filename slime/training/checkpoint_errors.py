"""What went wrong with a checkpoint, in one line."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from slime.utils.plain_file import ZIP_WRITER, is_write_error


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read.

    Attributes:
        everywhere: every rank raises it, so that all can go on together.
    """

    everywhere = False


class RankWriteError(OSError):
    """A rank could not write its part; raised on every rank."""


def on_every_rank(action: Callable[[], None], group: dist.ProcessGroup | None = None) -> None:
    """Collective. Runs ``action``; if it fails on one rank it fails on all, and none waits for another.

    Raises:
        RankWriteError: a rank could not write; it is named. Anything else is raised as it is on the rank that
            failed, as a RuntimeError on the others.
    """
    failure: Exception | None = None
    try:
        action()
    except Exception as error:
        failure = error
    of_ranks: list[tuple[bool, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, failure and _told(failure), group=group)
    failed = sorted(told for told in of_ranks if told is not None)
    if not failed:
        return
    is_write, reason = failed[0]
    if is_write:
        raise RankWriteError(reason) from failure
    raise failure or RuntimeError(reason)


def _told(failure: Exception) -> tuple[bool, str]:
    return is_write_error(failure), f"rank {dist.get_rank()}: {_words(failure)}"


def raise_first(failures: Sequence[Exception]) -> None:
    """Raises the first of the failures, if there are any."""
    if failures:
        raise failures[0]


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
        told = CheckpointError(_line(path, doing, _of_ranks(error), advice))
        told.everywhere = error.args[0] == "write"
        raise told from error
    except OSError as error:
        told = CheckpointError(_line(path, doing, _words(error), advice))
        told.everywhere = isinstance(error, RankWriteError)
        raise told from error


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
    if isinstance(error, RankWriteError):
        return text
    if not text:
        return f"{name}, as a file that was cut gives it"
    # What torch's zip writer says where the file system took no more of its bytes.
    cut = ", as on a full disk" if ZIP_WRITER in text and "unexpected pos" in text else ""
    return f"{name}: {text.splitlines()[0]}{cut}"
