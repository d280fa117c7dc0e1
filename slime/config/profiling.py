"""Profiles of the trainer, and the history of its memory."""

from dataclasses import dataclass
from typing import Literal

from slime.config.flag import flag, refused

Target = Literal["train_overall", "train_actor", "train_log_probs"]
_PROFILER, _HISTORY = "--use-pytorch-profiler", "--record-memory-history"


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig:
    """Profiles of the trainer by torch, and the history of a GPU's memory.

    Attributes:
        tensorboard_dir: never None with ``use_pytorch_profiler``, once the values of the group are complete.
    """

    use_pytorch_profiler: bool = flag(False, help="profile the trainer with torch's profiler")
    profile_target: list[Target] = flag(
        ["train_overall"],
        idle_without=_PROFILER,
        help="all that a rank does with a rollout; or its optimizer steps, its forward passes before them",
    )
    profile_step_start: int = flag(10, at_least=0, idle_without=_PROFILER, help="first rollout to profile")
    profile_step_end: int = flag(12, above=0, idle_without=_PROFILER, help="first one that is not, after it")
    profile_ranks: list[int] | None = flag(
        at_least=0, idle_without=_PROFILER, help="trainer ranks to profile; default all"
    )
    tensorboard_dir: str | None = flag(
        place=True, help="directory of profiles; default profile in --run-dir or --save, else in outputs/"
    )
    record_memory_history: bool = flag(False, help="keep where what lies on a trainer's GPU was allocated")
    memory_snapshot_num_steps: int | None = flag(
        at_least=0,
        idle_without=_HISTORY,
        help="rollouts after which a snapshot is written and the record ends; 0, the default: never",
    )
    memory_snapshot_dir: str = flag(".", place=True, idle_without=_HISTORY, help="directory of snapshots")
    memory_snapshot_path: str = flag(
        "snapshot.pickle", idle_without=_HISTORY, help="end of a snapshot's file name"
    )
    memory_recorder: Literal["torch", "memray"] = refused(
        "torch", help="what records memory", wanted="torch, which knows what lies on a GPU"
    )
