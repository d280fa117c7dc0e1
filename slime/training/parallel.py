"""What a loss needs to know about the parallel layout."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class ParallelContext:
    """Groups and ranks; the defaults describe a single process.

    Attributes:
        tp_group: processes that share the vocabulary; None if this process has all of it.
        dp_group: processes that share the batch; None without torch.distributed. The ranks of a
            context-parallel group see the same samples, so each is in another such group.
        cp_group: processes that share each sequence; None if this process has whole ones.
        contiguous_cp: whether a rank has one stretch of a packed row, not two chunks of each sequence.
        pad_multiple: what each rank has of a packed batch is padded to a multiple of this.
    """

    tp_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None
    tp_rank: int = 0
    dp_rank: int = 0
    dp_size: int = 1
    cp_group: dist.ProcessGroup | None = None
    cp_rank: int = 0
    cp_size: int = 1
    contiguous_cp: bool = False
    is_last_stage: bool = True
    is_main: bool = True
    pad_multiple: int = 1

    @classmethod
    def current(cls) -> "ParallelContext":
        """Returns the context of this trainer process, a single process elsewhere: what a caller means who
        gives none.
        """
        return _of_process.get("context", cls())

    @classmethod
    def of_trainer(cls) -> "ParallelContext | None":
        """Returns the context of this trainer process, None elsewhere."""
        return _of_process.get("context")


_of_process: dict[str, ParallelContext] = {}


def set_current(context: ParallelContext) -> None:
    """Says what `ParallelContext.current` is; a backend does so once it has joined its process groups."""
    _of_process["context"] = context
