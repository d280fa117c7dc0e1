"""MTP layers: loss and gradients are the reference's, and the policy does not notice them."""

import shutil
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.arguments.model_only import model_args
from slime.ray.train_worker import TrainWorker
from tests.megatron_harness import run_ranks
from tests.mtp_models import MtpReference
from tests.trainer_batches import random_rollout, split, trainer_args

pytestmark = pytest.mark.slow

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20_000}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
REPLAYED = {"use_routing_replay": True, "records_routes": True, "use_rollout_logprobs": False}
TIED = "mimo, tied"
MODELS = {
    "mimo": ("mimo", 2, {}),
    TIED: ("mimo", 1, {"tie_word_embeddings": True, "num_hidden_layers": 2}),
    "deepseek_v3": ("deepseek_v3", 2, {"num_hidden_layers": 2}),
    "glm4_moe": ("glm4_moe", 1, {"num_hidden_layers": 2}),
    "qwen3_next": ("qwen3_next", 1, {"num_hidden_layers": 2, "mlp_only_layers": []}),
}
CASES = {
    "mimo, recomputed, mean over tokens": ("mimo", 1, {**RECOMPUTED, "calculate_per_token_loss": True}),
    "mimo, DP 2": ("mimo", 2, {}),
    "mimo, DP 2, overlapped, mean over tokens": ("mimo", 2, OVERLAP | {"calculate_per_token_loss": True}),
    "deepseek_v3, PP 2, overlapped": ("deepseek_v3", 2, PP2 | OVERLAP),
    "mimo, TP 2": ("mimo", 2, TP2),
    "mimo, TP 2, no SP": ("mimo", 2, TP2 | {"sequence_parallel": False}),
    "mimo, CP 2": ("mimo", 2, CP2),
    "mimo, CP 2, contiguous, mean over tokens": (
        "mimo",
        2,
        CP2 | {"allgather_cp": True, "calculate_per_token_loss": True},
    ),
    "mimo, PP 2 + VPP 2": ("mimo", 2, PP2 | {"virtual_pipeline_model_parallel_size": 2}),
    "tied, PP 2": (TIED, 2, PP2),
    "deepseek_v3, TP 2, EP 2": ("deepseek_v3", 2, TP2 | EP2),
    "deepseek_v3, recomputed, routes replayed": ("deepseek_v3", 1, RECOMPUTED | REPLAYED),
    "glm4_moe": ("glm4_moe", 1, {}),
    "qwen3_next": ("qwen3_next", 1, {}),
}
ROUTER = {
    **{"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.0]},
    **{"moe_token_dispatcher_type": "alltoall", "moe_router_bias_update_rate": 0.0},
}
# A step of this is the gradient itself.
PLAIN_STEP = {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 1.0, "weight_decay": 0.0, "clip_grad": 0.0}
FACTOR = 0.7


@pytest.fixture(scope="module")
def rollout():
    """Beside random samples: one of two tokens, of which nothing further can be told, and one left out."""
    batch = random_rollout(vocab_size=256)
    for prompt, mask in [(1, [1]), (4, [0, 0, 0])]:
        tokens = torch.randint(256, (prompt + len(mask),), generator=torch.Generator().manual_seed(prompt))
        batch["tokens"].append(tokens.tolist())
        batch["response_lengths"].append(len(mask))
        batch["loss_masks"].append(mask)
        batch["rollout_log_probs"].append([-5.0] * len(mask))
        batch["rewards"].append(0.5)
    count = len(batch["tokens"])
    batch |= {"raw_reward": list(batch["rewards"]), "truncated": [0] * count}
    batch["sample_indices"] = batch["rollout_ids"] = [*range(count)]
    batch["rollout_mask_sums"] = [sum(mask) for mask in batch["loss_masks"]]
    return batch


@pytest.fixture(scope="module")
def references(tmp_path_factory, rollout):
    """For each model its directory, depths, stored tensors of the layers, mean losses and gradients."""
    root, made = tmp_path_factory.mktemp("mtp"), {}

    def of(name):
        if name not in made:
            family, depths, changes = MODELS[name]
            reference = MtpReference(family, root / name.replace(", ", "-"), depths, **changes)
            samples = list(zip(rollout["tokens"], rollout["loss_masks"], strict=True))
            step = reference.step(samples, FACTOR)
            made[name] = root / name.replace(", ", "-"), depths, reference.tensors, *step
        return made[name]

    return of


def _args(path, depths, **flags):
    mtp = {"mtp_num_layers": depths, "enable_mtp_training": depths > 0, "mtp_loss_scaling_factor": FACTOR}
    own = {"use_rollout_logprobs": True, "global_batch_size": 10, **mtp, **ROUTER, **PLAIN_STEP, **flags}
    return trainer_args(path, **own)


def _weights(worker):
    found = {}
    for bucket in worker.backend.weights().buckets(1 << 30):
        found.update({name: tensor.clone() for name, tensor in bucket})
    return found


def _step(rank, args, rollout):
    worker = TrainWorker(args)
    worker.start()
    before = _weights(worker)
    report = worker.train_shard(0, split(args, rollout, worker.parallel_config()))[0]
    return {"report": report, "before": before, "after": _weights(worker)}


@pytest.fixture(scope="module")
def trained(references, rollout):
    """Metrics and results of a step with the layers, by case."""

    @cache
    def of(case):
        name, world_size, layout = CASES[case]
        path, depths, *_ = references(name)
        return _trained(world_size, _args(path, depths, **layout), rollout)

    return of


def _trained(world_size, args, rollout):
    results = run_ranks(_step, world_size, args, rollout)
    (report,) = [result["report"]["train"][0] for result in results if result["report"]]
    return report, results


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_the_reference(case, references, trained):
    _, depths, stored, means, gradients = references(CASES[case][0])
    report, results = trained(case)
    for depth, mean in enumerate(means, start=1):
        assert report[f"train/mtp_{depth}_loss"] == pytest.approx(mean, rel=1e-5)
    assert report["train/mtp_loss"] == pytest.approx(sum(means) / depths, rel=1e-5)
    for result in results:
        assert stored.keys() <= result["before"].keys()
        for tensor_name, tensor in stored.items():
            assert torch.equal(result["before"][tensor_name], tensor), tensor_name
        for tensor_name, gradient in gradients.items():
            found = result["before"][tensor_name] - result["after"][tensor_name]
            torch.testing.assert_close(
                found, gradient, rtol=1e-4, atol=2e-6, msg=lambda m, n=tensor_name: f"{n}: {m}"
            )
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-3


def test_a_stage_is_sent_the_embedding_that_the_step_before_has_made(references, rollout):
    """Of which each data-parallel rank has updated its part, and gathers the others in its forward pass."""
    path, depths, *_ = references("mimo")
    few = [
        [197 + token % 3 * 29 for token in tokens] for tokens in rollout["tokens"]
    ]  # in all steps the same
    rollout = {**rollout, "tokens": few}
    flags = {"global_batch_size": 5, "lr": 3.0, "mtp_loss_scaling_factor": 0.01}
    (wanted,) = run_ranks(_step, 1, _args(path, depths, **flags), rollout)
    results = run_ranks(_step, 4, _args(path, depths, **flags, **PP2, **OVERLAP), rollout)
    (found,) = [result["report"]["train"] for result in results if result["report"]]
    for step, expected in zip(found, wanted["report"]["train"], strict=True):
        assert step == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("layout", [{}, TP2 | EP2, CP2], ids=["1 process", "TP 2, EP 2", "CP 2"])
def test_routers_balance_the_rows_that_are_given_a_token(layout, rollout, tmp_path):
    reference = MtpReference("deepseek_v3", tmp_path, 2, num_hidden_layers=2)
    samples = list(zip(rollout["tokens"], rollout["loss_masks"], strict=True))
    gradients = reference.balance(samples, 0.3, 0.02)
    losses = {"moe_aux_loss_coeff": [0.3], "moe_z_loss_coeff": 0.02, "max_tokens_per_gpu": 1024}
    args = _args(tmp_path, 2, **losses, **layout, mtp_loss_scaling_factor=0.0)
    _, results = _trained(2 if layout else 1, args, rollout)
    for result in results:
        for tensor_name, gradient in gradients.items():
            found = result["before"][tensor_name] - result["after"][tensor_name]
            torch.testing.assert_close(
                found, gradient, rtol=1e-4, atol=2e-6, msg=lambda m, n=tensor_name: f"{n}: {m}"
            )
    assert max(float(g.abs().max()) for n, g in gradients.items() if "gate.weight" in n) > 1e-3


def test_a_micro_batch_too_short_for_a_row_gives_routers_no_mean_of_nothing(references, rollout):
    path, depths, *_ = references("deepseek_v3")
    losses = {"moe_aux_loss_coeff": [0.3], "moe_z_loss_coeff": 0.02, "use_dynamic_batch_size": False}
    report, (result,) = _trained(1, _args(path, depths, **losses), rollout)
    assert min(map(len, rollout["tokens"])) <= depths
    assert all(weight.isfinite().all() for weight in result["after"].values())
    assert report["train/moe_z_loss"] > 0


@pytest.mark.parametrize("case", ["mimo, PP 2 + VPP 2", "deepseek_v3, TP 2, EP 2"])
def test_the_policy_takes_the_same_step_to_the_last_bit(case, references, trained, rollout):
    name, world_size, layout = CASES[case]
    path, _, stored, *_ = references(name)
    _, with_layers = trained(case)
    _, without = _trained(world_size, _args(path, 0, **layout), rollout)
    for found, expected in zip(with_layers, without, strict=True):
        assert found["after"].keys() - expected["after"].keys() == stored.keys()
        moved = [n for n, w in expected["after"].items() if not torch.equal(w, expected["before"][n])]
        assert len(moved) > len(expected["after"]) / 2
        for tensor_name, weight in expected["after"].items():
            assert torch.equal(found["after"][tensor_name], weight), tensor_name


def test_balancing_losses_of_these_layers_are_in_no_metric_of_the_decoder(references, rollout):
    path, depths, *_ = references("glm4_moe")
    losses = {"moe_aux_loss_coeff": [0.1], "moe_z_loss_coeff": 0.1}
    found, _ = _trained(1, _args(path, depths, **losses), rollout)
    expected, _ = _trained(1, _args(path, 0, **losses), rollout)
    assert {name: found[name] for name in expected if "moe" in name} == {
        name: value for name, value in expected.items() if "moe" in name
    }
    assert expected["train/moe_load_balancing_loss"] > 0 and expected["train/moe_z_loss"] > 0


def _save(rank, args, rollout):
    worker = TrainWorker(args)
    worker.start()
    worker.train_shard(0, split(args, rollout, worker.parallel_config()))
    worker.save_model(0, force_sync=True)
    return _weights(worker)


def _load(rank, args):
    worker = TrainWorker(args)
    worker.start()
    return _weights(worker)


def test_a_checkpoint_goes_on_in_another_layout(references, rollout, tmp_path):
    path, depths, stored, *_ = references("mimo")
    flags = {"save": str(tmp_path), "force_sync": True, "optimizer": "adam", "lr": 1e-3}
    saved = run_ranks(_save, 2, _args(path, depths, **flags, **TP2), rollout)[0]
    loaded = run_ranks(_load, 2, _args(path, depths, **flags, load=str(tmp_path), **PP2))
    assert stored.keys() <= saved.keys()
    assert any(not torch.equal(saved[name], tensor) for name, tensor in stored.items())
    for result in loaded:
        for name, weight in saved.items():
            assert torch.equal(result[name], weight), name


def test_a_checkpoint_without_the_layers_is_refused_and_does_as_a_reference(references, rollout, tmp_path):
    path, depths, stored, *_ = references("mimo")
    flags = {"save": str(tmp_path), "force_sync": True}
    saved = run_ranks(_save, 1, _args(path, 0, **flags), rollout)[0]
    assert not stored.keys() & saved.keys()
    with pytest.raises(RuntimeError, match="has no MTP layers"):
        run_ranks(_load, 1, _args(path, depths, load=str(tmp_path)))
    started = run_ranks(_load, 1, _args(path, depths, ref_load=str(tmp_path)))[0]
    for name, weight in (saved | stored).items():
        assert torch.equal(started[name], weight), name


def test_a_checkpoint_with_fewer_of_the_layers_is_refused_and_does_as_a_reference(
    references, rollout, tmp_path
):
    path, depths, stored, *_ = references("mimo")
    run_ranks(_save, 1, _args(path, 1, save=str(tmp_path), force_sync=True), rollout)
    with pytest.raises(RuntimeError, match=r"has 1 MTP layers .*, or --mtp-num-layers 1"):
        run_ranks(_load, 1, _args(path, depths, load=str(tmp_path)))
    started = run_ranks(_load, 1, _args(path, depths, ref_load=str(tmp_path)))[0]
    assert all(torch.equal(started[name], tensor) for name, tensor in stored.items())


def _there_and_back(rank, args, root):
    from megatron.core import parallel_state

    from slime.backends.megatron_utils.convert import write_hf, write_torch_dist

    saved = write_torch_dist(args, root / "saved")
    parallel_state.destroy_model_parallel()
    write_hf(args, saved, root / "out", 100_000)


@pytest.mark.parametrize("trained", [0, 1, 2])
def test_exports_have_each_layer_once_and_no_old_copy_of_embedding_or_head(trained, references, tmp_path):
    path, _, stored, *_ = references("deepseek_v3")
    shutil.copytree(path, tmp_path / "in", ignore=shutil.ignore_patterns("*-*"))
    file = tmp_path / "in/model.safetensors"
    before = load_file(file)
    copied = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
    copies = {f"model.layers.{layer}.{copy}.weight": of for copy, of in copied.items() for layer in (2, 3)}
    save_file(before | {copy: before[of].clone() for copy, of in copies.items()}, file)
    words = ["--hf-checkpoint", str(tmp_path / "in"), "--fp32"]
    words += ["--mtp-num-layers", str(trained), "--enable-mtp-training"] if trained else []
    run_ranks(_there_and_back, 1, model_args(words, 1), tmp_path)
    shards = [load_file(file) for file in (tmp_path / "out").glob("*.safetensors")]
    found = {name: tensor for shard in shards for name, tensor in shard.items()}
    assert sum(map(len, shards)) == len(found)
    uncounted = "model.layers.4.eh_proj.weight"
    assert stored.keys() < found.keys() == before.keys() - {uncounted}
    for name, tensor in found.items():
        assert torch.equal(tensor, before[name]), name
