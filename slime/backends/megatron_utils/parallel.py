"""What a loss needs to know about the parallel layout."""

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state as mpu


@dataclass(frozen=True)
class ParallelContext:
    """Groups and ranks; the defaults describe a single process.

    Attributes:
        tp_group: processes that share the vocabulary; None if this process has all of it.
        dp_group: processes that share the batch; None without torch.distributed.
        pad_multiple: packed batches are padded to a multiple of this.
    """

    tp_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None
    tp_rank: int = 0
    dp_rank: int = 0
    dp_size: int = 1
    is_last_stage: bool = True
    is_main: bool = True
    pad_multiple: int = 1

    @classmethod
    def default(cls) -> "ParallelContext":
        """`current` in a trainer process, a single process elsewhere: what a caller means who gives none."""
        return cls.current() if mpu.model_parallel_is_initialized() else cls()

    @classmethod
    def current(cls, data_pad_size_multiplier: int = 1) -> "ParallelContext":
        """The context of this rank, after `initialize.init`."""
        tp_size, dp_size = mpu.get_tensor_model_parallel_world_size(), mpu.get_data_parallel_world_size()
        tp_rank, dp_rank = mpu.get_tensor_model_parallel_rank(), mpu.get_data_parallel_rank()
        last = mpu.is_pipeline_last_stage()
        return cls(
            tp_group=mpu.get_tensor_model_parallel_group() if tp_size > 1 else None,
            # Always a group: torch.distributed takes None for all ranks.
            dp_group=mpu.get_data_parallel_group(),
            tp_rank=tp_rank,
            dp_rank=dp_rank,
            dp_size=dp_size,
            is_last_stage=last,
            is_main=last and tp_rank == 0 and dp_rank == 0,
            pad_multiple=tp_size * data_pad_size_multiplier,
        )
