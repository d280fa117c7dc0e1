"""A trainer's step with each optimizer, on the host or not; and many steps in bfloat16 and float16."""

import pytest
import torch
import transformers

from slime.backends.megatron_utils import optimizer as optimizer_module
from slime.backends.megatron_utils.hf_weights import HfWeights
from slime.backends.megatron_utils.moment_storage import MomentStorage
from slime.config.run import run_config
from slime.ray.train_worker import TrainWorker
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split, trainer_args

pytestmark = pytest.mark.slow

OFFLOAD = dict(
    optimizer_cpu_offload=True,
    overlap_cpu_optimizer_d2h_h2d=True,
    use_precision_aware_optimizer=True,
    optimizer_offload_fraction=0.7,
    no_pin_cpu_grads=False,
    no_pin_cpu_params=False,
    exp_avg_dtype="fp32",
    exp_avg_sq_dtype="fp32",
)
SGD = dict(optimizer="sgd", sgd_momentum=0.9, lr=0.1, clip_grad=1e9)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


@pytest.fixture(scope="module")
def rollout():
    return random_rollout(vocab_size=256)


def _train(rank, args, rollout, steps, away):
    """Weights after some steps on a rollout, and what was reported; ``away``: tensors are as on a GPU."""
    if away:
        storage = optimizer_module.moment_storage(run_config(args))
        options = {**vars(storage), "is_away": lambda tensor: True}
        optimizer_module.moment_storage = lambda config: MomentStorage(**options)
    worker = TrainWorker(args)
    worker.start()
    shard = split(args, rollout, worker.parallel_config())
    reports = [worker.train_shard(i, shard)[0].get("train", []) for i in range(steps)]
    buckets = HfWeights(args, worker.backend.state.model).buckets(1 << 30)
    part = getattr(worker.backend.state.optimizer, "chained_optimizers", [worker.backend.state.optimizer])[0]
    return {
        "weights": {name: tensor.clone() for bucket in buckets for name, tensor in bucket},
        "steps": [step for report in reports for step in report],
        "on_host": len(getattr(part.optimizer, "_on_host", ())),
        "loss_scale": float(worker.backend.state.optimizer.get_loss_scale()),
    }


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_is_the_same_bit_for_bit_with_the_optimizer_on_the_host(checkpoint, rollout, precision):
    dtype = dict(params_dtype=getattr(torch, precision), bf16=precision == "bfloat16")
    plain = run_ranks(_train, 2, trainer_args(checkpoint, **dtype), rollout, 2, False)
    flags = trainer_args(checkpoint, **dtype, **OFFLOAD)
    for away in (False, True):
        offloaded = run_ranks(_train, 2, flags, rollout, 2, away)
        assert all((result["on_host"] > 0) == away for result in offloaded)
        for before, after in zip(plain, offloaded, strict=True):
            assert after["steps"] == before["steps"]
            for name, weight in before["weights"].items():
                assert torch.equal(weight, after["weights"][name]), name


def _sgd_by_hand(checkpoint, rollout, steps):
    """The policy gradient at ratio 1 (its own log-probs are the old ones) and SGD, in plain transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=SGD["lr"], momentum=SGD["sgd_momentum"])
    for _ in range(steps):
        optimizer.zero_grad()
        for i, tokens in enumerate(rollout["tokens"]):
            length = rollout["response_lengths"][i]
            logits = model(input_ids=torch.tensor([tokens])).logits[0, -length - 1 : -1]
            chosen = logits.log_softmax(-1).gather(-1, torch.tensor(tokens[-length:])[:, None])[:, 0]
            mask = torch.tensor(rollout["loss_masks"][i])
            loss = -(chosen * rollout["rewards"][i] * mask).sum() / mask.sum() / len(rollout["tokens"])
            loss.backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("world_size", "layout"), [(1, {}), (2, {}), (2, {"tensor_model_parallel_size": 2})], ids=str
)
def test_steps_of_sgd_are_those_of_torch(checkpoint, rollout, world_size, layout):
    args = trainer_args(checkpoint, **SGD, **layout)
    results = run_ranks(_train, world_size, args, rollout, 2, False)
    expected = _sgd_by_hand(checkpoint, rollout, 2)
    for result in results:
        for name, weight in result["weights"].items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-4, msg=lambda m, n=name: n + m)


STEPS = 200
PRECISIONS = {
    "bfloat16": dict(params_dtype=torch.bfloat16, bf16=True),
    "float16": dict(
        **dict(params_dtype=torch.float16, fp16=True, loss_scale=None, initial_loss_scale=2.0**18),
        **dict(min_loss_scale=1.0, loss_scale_window=20, hysteresis=1),
    ),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_hundred_steps_stay_finite_and_learn(tmp_path_factory, rollout, precision):
    checkpoint = save_tiny_hf(
        tmp_path_factory.mktemp("hf"), "qwen3", num_hidden_layers=2, hidden_size=32, vocab_size=256
    )
    flags = dict(loss_type="sft_loss", advantage_estimator="grpo", compute_advantages_and_returns=False)
    flags |= dict(lr=3e-3, num_rollout=STEPS, clip_grad=1.0, max_tokens_per_gpu=256)
    args = trainer_args(checkpoint, **flags, **PRECISIONS[precision])
    (result,) = run_ranks(_train, 1, args, rollout, STEPS, False, timeout=300)
    losses = [step["train/loss"] for step in result["steps"]]
    assert len(losses) == STEPS
    assert all(torch.tensor(losses).isfinite())
    assert losses[-1] < 0.2 * losses[0]
    assert all(weight.isfinite().all() for weight in result["weights"].values())
    if precision == "float16":
        skipped = [step["train/skipped"] for step in result["steps"]]
        # The scale is looked for from above, and tried again after each window without overflow.
        assert sum(skipped) < STEPS / 10
        assert 1 < result["loss_scale"] != 2.0**18
