"""The directory of a run's snapshots: one that all see, or one of each host's own.

    /dev/shm/slime_snapshots_9f3a17c2_4711_x3k/actor             of the driver
    /dev/shm/slime_snapshots_*_1b2c3d4e_{node}_*/actor           of the holder on each node

The second one is a pattern, in which each process puts Ray's id of its node.
"""

import os
from pathlib import Path

from slime.arguments.core.run_args import copied
from slime.config.run import RunConfig, run_config

PREFIX = "slime_snapshots_"
_NODE = "{node}"


def place_on_hosts(parent: Path, run: str) -> str:
    """The pattern of the directories of a run's holders.

    Args:
        run: what tells it from other runs.
    """
    return str(parent / f"{PREFIX}*_{label_on_host(run, _NODE)}*")


def label_on_host(run: str, node: str) -> str:
    """What the name of the directory of a node's holder says beside the prefix."""
    return f"{run}_{node}_"


def run_of(place: str) -> str:
    """What `place_on_hosts` was given."""
    return Path(place).name.split("_")[-3]


def is_on_hosts(place: str | Path | None) -> bool:
    return _NODE in str(place)


def on_this_host(place: str) -> str:
    """The directory that a place is for a process on this node.

    Raises:
        FileNotFoundError: no holder has made one on this node.
    """
    if not is_on_hosts(place):
        return place
    import ray

    pattern, _, name = place.replace(_NODE, ray.get_runtime_context().get_node_id()).rpartition("/")
    found = [path for path in Path(pattern).parent.glob(Path(pattern).name) if path.suffix != ".new"]
    if not found:
        raise FileNotFoundError(f"{pattern}: no holder of snapshots has made it on {os.uname().nodename}")
    return str(max(found, key=lambda path: path.stat().st_ctime) / name)


def loading_on_this_host(config: RunConfig) -> RunConfig:
    """The configuration of a rank that starts here, perhaps from a snapshot of its host."""
    load = config.checkpoints.load
    if load is None or not is_on_hosts(load):
        return config
    return run_config(copied(config.flat, load=on_this_host(load)))


def require_snapshots_seen(directory: str | None, rank: int) -> None:
    """Refuses a rank that would write its part where neither the driver nor other ranks see it.

    Raises:
        RuntimeError: the driver's directory is not there.
    """
    if directory is not None and not is_on_hosts(directory) and not Path(directory).is_dir():
        raise RuntimeError(
            f"--trainer-snapshot-interval: rank {rank}, on {os.uname().nodename}, does not see {directory}, "
            "which the driver has made (wanted: a --trainer-snapshot-dir that driver and trainer share)"
        )
