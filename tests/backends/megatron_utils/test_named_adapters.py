"""Several adapters on one base: each trains as it would alone, and goes on from a checkpoint."""

import pytest
import torch
from safetensors.torch import load_file

from slime.ray.train_worker import TrainWorker
from slime.training.weights import ADAPTER
from tests.backends.lora_reference import ALPHA, KL, RANK, expect_close, tensors_of
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split, trainer_args

pytestmark = pytest.mark.slow

NAMES = ["sums", "words"]
OF_A_STEP = ["sums"] * 5 + ["words"] * 3
# A rate that changes with every step, gradients that are clipped, and a reference.
FLAGS = {
    **dict(lora_rank=RANK, lora_alpha=ALPHA, lora_merge=False, adam_eps=1e-3, lr=0.02, clip_grad=0.05),
    **dict(lr_decay_style="linear", lr_warmup_iters=2, num_rollout=10),
    **dict(use_kl_loss=True, kl_loss_coef=KL, kl_loss_type="k3", entropy_coef=0.01),
}
TOGETHER = dict(FLAGS, lora_adapters=NAMES, global_batch_size=8, rollout_batch_size=4, n_samples_per_prompt=4)
LAYOUTS = {
    "1 process": (1, {}),
    "TP 2 + SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP 2": (2, {"pipeline_model_parallel_size": 2}),
    "DP 2": (2, {"overlap_grad_reduce": True, "bucket_size": 4000}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


@pytest.fixture(scope="module")
def rollouts():
    """Two steps each; the last one has no samples of the first adapter."""
    made = [random_rollout(256, num_samples=16, seed=seed) for seed in range(3)]
    for number, rollout in enumerate(made):
        rollout["adapter"] = ["words"] * 16 if number == 2 else OF_A_STEP * 2
        # The mean of an adapter's rewards is not that of all.
        rollout["rewards"] = [reward + (name == "sums") for reward, name in _zipped(rollout)]
    return made


def _zipped(rollout):
    return zip(rollout["rewards"], rollout["adapter"], strict=True)


def _only(rollout, name):
    """The samples of an adapter."""
    kept = [i for i, own in enumerate(rollout["adapter"]) if own == name]
    return {key: [values[i] for i in kept] for key, values in rollout.items() if key != "adapter"}


def _weights(worker, args):
    return {
        name or "alone": tensors_of(worker.backend.weights(ADAPTER, name))
        for name in args.lora_adapters or [None]
    }


def _train(rank, args, rollouts, save_after=-1):
    """The steps of each rollout, and all adapters after it."""
    worker = TrainWorker(args)
    first = worker.start()
    told = []
    for number in range(first, len(rollouts)):
        shard = split(args, rollouts[number], worker.parallel_config())
        report = worker.train_shard(number, shard)[0]
        if number == save_after:
            worker.save_model(number, True)
        told.append((report.get("train"), _weights(worker, args)))
    return told


def _alone(checkpoint, rollouts, name, **flags):
    size = OF_A_STEP.count(name)
    sizes = dict(global_batch_size=size, rollout_batch_size=2, n_samples_per_prompt=size)
    own = [_only(rollout, name) for rollout in rollouts[:2]]
    return run_ranks(_train, 1, trainer_args(checkpoint, **FLAGS, **sizes, **flags), own)[0]


@pytest.fixture(scope="module")
def alone(checkpoint, rollouts):
    return {name: _alone(checkpoint, rollouts, name) for name in NAMES}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_trains_as_it_would_alone(layout, checkpoint, rollouts, alone):
    world_size, overrides = LAYOUTS[layout]
    results = run_ranks(_train, world_size, trainer_args(checkpoint, **TOGETHER, **overrides), rollouts)
    for number in range(2):
        steps = next(result[number][0] for result in results if result[number][0])
        for name in NAMES:
            wanted_steps, wanted = alone[name][number]
            for result in results:
                expect_close(result[number][1][name], wanted["alone"])
            for step, wanted_step in zip(steps, wanted_steps, strict=True):
                for metric in ("loss", "grad_norm", "ppo_kl", "kl_loss", "lr-pg_0"):
                    found = step[f"train/adapter/{name}/{metric}"]
                    assert found == pytest.approx(wanted_step[f"train/{metric}"], rel=1e-4, abs=1e-6), metric
                assert wanted_step["train/grad_norm"] > FLAGS["clip_grad"]
            assert step["train/global_batch_size"] == 8
    for result in results:
        (_, before), (_, after) = result[1:]
        for name, tensor in after["sums"].items():
            assert torch.equal(tensor, before["sums"][name]), name  # Adam would go on, and decay
        moved = [not torch.equal(after["words"][name], before["words"][name]) for name in after["words"]]
        assert all(moved)


def test_in_half_precision_each_has_float32_weights_of_its_own(checkpoint, rollouts):
    """Bit for bit, as small steps show in those alone; and the moments of each are reset."""
    half = dict(params_dtype=torch.bfloat16, bf16=True, reset_optimizer_states=True)
    (together,) = run_ranks(_train, 1, trainer_args(checkpoint, **TOGETHER, **half), rollouts[:2])
    for name in NAMES:
        alone = _alone(checkpoint, rollouts, name, **half)
        for (_, found), (_, wanted) in zip(together, alone, strict=True):
            for key, value in wanted["alone"].items():
                assert torch.equal(found[name][key], value), key


def test_all_of_them_go_on_from_a_checkpoint_and_are_exported(checkpoint, rollouts, tmp_path):
    """Bit for bit, with moments and schedules; and of another layout. One has not taken a step before."""
    rollouts = [rollouts[2], *rollouts[:2]]
    flags = dict(TOGETHER, save=str(tmp_path / "save"), load=str(tmp_path / "save"))
    exports = str(tmp_path / "hf_{rollout_id}")
    through = run_ranks(_train, 1, trainer_args(checkpoint, **flags, save_hf=exports), rollouts, 0)[0]
    for name in NAMES:
        exported = load_file(tmp_path / "hf_0" / name / "adapter_model.safetensors")
        assert all(torch.equal(exported[key], value) for key, value in through[0][1][name].items())
    (resumed,) = run_ranks(_train, 1, trainer_args(checkpoint, **flags), rollouts)
    assert len(resumed) == 2
    for (steps, weights), (wanted_steps, wanted) in zip(resumed, through[1:], strict=True):
        for name in NAMES:
            assert all(torch.equal(weights[name][key], value) for key, value in wanted[name].items())
        assert [step["train/loss"] for step in steps] == [step["train/loss"] for step in wanted_steps]
    world_size, overrides = LAYOUTS["TP 2 + SP"]
    for result in run_ranks(_train, world_size, trainer_args(checkpoint, **flags, **overrides), rollouts):
        for name in NAMES:
            expect_close(result[-1][1][name], through[-1][1][name])
    for changed, wanted in ([*NAMES, "more"], r"\['sums', 'words', 'more'\]"), ([], "None"):
        message = rf"was made with --lora-adapters \['sums', 'words'\] \(wanted: it, not {wanted}\)"
        with pytest.raises(RuntimeError, match=message):
            run_ranks(_train, 1, trainer_args(checkpoint, **{**flags, "lora_adapters": changed}), rollouts)
