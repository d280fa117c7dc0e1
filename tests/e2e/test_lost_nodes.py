"""A node that is lost with ranks of the trainer, on a cluster of several raylets of this machine."""

import pytest

from slime.chaos.twins import differences
from tests.ray.nodes import joined_nodes, lose_node, node_with

# Two minutes; tests/ray/test_snapshot_holders.py loses a node in half of one.
pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


def test_a_node_that_is_lost_with_its_memory_costs_the_step_under_way(
    start, start_alone, gate, rl_flags, tmp_path
) -> None:
    """Ranks go on from the copy of its part on the other node, without checkpoints; a third one replaces it.

    Each node of the trainer has one GPU and one CPU, which its rank takes: no other part of the run is there.
    """
    flags = [*rl_flags, "--num-rollout", 4, "--rollout-shuffle", "--actor-num-nodes", 2]
    own = ["--custom-rm-path", "tests.e2e.plugins.waiting_reward", "--use-fault-tolerance"]
    own += ["--trainer-snapshot-interval", 1, "--trainer-snapshot-copies", 1]
    own += ["--trainer-snapshot-dir", tmp_path / "memory"]
    under_way = gate(2 * 16)
    node = {"num_cpus": 1, "num_gpus": 1}
    with joined_nodes({"num_cpus": 4, "num_gpus": 0}, *[node] * 4) as cluster:
        run = start_alone([*flags, *own], address=cluster.address)
        records = "slime_snapshots_*/actor/iter_0000001/record_0000[01].json"
        run.wait_for(lambda: len([*(tmp_path / "memory").glob(records)]) == 4, "copies of the second step")
        lose_node(cluster, node_with(cluster, "ray::TrainRayActor"))
        under_way.touch()
        run.expect_success()
    assert run.output.count("is started again from iteration 1, a snapshot in the memory of its hosts") == 1
    assert run.output.count(" has the part of rank(s) 0, 1 from the memory of ") == 1  # the new node
    twin = start(flags).expect_success()
    for axis in ("rollout", "train"):
        ours, theirs = run.rows(axis), twin.rows(axis)
        assert list(ours) == list(theirs) == list(range(4))
        # Weights that are sent again have a number of their own.
        assert not [line for line in differences({axis: ours}, {axis: theirs}) if "/staleness/" not in line]
