"""Checkpoints of mixtures of experts fit every layout, whoever held which expert."""

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from slime.backends.megatron_utils.hf_weights import HfWeights
from slime.ray.train_worker import TrainWorker
from tests.families import tiny_family
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split, trainer_args

pytestmark = pytest.mark.slow

EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS = {
    "1 process": (1, {}),
    "DP 2": (2, {}),
    "EP 2": (2, EP2),
    "ETP 2": (2, TP2),
    "TP 2, EP 2": (2, TP2 | EP2),
}
FLAGS = {
    **{"num_rollout": 4, "use_rollout_logprobs": True, "moe_router_load_balancing_type": ["aux_loss"]},
    **{"moe_aux_loss_coeff": [0.0], "moe_token_dispatcher_type": "alltoall", "freeze_indexer": True},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3_moe")


@pytest.fixture(scope="module")
def rollouts():
    return {i: random_rollout(vocab_size=256, seed=i) for i in range(4)}


def _run(rank, args, rollouts, save_after):
    """Trains on the rollouts from where ``args.load`` says; saves after one of them."""
    worker = TrainWorker(args)
    steps = []
    for rollout_id in range(worker.start(), max(rollouts) + 1):
        shard = split(args, rollouts[rollout_id], worker.parallel_config())
        steps += worker.train_shard(rollout_id, shard)[0].get("train", [])
        if rollout_id == save_after:
            worker.save_model(rollout_id, force_sync=True)
    buckets = HfWeights(args, worker.backend.state.model).buckets(1 << 30)
    return {"steps": steps, "weights": {n: t.clone() for bucket in buckets for n, t in bucket}}


def _resumed(checkpoint, rollouts, path, saved_in, loaded_in):
    results = []
    for layout, save_after in ((saved_in, 1), (loaded_in, -1)):
        world_size, overrides = LAYOUTS[layout]
        args = trainer_args(checkpoint, save=str(path), load=str(path), **FLAGS, **overrides)
        ranks = run_ranks(_run, world_size, args, rollouts, save_after)
        results.append((next(r["steps"] for r in ranks if r["steps"]), ranks[0]["weights"]))
    return results


@pytest.mark.parametrize(
    ("saved_in", "loaded_in"),
    [
        ("EP 2", "1 process"),
        ("ETP 2", "EP 2"),
        ("TP 2, EP 2", "DP 2"),
    ],
)
def test_a_run_goes_on_in_another_layout(checkpoint, rollouts, tmp_path, saved_in, loaded_in):
    """With the optimizer's moments: without them the next steps would be other ones."""
    _check_other_layout(checkpoint, rollouts, tmp_path, saved_in, loaded_in)


def _check_other_layout(checkpoint, rollouts, path, saved_in, loaded_in):
    (through, weights), (after, resumed) = _resumed(checkpoint, rollouts, path, saved_in, loaded_in)
    assert len(through) == 4 and len(after) == 2
    for left, right in zip(through[2:], after, strict=True):
        assert right == pytest.approx(left, rel=1e-4, abs=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(
            resumed[name], weight, rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("family", ["minimax_m2", "deepseek_v3", "glm_moe_dsa-shared", "qwen3_next"])
def test_layers_of_other_families_go_on_in_another_layout_too(rollouts, tmp_path, family):
    """Norms over all ranks' heads, projections that each rank has whole, biases, indexers, delta nets."""
    shared = {"indexer_types": ["full", "shared"]} if family == "glm_moe_dsa-shared" else {}
    tiny_family(family, tmp_path / "hf", num_hidden_layers=2, **shared)
    _check_other_layout(tmp_path / "hf", rollouts, tmp_path / "save", "TP 2, EP 2", "1 process")


def test_resuming_with_expert_parallelism_is_bit_exact(checkpoint, rollouts, tmp_path):
    (through, weights), (after, resumed) = _resumed(checkpoint, rollouts, tmp_path, "EP 2", "EP 2")
    assert after == through[2:]
    assert all(torch.equal(resumed[name], weight) for name, weight in weights.items())
    _check_names(tmp_path / "iter_0000001")


def _check_names(path):
    """Holds the names to Megatron-LM's (TransformerEngine's layers): layer 0 has experts, layer 1 none."""
    found = FileSystemReader(path).read_metadata().state_dict_metadata
    names = {name.split("decoder.layers.")[1] for name in found if name.startswith("decoder.layers.")}
    attention = {"linear_qkv.layer_norm_weight", "linear_qkv.weight", "linear_proj.weight"}
    attention |= {"q_layernorm.weight", "k_layernorm.weight"}
    experts = {"experts.experts.linear_fc1.weight", "experts.experts.linear_fc2.weight", "router.weight"}
    dense = {"linear_fc1.layer_norm_weight", "linear_fc1.weight", "linear_fc2.weight"}
    weights = {name for name in names if "_extra_state" not in name}
    of = lambda layer: {name.removeprefix(layer) for name in weights if name.startswith(layer)}
    assert of("0.mlp.") == experts and "0.pre_mlp_layernorm.weight" in weights
    assert of("1.mlp.") == dense and of("0.self_attention.") == of("1.self_attention.") == attention
