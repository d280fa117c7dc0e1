"""The trainer on one GPU: its numbers, its memory while it sleeps, and its checkpoints."""

import pytest
import torch

from slime.ray.train_worker import TrainWorker
from tests.backends.megatron_utils.test_checkpoint import FLAGS, _run
from tests.backends.megatron_utils.test_model_logits import LENGTHS, _packed_logits
from tests.megatron_harness import MODEL_TYPES, make_args, run_ranks, save_tiny_hf, tiny_hf_model
from tests.trainer_batches import random_rollout, split, trainer_args

pytestmark = pytest.mark.gpu

# Of the largest logit. bfloat16 keeps 8 bits, and the two sides round in different places.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


def _logits_on_gpu(rank, args, tokens):
    torch.backends.cuda.matmul.allow_tf32 = False
    return _packed_logits(rank, args, tokens.cuda()).float().cpu()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_packed_logits_equal_those_of_transformers(tmp_path, model_type, dtype):
    """In bfloat16 through variable-length flash attention, which needs heads of 32 and more."""
    shape = {"hidden_size": 256, "head_dim": 32} if model_type != "qwen2" else {"hidden_size": 256}
    model = tiny_hf_model(model_type, **shape)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(256, (sum(LENGTHS),), generator=torch.Generator().manual_seed(7))
    args = make_args(tmp_path, params_dtype=dtype, bf16=dtype == torch.bfloat16)
    (found,) = run_ranks(_logits_on_gpu, 1, args, tokens)
    with torch.no_grad():
        expected = torch.cat([model(part[None]).logits[0] for part in tokens.split(LENGTHS)])
    assert (found - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max()


def _train(rank, args, sleeps):
    worker = TrainWorker(args)
    worker.start()
    memory, losses = [], []
    for rollout_id in range(3):
        batch = split(args, random_rollout(256, seed=rollout_id), worker.parallel_config())
        losses.append(worker.train_shard(rollout_id, batch)[0]["train"][0]["train/grad_norm"])
        if sleeps:
            awake = torch.cuda.memory_allocated()
            worker.sleep()
            memory.append((awake, torch.cuda.memory_allocated()))
            worker.wake_up()
    return {"memory": memory, "losses": losses}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sleep_empties_the_gpu_and_changes_nothing(tmp_path, dtype):
    shape = {"hidden_size": 512, "intermediate_size": 2048}
    path = save_tiny_hf(tmp_path, "llama", **shape)
    args = trainer_args(path, params_dtype=dtype, bf16=dtype == torch.bfloat16)
    (awake,) = run_ranks(_train, 1, args, False)
    (slept,) = run_ranks(_train, 1, args, True)
    assert slept["losses"] == pytest.approx(awake["losses"], rel=1e-3)
    for before, asleep in slept["memory"]:
        assert asleep < 0.1 * before


def _run_on_gpu(rank, args, rollouts, save_after):
    result = _run(rank, args, rollouts, save_after)
    weights = {name: weight.float().cpu() for name, weight in result["weights"].items()}
    return {**result, "weights": weights}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resuming_equals_never_having_stopped(tmp_path, dtype):
    path = save_tiny_hf(tmp_path / "hf", "qwen3", hidden_size=256, head_dim=32)
    flags = {"params_dtype": dtype, "bf16": dtype == torch.bfloat16}
    saves = str(tmp_path / "saves")
    args = trainer_args(path, save=saves, load=saves, **FLAGS, **flags)
    rollouts = {i: random_rollout(256, seed=i) for i in range(4)}
    (through,) = run_ranks(_run_on_gpu, 1, args, rollouts, 1)
    (resumed,) = run_ranks(_run_on_gpu, 1, args, rollouts, -1)
    assert (resumed["start"], resumed["version"]) == (2, 5)
    for left, right in zip(resumed["steps"], through["steps"][2:], strict=True):
        assert left["train/grad_norm"] == pytest.approx(right["train/grad_norm"], rel=TOLERANCE[dtype])
    for name, weight in through["weights"].items():
        # Sums on a GPU have no fixed order; without its moments Adam would move a weight by about lr.
        torch.testing.assert_close(resumed["weights"][name], weight, rtol=TOLERANCE[dtype], atol=2e-4)
