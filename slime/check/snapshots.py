"""Whether the file system in memory has room for the snapshots of a run."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from slime.check.needs import RoleNeeds, trained_roles
from slime.config.cluster import snapshots_are_on_hosts
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
    known = roles or trained_roles(config)
    if snapshots_are_on_hosts(flags, config.cluster.actor_num_nodes):
        wanted = bytes_on_a_host(known)
        what = f"a host's parts of two snapshots, {flags.trainer_snapshot_copies} copies beside its own, take"
    else:
        wanted, what = sum(role.snapshot_bytes for role in known), "two snapshots take"
    reason = lacks_room(flags.trainer_snapshot_dir, wanted, what)
    return reason and f"--trainer-snapshot-interval {flags.trainer_snapshot_interval}: {reason}"


def bytes_on_a_host(roles: Sequence[RoleNeeds]) -> int:
    """Bytes of snapshots on the host that has most of them, where each keeps its own part."""
    return sum(role.node.needs.snapshots for role in roles)


def lacks_room(place: str, wanted: int, what: str) -> str | None:
    """Why a directory of this machine cannot hold so many bytes beside what is left to others."""
    found = shutil.disk_usage(place)
    if wanted + FREE * found.total <= found.free:
        return None
    there = f"{found.free / _GIB:.2f} of {found.total / _GIB:.2f} GiB free in {place}"
    return (
        f"{what} {wanted / _GIB:.2f} GiB, and {FREE:.0%} is left to others "
        f"(found: {there}; wanted: another --trainer-snapshot-dir, or checkpoints alone)"
    )
