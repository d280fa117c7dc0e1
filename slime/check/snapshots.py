"""Whether the file system in memory has room for the snapshots of a run."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from slime.check.needs import RoleNeeds, trained_roles
from slime.config.limits import FREE
from slime.config.memory import MemoryConfig

_GIB = 2**30


def snapshots_lack_room(config: MemoryConfig, roles: Sequence[RoleNeeds] | None = None) -> str | None:
    """Why the directory of this machine cannot hold them; None where it is not there, or none are taken.

    Args:
        roles: if they are known.
    """
    flags = config.fault_tolerance
    if flags.trainer_snapshot_interval is None or not Path(flags.trainer_snapshot_dir).is_dir():
        return None
    wanted = sum(role.snapshot_bytes for role in (roles or trained_roles(config)))
    found = shutil.disk_usage(flags.trainer_snapshot_dir)
    if wanted + FREE * found.total <= found.free:
        return None
    place, interval = flags.trainer_snapshot_dir, flags.trainer_snapshot_interval
    there = f"{found.free / _GIB:.2f} of {found.total / _GIB:.2f} GiB free in {place}"
    return (
        f"--trainer-snapshot-interval {interval}: two snapshots take {wanted / _GIB:.2f} GiB, and {FREE:.0%} "
        f"is left to others (found: {there}; wanted: another --trainer-snapshot-dir, or checkpoints alone)"
    )
