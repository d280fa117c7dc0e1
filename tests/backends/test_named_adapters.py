"""Several adapters on one base: each trains as alone, and as PEFT's would, and goes on from a checkpoint."""

import pytest
import torch
from safetensors.torch import load_file

from slime.ray.train_worker import TrainWorker
from slime.training.weights import ADAPTER
from tests.backends import lora_reference
from tests.backends.fsdp_harness import fsdp_args
from tests.backends.lora_reference import ALPHA, KL, RANK, expect_close, peft_step, save_random, tensors_of
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split, trainer_args
from tests.transformers_step import noisy_rollout

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
MEGATRON, FSDP = trainer_args, fsdp_args
TRAINERS = {"Megatron": MEGATRON, "FSDP": FSDP}
LAYOUTS = {
    "1 process": (MEGATRON, 1, {}),
    "TP 2 + SP": (MEGATRON, 2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP 2": (MEGATRON, 2, {"pipeline_model_parallel_size": 2}),
    "DP 2": (MEGATRON, 2, {"overlap_grad_reduce": True, "bucket_size": 4000}),
    "FSDP": (FSDP, 1, {}),
    "FSDP over 2, weights on the host": (FSDP, 2, {"fsdp_cpu_offload": True}),
    "FSDP, CP 2": (FSDP, 2, {"context_parallel_size": 2}),
}
OTHER_RANKS = {
    "Megatron": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "FSDP": (2, {}),
}
HALF = {
    "bfloat16": dict(params_dtype=torch.bfloat16, bf16=True),
    "float16": dict(params_dtype=torch.float16, fp16=True, initial_loss_scale=2.0**10, hysteresis=1),
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


def _alone(make, checkpoint, rollouts, name, **flags):
    size = OF_A_STEP.count(name)
    sizes = dict(global_batch_size=size, rollout_batch_size=2, n_samples_per_prompt=size)
    own = [_only(rollout, name) for rollout in rollouts[:2]]
    return run_ranks(_train, 1, make(checkpoint, **FLAGS, **sizes, **flags), own)[0]


@pytest.fixture(scope="module")
def alone(checkpoint, rollouts):
    return {name: _alone(MEGATRON, checkpoint, rollouts, name) for name in NAMES}


@pytest.mark.parametrize("layout", [*list(LAYOUTS)[:4], "FSDP over 2, weights on the host"])
def test_each_trains_as_it_would_alone(layout, checkpoint, rollouts, alone):
    make, world_size, overrides = LAYOUTS[layout]
    results = run_ranks(_train, world_size, make(checkpoint, **TOGETHER, **overrides), rollouts)
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


@pytest.mark.parametrize("layout", ["TP 2 + SP", "FSDP", "FSDP, CP 2"])
def test_a_step_of_both_is_that_of_two_models_of_pefts(layout, checkpoint, tmp_path):
    """Each begins as its own directory says."""
    make, world_size, overrides = LAYOUTS[layout]
    adapters = {name: save_random(checkpoint, tmp_path / name, seed) for seed, name in enumerate(NAMES)}
    rollout = noisy_rollout(checkpoint) | {"adapter": ["words"] * 3 + ["sums"] * 5}
    flags = dict(lora_reference.FLAGS, lora_adapters=NAMES, lora_merge=False, lora_adapter_path=str(tmp_path))
    results = run_ranks(_train, world_size, make(checkpoint, **flags, **overrides), [rollout])
    (step,) = next(result[0][0] for result in results if result[0][0])
    for name, adapter in adapters.items():
        wanted = peft_step(checkpoint, adapter, _only(rollout, name))
        for metric in ("loss", "grad_norm"):
            assert step[f"train/adapter/{name}/{metric}"] == pytest.approx(wanted[metric], rel=1e-5), metric
        for result in results:
            expect_close(result[0][1][name], wanted["adapter"])


@pytest.mark.parametrize(("trainer", "half"), [("Megatron", "bfloat16"), ("FSDP", "float16")])
def test_in_half_precision_each_trains_as_alone_bit_for_bit(trainer, half, checkpoint, rollouts):
    """Each has float32 weights of its own: small steps show in those alone. The moments of each are reset."""
    make, flags = TRAINERS[trainer], dict(HALF[half], reset_optimizer_states=True)
    (together,) = run_ranks(_train, 1, make(checkpoint, **TOGETHER, **flags), rollouts[:2])
    for name in NAMES:
        alone = _alone(make, checkpoint, rollouts, name, **flags)
        for (_, found), (_, wanted) in zip(together, alone, strict=True):
            for key, value in wanted["alone"].items():
                assert torch.equal(found[name][key], value), key


def _loss_scales(rank, args, rollout):
    """The scale of each after a rollout, which overflows for the one of large rewards."""
    worker = TrainWorker(args)
    worker.start()
    worker.train_shard(0, split(args, rollout, worker.parallel_config()))
    state, told = worker.backend.state, {}
    for name in NAMES:
        state.named.put_in_place(name)
        scale = state.optimizer.get_loss_scale() if args.train_backend == "megatron" else state.loss_scale
        told[name] = float(getattr(scale, "factor", scale))
    return told


@pytest.mark.parametrize("trainer", TRAINERS)
def test_steps_of_one_that_overflow_leave_the_loss_scale_of_the_other(trainer, checkpoint, rollouts):
    rewards = [1e30 if name == "words" else reward for reward, name in _zipped(rollouts[0])]
    args = TRAINERS[trainer](checkpoint, **TOGETHER, **HALF["float16"])
    (told,) = run_ranks(_loss_scales, 1, args, dict(rollouts[0], rewards=rewards))
    assert told == {"sums": 2.0**10, "words": 2.0**8}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_all_of_them_go_on_from_a_checkpoint_and_are_exported(trainer, checkpoint, rollouts, tmp_path):
    """Bit for bit, with moments and schedules; and of another layout. One has not taken a step before."""
    make, rollouts = TRAINERS[trainer], [rollouts[2], *rollouts[:2]]
    flags = dict(TOGETHER, save=str(tmp_path / "save"), load=str(tmp_path / "save"))
    exports, written = str(tmp_path / "hf_{rollout_id}"), {"async_save": True} if make is FSDP else {}
    through = run_ranks(_train, 1, make(checkpoint, **flags, **written, save_hf=exports), rollouts, 0)[0]
    for name in NAMES:
        exported = load_file(tmp_path / "hf_0" / name / "adapter_model.safetensors")
        assert all(torch.equal(exported[key], value) for key, value in through[0][1][name].items())
    (resumed,) = run_ranks(_train, 1, make(checkpoint, **flags), rollouts)
    assert len(resumed) == 2
    for (steps, weights), (wanted_steps, wanted) in zip(resumed, through[1:], strict=True):
        for name in NAMES:
            assert all(torch.equal(weights[name][key], value) for key, value in wanted[name].items())
        assert [step["train/loss"] for step in steps] == [step["train/loss"] for step in wanted_steps]
    world_size, overrides = OTHER_RANKS[trainer]
    for result in run_ranks(_train, world_size, make(checkpoint, **flags, **overrides), rollouts):
        for name in NAMES:
            expect_close(result[-1][1][name], through[-1][1][name])
    for changed, wanted in (
        ([*NAMES, "more"], r"\['sums', 'words', 'more'\]"),
        (NAMES[:1], r"\['sums'\]"),
        (NAMES[::-1], r"\['words', 'sums'\]"),
        ([], "None"),
    ):
        message = rf"was made with --lora-adapters \['sums', 'words'\] \(wanted: it, not {wanted}\)"
        with pytest.raises(RuntimeError, match=message):
            run_ranks(_start, 1, make(checkpoint, **{**flags, "lora_adapters": changed}))


def _start(rank, args):
    TrainWorker(args).start()
