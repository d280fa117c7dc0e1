"""Holders of snapshots on a cluster of several raylets of this machine, each with a directory of its own."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.ray import snapshot_holders
from slime.ray.host_snapshots import OnHosts
from slime.ray.placement_group import create_placement_groups
from slime.ray.snapshot_place import label_on_host, place_on_hosts
from slime.utils.checkpoint_record import write_record
from tests.ray.nodes import joined_nodes, lose_node
from tests.run_args import config_with

pytestmark = pytest.mark.cluster


class Ranks:
    """One on each node, which writes there what is of the size of a chunk and more."""

    def __init__(self, directory: Path, slots: Any) -> None:
        self._directory, self.processes = directory, SimpleNamespace(nodes=slots.nodes_now)

    def place(self, node: str) -> Path:
        (found,) = self._directory.glob(f"slime_snapshots_*_{label_on_host('1a', node)}*/actor")
        return found

    def try_to_save(self, rollout_id: int, force_sync: bool, memory: str) -> list[str | None]:
        for rank, node in enumerate(self.processes.nodes()):
            temporary = self.place(node) / f"iter_{rollout_id:07d}.tmp"
            (temporary / f"__{rank}_0.distcp").write_bytes(os.urandom((1 << 24) + 5))
            write_record(temporary, rank, 2)
        return [None]


def test_what_a_lost_node_kept_comes_from_the_other_one_to_the_node_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_holders, "_bytes_of_a_host", lambda config: 0)
    monkeypatch.setattr(snapshot_holders, "_AT_ONCE", 1)  # each copies from the other, and answers it
    given = dict(use_fault_tolerance=True, trainer_snapshot_interval=1, trainer_snapshot_copies=1)
    given |= dict(trainer_snapshot_dir=str(tmp_path), trainer_snapshots=place_on_hosts(tmp_path, "1a"))
    given |= dict(actor_num_nodes=2, actor_num_gpus_per_node=1, rollout_num_gpus=0, debug_train_only=True)
    config = config_with(**given, cluster_timeout=300, verify_checkpoint="checksums")
    node = {"num_cpus": 1, "num_gpus": 1}
    with joined_nodes({"num_cpus": 2, "num_gpus": 0}, node, node, node) as cluster:
        ranks: Any = Ranks(tmp_path, create_placement_groups(config).actor)
        snapshots = OnHosts(config, {ranks: "actor"})
        assert snapshots.make_room() is None
        assert snapshots.write(ranks, 7) == []
        first, second = ranks.processes.nodes()
        assert snapshots._holders.done(snapshots._copying["actor", 7], 300)
        lose_node(cluster, first)
        assert snapshots.newest({7}) == 7
        snapshots.bring(7)
        now = ranks.processes.nodes()
        assert first not in now and second in now
        for place in map(ranks.place, now):
            names = {path.name for path in (place / "iter_0000007").iterdir()}
            assert names == {
                name.format(rank) for rank in (0, 1) for name in ("__{}_0.distcp", "record_0000{}.json")
            }
            assert (place / "latest_checkpointed_iteration.txt").read_text() == "7"
        snapshots.go_back(7)
        assert snapshots.make_room() is None and snapshots.write(ranks, 8) == []
