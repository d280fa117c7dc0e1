"""The memory of a host: what ranks really move there and gather, and how nodes add up."""

import pickle
import sys
from types import SimpleNamespace

import pytest

from slime.check import snapshots, snapshots_lack_room
from slime.check.host import _IN_LISTS, _STANDBY, _STORED, RankHost, fullest_node, sample_bytes
from slime.check.layout import Layout
from slime.check.needs import trained_roles
from slime.check.snapshots import bytes_on_a_host
from slime.config.host import HostConfig
from slime.config.run import filled, run_config
from tests.check.harness import checked_args, host_of_trainers, write_config
from tests.megatron_harness import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [{}, {"fp32": True}, {"freeze_params_name_list": ["mlp"]}, {"lora_rank": 8}], ids=str
)
def test_what_ranks_move_to_the_host_is_counted(tmp_path, flags) -> None:
    """Two data-parallel ranks, each of which gathers the state of both for a checkpoint.

    Up to the padding of the parts that ranks have of a buffer.
    """
    save = {"save": tmp_path / "save", "save_interval": 1}
    args = checked_args(write_config("qwen3", tmp_path / "hf"), 2, **save, **flags)
    args.offload_train = True  # as --colocate has it, which wants engines
    (role,) = trained_roles(run_config(args))
    host = role.stages[0].host
    for asleep, gathered, saved in run_ranks(host_of_trainers, 2, args):
        assert asleep == pytest.approx(host.asleep, rel=0.01)
        assert gathered + saved == pytest.approx(host.saving, rel=0.01)
    assert role.node.needs.total == 2 * (host.asleep + host.saving)


@pytest.mark.slow
def test_other_weights_are_counted_with_the_trained_ones(tmp_path) -> None:
    path = write_config("qwen3", tmp_path)
    weights = trained_roles(run_config(checked_args(path)))[0].stages[0].states.weights
    adapted = trained_roles(run_config(checked_args(path, lora_rank=4)))[0].stages[0].states
    assert adapted.kept == 2 * adapted.trained < weights / 4
    for copies, changes in (
        (0, {}),
        (2, {"use_kl_loss": True}),
        (3, {"keep_old_actor": True}),
        (4, {"keep_old_actor": True, "kl_coef": 0.1}),
    ):
        for rank, each in ((0, weights), (4, adapted.kept)):
            args = checked_args(path, lora_rank=rank)
            vars(args).update(changes)
            versions = trained_roles(run_config(args))[0].stages[0].host.versions
            assert versions == copies * each, (changes, rank)


@pytest.mark.slow
def test_standbys_are_counted_for_each_rank(tmp_path) -> None:
    args = checked_args(write_config("qwen3", tmp_path), 2)
    args.trainer_standbys = 3
    (role,) = trained_roles(run_config(args))
    assert role.node.needs.standbys == role.node.needs.total == 2 * 3 * _STANDBY


@pytest.mark.slow
def test_two_snapshots_of_the_whole_state_are_counted(tmp_path, monkeypatch) -> None:
    """Of all ranks together as much as each gathers for a checkpoint, whatever that leaves out."""
    flags = {"use_fault_tolerance": True, "trainer_snapshot_interval": 1, "no_save_optim": True}
    flags["trainer_snapshot_dir"] = tmp_path
    config = run_config(checked_args(write_config("qwen3", tmp_path / "hf"), 2, **flags))
    roles = trained_roles(config)
    host = roles[0].stages[0].host
    assert roles[0].snapshot_bytes == pytest.approx(2 * host.saving, rel=0.01) and host.saving
    free = roles[0].snapshot_bytes + 1000
    monkeypatch.setattr(snapshots.shutil, "disk_usage", lambda path: SimpleNamespace(total=20_000, free=free))
    assert snapshots_lack_room(config) is None
    free -= 1
    assert "two snapshots take 0.00 GiB, and 5% is left to others" in (snapshots_lack_room(config) or "")


@pytest.mark.slow
def test_of_snapshots_on_several_hosts_copies_are_counted_and_the_whole_that_ranks_load(tmp_path) -> None:
    flags = {"use_fault_tolerance": True, "trainer_snapshot_interval": 1}
    path = write_config("qwen3", tmp_path)

    def host(nodes: int, **more: object) -> int:
        args = checked_args(path, nodes, **flags)
        vars(args).update(more, actor_num_nodes=nodes, actor_num_gpus_per_node=1)
        (role,) = trained_roles(run_config(args))
        assert role.node.needs.snapshots == bytes_on_a_host([role])
        return role.stages[0].host.snapshots // role.stages[0].states.stored

    assert [host(2, trainer_snapshot_copies=copies) for copies in (0, 1)] == [2, 4]
    assert [host(8, trainer_snapshot_copies=copies) for copies in (0, 1)] == [8, 8]
    assert host(8, trainer_snapshot_copies=0, trainer_snapshot_dir=str(tmp_path)) == 2


@pytest.mark.slow
def test_of_adapters_alone_fsdp_saves_what_it_trains(tmp_path) -> None:
    flags = {"train_backend": "fsdp", "save": tmp_path / "save", "save_interval": 1}
    path = write_config("qwen3", tmp_path / "hf")
    whole, adapted = (
        trained_roles(run_config(checked_args(path, 2, lora_rank=rank, **flags)))[0].stages[0]
        for rank in (0, 4)
    )
    assert whole.host.saving == whole.states.weights + whole.states.optimizer
    assert adapted.host.saving == 3 * adapted.states.gradients < whole.host.saving / 4


def test_the_fullest_node_is_found_where_a_node_has_parts_of_two_stages() -> None:
    layout = Layout(6, 1, 2, 1, 3, 1, 1, 3, ((range(2),), (range(2, 4),)))
    node = fullest_node(layout, 4, [RankHost(asleep=10), RankHost(asleep=1, saving=5)])
    assert (node.ranks, node.needs) == (range(4), RankHost(asleep=31, saving=5))
    node = fullest_node(layout, 2, [RankHost(asleep=1), RankHost(asleep=10)])
    assert (node.ranks, node.needs.total) == (range(4, 6), 20)


def test_a_token_takes_as_much_as_is_counted() -> None:
    tokens, log_probs, mask = [100_000 + i for i in range(1000)], [-0.1 * i for i in range(1000)], [1] * 1000
    lists = sum(map(sys.getsizeof, (tokens, log_probs, mask, *tokens, *log_probs)))
    assert lists / 1000 == pytest.approx(_IN_LISTS, rel=0.1)
    assert len(pickle.dumps([tokens, log_probs, mask])) / 1000 == pytest.approx(_STORED, rel=0.1)


def test_samples_are_counted_with_their_store(tmp_path) -> None:
    config = filled(HostConfig, checked_args(write_config("qwen3", tmp_path), n_samples_per_prompt=2))
    assert sample_bytes(config, longest=100) == 8 * 2 * 100 * (_IN_LISTS + _STORED)
