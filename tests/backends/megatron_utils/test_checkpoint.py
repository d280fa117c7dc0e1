"""Resuming equals never having stopped, in the same or another layout; half a checkpoint is never chosen."""

import os
import random
import signal
from pathlib import Path

import psutil
import pytest
import torch
from megatron.core import dist_checkpointing

from slime.arguments.core.run_args import copied
from slime.backends.megatron_utils import checkpoint as checkpoint_module
from slime.backends.megatron_utils.checkpoint import is_megatron_checkpoint
from slime.backends.megatron_utils.hf_weights import HfWeights
from slime.ray.train_worker import TrainWorker
from slime.training.checkpoint_dir import MARKER, find_checkpoint, iteration_dir, publish
from slime.utils.checkpoint_record import damage
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split, trainer_args, unrecorded

pytestmark = pytest.mark.slow

TP2 = {"tensor_model_parallel_size": 2}
FLAGS = {"num_rollout": 4, "lr_decay_style": "linear", "force_sync": True, "use_rollout_logprobs": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
# Buckets that are padded differently for other numbers of ranks.
BUCKETS = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20_000}

# Of some layers, beside a reference that moves.
ADAPTERS = {
    **{"lora_rank": 4, "lora_exclude_modules": [r".*layers\.1\..*"], "lora_dropout": 0.1},
    **{"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 3},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


def _weights(args, worker):
    buckets = HfWeights(args, worker.backend.state.model).buckets(1 << 30)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}


def _run(rank, args, rollouts, save_after):
    """Trains on ``rollouts`` ({id: batch}) from where ``args.load`` says; saves after one of them."""
    worker = TrainWorker(args)
    start = worker.start()
    steps = []
    for rollout_id in range(start, max(rollouts) + 1):
        report = worker.train_shard(rollout_id, split(args, rollouts[rollout_id], worker.parallel_config()))[
            0
        ]
        steps += report.get("train", [])
        if rollout_id == save_after:
            worker._weight_version = 5
            worker.save_model(rollout_id, args.force_sync, trained_steps=9)
    worker.backend._writers.checkpoints.finish()
    return {
        "left_running": len(psutil.Process().children()),
        "start": start,
        "steps": steps,
        "weights": _weights(args, worker),
        "version": worker._weight_version,
        "trained_steps": worker.trained_steps(),
    }


def _one(results, key):
    return next(result[key] for result in results if result[key])


@pytest.fixture(scope="module")
def rollouts():
    return {i: random_rollout(vocab_size=256, seed=i) for i in range(4)}


@pytest.mark.parametrize(
    ("world_size", "extra"),
    [
        (1, {}),
        (2, {}),
        (1, {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 3}),
        (1, {"async_save": True, "force_sync": False}),
        (2, {"optimizer": "sgd", "sgd_momentum": 0.9, "lr": 0.1}),
        (1, {"use_stateless_adam": True}),
        (2, {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp32"}),
        (2, CP2),
        (2, VPP2),
        (2, BUCKETS),
        (2, {"freeze_params_name_list": [r"layers\.[01]\."]}),
        (2, ADAPTERS),
    ],
    ids=[
        *("1 process", "DP 2", "moving reference", "async save", "SGD", "stateless Adam", "bfloat16 moments"),
        *("CP 2", "VPP 2", "DP 2, several buckets", "frozen layers", "adapters"),
    ],
)
def test_resume_is_bit_exact(checkpoint, rollouts, tmp_path, world_size, extra):
    args = trainer_args(checkpoint, save=str(tmp_path), load=str(tmp_path), **{**FLAGS, **extra})
    through = run_ranks(_run, world_size, args, rollouts, 1)
    assert (tmp_path / MARKER).read_text() == "1"
    assert not unrecorded(iteration_dir(tmp_path, 1))
    assert not list(damage(iteration_dir(tmp_path, 1), checksums=True))
    resumed = run_ranks(_run, world_size, args, rollouts, -1)
    assert [result["start"] for result in resumed] == [2] * world_size
    assert _one(resumed, "steps") == _one(through, "steps")[2:]
    for before, after in zip(through, resumed, strict=True):
        assert before["left_running"] == 0
        assert after["version"] == 5
        assert (before["trained_steps"], after["trained_steps"]) == (None, 9)
        if not extra:
            assert after["steps"] == before["steps"][2:]
        for name, weight in before["weights"].items():
            assert torch.equal(weight, after["weights"][name]), name


def test_a_run_resumes_while_float16_still_looks_for_its_loss_scale(checkpoint, rollouts, tmp_path):
    # Halved when gradients overflow, which they do in the first two rollouts and not in the others.
    scale = dict(initial_loss_scale=2.0**24, min_loss_scale=1.0, loss_scale_window=1000, hysteresis=1)
    flags = dict(params_dtype=torch.float16, fp16=True, loss_scale=None, **scale, **FLAGS)
    args = trainer_args(checkpoint, save=str(tmp_path), load=str(tmp_path), **flags)
    (through,) = run_ranks(_run, 1, args, rollouts, 1)
    (resumed,) = run_ranks(_run, 1, args, rollouts, -1)
    assert [step["train/skipped"] for step in through["steps"]] == [1, 1, 0, 0]
    assert resumed["start"] == 2 and resumed["steps"] == through["steps"][2:]
    for name, weight in through["weights"].items():
        assert torch.equal(weight, resumed["weights"][name]), name


def _random_state(rank, args, rollout=None):
    """The next random numbers, after a save if there is a rollout to train on before it."""
    worker = TrainWorker(args)
    worker.start()
    if rollout is not None:
        worker.train_shard(0, split(args, rollout, worker.parallel_config()))[0]
        worker.save_model(0)
    return {"drawn": [random.random(), torch.rand(()).item()]}


def test_random_state_goes_on(checkpoint, rollouts, tmp_path):
    args = trainer_args(checkpoint, save=str(tmp_path), load=str(tmp_path))
    (before,) = run_ranks(_random_state, 1, args, rollouts[0])
    (after,) = run_ranks(_random_state, 1, trainer_args(checkpoint, load=str(tmp_path), seed=99))
    assert after == before


@pytest.fixture(scope="module")
def written_at_tp_2(checkpoint, rollouts, tmp_path_factory):
    """Where the second of four rollouts was saved, what all four reported, and the last weights."""
    root = str(tmp_path_factory.mktemp("tp2"))
    results = run_ranks(_run, 2, trainer_args(checkpoint, save=root, load=root, **FLAGS, **TP2), rollouts, 1)
    return root, _one(results, "steps")[2:], results[0]["weights"]


LAYOUTS = [(1, {}), (2, {}), (2, PP2), (2, VPP2), (2, CP2), (4, {**TP2, **PP2})]


def test_what_several_buckets_held_goes_on_in_one(checkpoint, rollouts, tmp_path):
    args = trainer_args(checkpoint, save=str(tmp_path), load=str(tmp_path), **FLAGS)
    run_ranks(_run, 2, copied(args, **BUCKETS), {i: rollouts[i] for i in range(2)}, 1)
    (through,) = run_ranks(_run, 1, trainer_args(checkpoint, **FLAGS), rollouts, -1)
    (resumed,) = run_ranks(_run, 1, args, rollouts, -1)
    for before, after in zip(through["steps"][2:], resumed["steps"], strict=True):
        assert after == pytest.approx(before, rel=1e-4, abs=1e-6)
    for name, weight in through["weights"].items():
        torch.testing.assert_close(resumed["weights"][name], weight, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=str)
def test_what_tp_2_wrote_goes_on_in_another_layout(checkpoint, rollouts, written_at_tp_2, world_size, layout):
    root, steps, weights = written_at_tp_2
    args = trainer_args(checkpoint, load=root, **FLAGS, **layout)
    resumed = run_ranks(_run, world_size, args, rollouts, -1)
    for before, after in zip(steps, _one(resumed, "steps"), strict=True):
        assert after == pytest.approx(before, rel=1e-4, abs=1e-6)
        assert after["train/loss"] == pytest.approx(before["train/loss"], rel=1e-5, abs=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(resumed[0]["weights"][name], weight, rtol=0, atol=1e-4)


def test_adapters_that_tp_2_wrote_go_on_in_a_pipeline_and_not_as_others(checkpoint, rollouts, tmp_path):
    flags = {**FLAGS, "save": str(tmp_path), "load": str(tmp_path), **ADAPTERS, "lora_dropout": 0.0}
    args = trainer_args(checkpoint, **flags, **TP2, sequence_parallel=True)
    through = run_ranks(_run, 2, args, rollouts, 1)
    resumed = run_ranks(_run, 2, trainer_args(checkpoint, **flags, **PP2), rollouts, -1)
    for before, after in zip(_one(through, "steps")[2:], _one(resumed, "steps"), strict=True):
        assert after == pytest.approx(before, rel=1e-4, abs=1e-6)
    for name, weight in through[0]["weights"].items():
        torch.testing.assert_close(resumed[0]["weights"][name], weight, rtol=0, atol=1e-4)
    saved = find_checkpoint(tmp_path)[1]
    names = dist_checkpointing.load_tensors_metadata(str(saved))
    assert names and all(".adapters." in name for name in names)
    # A model and its moments have 2.1 MB.
    assert sum(file.stat().st_size for file in saved.rglob("*")) < 1_000_000
    as_base = {"load": None, "ref_load": str(tmp_path)}, "holds adapters alone (wanted: one of all weights)"
    for changes, message in (*REFUSED_ADAPTERS, as_base):
        (answer,) = run_ranks(_start, 1, trainer_args(checkpoint, **{**flags, **changes}))
        assert message in str(answer)


REFUSED_ADAPTERS = (
    ({"lora_rank": 8}, "was made with --lora-rank 4 (wanted: it, not 8)"),
    ({"lora_rank": 0}, "holds adapters alone (wanted: --lora-rank 4)"),
)


def _save_then_die(rank, args, rollout):
    """Saves iteration 0 and is killed when iteration 1 is written but not published."""
    worker = TrainWorker(args)
    worker.start()
    worker.train_shard(0, split(args, rollout, worker.parallel_config()))[0]
    worker.save_model(0)
    checkpoint_module.publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    worker.save_model(1)
    return {}


def test_a_save_killed_half_way_is_not_chosen(checkpoint, rollouts, tmp_path):
    args = trainer_args(checkpoint, save=str(tmp_path), load=str(tmp_path), **FLAGS)
    with pytest.raises(RuntimeError, match="died"):
        run_ranks(_save_then_die, 1, args, rollouts[0])
    assert (tmp_path / "iter_0000001.tmp").is_dir()
    assert find_checkpoint(tmp_path) == (0, iteration_dir(tmp_path, 0))
    (result,) = run_ranks(_run, 1, args, rollouts, -1)
    assert result["start"] == 1


def test_a_directory_without_marker_is_no_checkpoint(tmp_path):
    iteration_dir(tmp_path, 3).mkdir()
    assert not is_megatron_checkpoint(tmp_path)


def test_a_marker_that_names_nothing_is_an_error(tmp_path):
    (tmp_path / MARKER).write_text("3")
    with pytest.raises(FileNotFoundError, match="iter_0000003"):
        find_checkpoint(tmp_path)


def test_publishing_replaces_a_checkpoint_of_the_same_iteration(tmp_path):
    for content in ("old", "new"):
        temporary = tmp_path / "iter_0000002.tmp"
        temporary.mkdir()
        (temporary / "metadata.json").write_text(content)
        publish(temporary, iteration_dir(tmp_path, 2), 2)
    assert (find_checkpoint(tmp_path)[1] / "metadata.json").read_text() == "new"
    assert sorted(path.name for path in Path(tmp_path).iterdir()) == ["iter_0000002", MARKER]


def _start(rank, args):
    worker = TrainWorker(args)
    try:
        return worker.start()
    except ValueError as error:
        return str(error)


def test_a_run_can_be_extended_if_its_learning_rate_is_constant(checkpoint, rollouts, tmp_path):
    flags = {**FLAGS, "save": str(tmp_path), "load": str(tmp_path)}
    constant = trainer_args(checkpoint, **{**flags, "lr_decay_style": "constant", "num_rollout": 4})
    run_ranks(_run, 1, constant, rollouts, 1)
    constant.num_rollout = 8
    assert run_ranks(_start, 1, constant) == [2]
    decaying = trainer_args(checkpoint, **{**flags, "lr_decay_style": "linear", "num_rollout": 8})
    (answer,) = run_ranks(_start, 1, decaying)
    assert "--override-opt-param-scheduler" in str(answer)


SGD = {"optimizer": "sgd", "sgd_momentum": 0.9}
STATELESS = {"use_stateless_adam": True}


@pytest.mark.parametrize(
    ("wrote", "resumes", "wanted"),
    [
        (SGD, {}, "--optimizer sgd"),
        ({}, STATELESS, "--optimizer adam without --use-stateless-adam"),
    ],
)
def test_moments_of_another_optimizer_are_refused(checkpoint, rollouts, tmp_path, wrote, resumes, wanted):
    flags = {**FLAGS, "save": str(tmp_path), "load": str(tmp_path)}
    run_ranks(_run, 1, trainer_args(checkpoint, **flags, **wrote), {0: rollouts[0]}, 0)
    args = trainer_args(checkpoint, **flags, **resumes)
    (answer,) = run_ranks(_start, 1, args)
    assert f"(wanted: {wanted}, or --no-load-optim" in str(answer)
    args.no_load_optim = True
    assert run_ranks(_start, 1, args) == [1]


def _groups_after_resume(rank, args):
    """Rate, bounds and decay of each parameter group before the first step."""
    worker = TrainWorker(args)
    worker.start()
    keys = ("lr", "max_lr", "min_lr", "betas", "eps", "weight_decay")
    return [{key: group[key] for key in keys} for group in worker.backend.state.optimizer.param_groups]


def test_hyperparameters_are_those_of_the_flags_unless_the_checkpoint_is_to_decide(
    checkpoint, rollouts, tmp_path
):
    flags = {**FLAGS, "save": str(tmp_path), "load": str(tmp_path), "lr_decay_style": "constant"}
    changed = {"lr": 2e-3, "min_lr": 1e-5, "adam_beta2": 0.9, "adam_eps": 1e-6, "weight_decay": 0.2}
    run_ranks(_run, 1, trainer_args(checkpoint, **flags), {0: rollouts[0]}, 0)
    expected = {
        **{"lr": 2e-3, "max_lr": 2e-3, "min_lr": 1e-5, "betas": (0.9, 0.9), "eps": 1e-6},
        **{"weight_decay": 0.2},
    }
    (found,) = run_ranks(_groups_after_resume, 1, trainer_args(checkpoint, **{**flags, **changed}))
    assert expected in found and all(group["max_lr"] == group["lr"] == 2e-3 for group in found)
    flags["use_checkpoint_opt_param_scheduler"] = True
    (found,) = run_ranks(_groups_after_resume, 1, trainer_args(checkpoint, **{**flags, **changed}))
    expected = {
        **{"lr": 1e-3, "max_lr": 1e-3, "min_lr": 0.0, "betas": (0.9, 0.98), "eps": 1e-8},
        **{"weight_decay": 0.1},
    }
    assert expected in found and all(group["max_lr"] == group["lr"] == 1e-3 for group in found)
