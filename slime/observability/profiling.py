"""``--use-pytorch-profiler``: what a trainer rank does with a rollout, as a Chrome trace with its calls."""

import errno
import gzip
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from slime.config.profiling import ProfilingConfig, Target


@contextmanager
def profiled(config: ProfilingConfig, target: Target, rollout_id: int, role: str = "") -> Iterator[None]:
    """Profiles the body and writes the trace, if flags ask for this target, rollout and rank.

    Args:
        role: prefix of the trained model's names.

    Raises:
        OSError: the trace cannot be written; the error names its file.
    """
    if not _asked_for(config, target, rollout_id):
        yield
        return
    with torch.profiler.profile(
        record_shapes=True, profile_memory=True, with_stack=True, with_flops=True
    ) as profiler:
        yield
    name = f"{role}{target}_rank_{dist.get_rank()}.{rollout_id}.pt.trace.json.gz"
    _write(profiler, Path(str(config.tensorboard_dir)) / name)


def _asked_for(config: ProfilingConfig, target: Target, rollout_id: int) -> bool:
    return (
        config.use_pytorch_profiler
        and target in config.profile_target
        and config.profile_step_start <= rollout_id < config.profile_step_end
        and (config.profile_ranks is None or dist.get_rank() in config.profile_ranks)
    )


def _write(profiler: torch.profiler.profile, path: Path) -> None:
    """Compresses what torch writes: it does so itself, but in a directory for temporary files, and without
    telling what it could not write.
    """
    plain = path.with_suffix("")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(plain))
        _require_whole(plain)
        with plain.open("rb") as trace, gzip.open(path, "wb", compresslevel=5) as packed:
            shutil.copyfileobj(trace, packed)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        plain.unlink(missing_ok=True)


def _require_whole(trace: Path) -> None:
    """Raises OSError if the object in the file is cut off."""
    with trace.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(file.tell() - 16, 0))
        if not file.read().rstrip().endswith(b"}"):
            raise OSError(errno.EIO, "the profile could not be written as a whole")
