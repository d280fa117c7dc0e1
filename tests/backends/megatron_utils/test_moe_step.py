"""One optimizer step of a mixture of experts is the same in every layout, and in plain transformers."""

import pytest
import torch
import transformers

from slime.backends.megatron_utils.hf_weights import HfWeights
from slime.ray.train_worker import TrainWorker
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split, trainer_args

pytestmark = pytest.mark.slow

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
CP2 = {"context_parallel_size": 2}
VPP2 = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
ALL_TO_ALL = {"moe_token_dispatcher_type": "alltoall"}
ALL_GATHER = {"moe_token_dispatcher_type": "allgather"}
PER_TOKEN = {"calculate_per_token_loss": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20_000}
ON_HOST = {
    **{"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True, "no_pin_cpu_grads": False},
    **{"use_precision_aware_optimizer": True, "optimizer_offload_fraction": 0.7, "no_pin_cpu_params": False},
    **{"exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32"},
}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
NORMS_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
SELECTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
LAYOUTS = {
    "1 process": (1, ALL_TO_ALL),
    "1 process, loss per token": (1, ALL_GATHER | PER_TOKEN),
    "1 process, norms recomputed": (1, ALL_TO_ALL | NORMS_AGAIN),
    "DP 2": (2, ALL_TO_ALL),
    "EP 2": (2, EP2 | ALL_TO_ALL | PER_TOKEN),
    "EP 2, all-gather": (2, EP2 | ALL_GATHER),
    "EP 2, overlapped": (2, EP2 | ALL_TO_ALL | OVERLAP),
    "EP 2, optimizer on the host": (2, EP2 | ALL_TO_ALL | ON_HOST),
    "EP 2, recomputed": (2, EP2 | ALL_TO_ALL | RECOMPUTED),
    "EP 2, all-gather, experts recomputed": (2, EP2 | ALL_GATHER | SELECTED | PER_TOKEN),
    "ETP 2": (2, TP2 | ALL_TO_ALL),
    "ETP 2, all-gather": (2, TP2 | ALL_GATHER | RECOMPUTED),
    "TP 2, whole experts": (2, TP2 | ALL_TO_ALL | {"expert_tensor_parallel_size": 1}),
    "TP 2, EP 2": (2, TP2 | EP2 | ALL_TO_ALL | PER_TOKEN),
    "TP 2, EP 2, all-gather": (2, TP2 | EP2 | ALL_GATHER),
    "PP 2": (2, ALL_TO_ALL | {"pipeline_model_parallel_size": 2}),
    "PP 2 + VPP 2": (2, ALL_TO_ALL | VPP2),
    "CP 2": (2, ALL_TO_ALL | CP2),
    "CP 2, EP 2, contiguous": (2, EP2 | ALL_GATHER | CP2 | {"allgather_cp": True} | PER_TOKEN),
    "CP 2 x TP 2, EP 2": (4, EP2 | TP2 | ALL_TO_ALL | CP2 | PER_TOKEN),
    "CP 2, EP 2": (2, EP2 | ALL_TO_ALL | CP2 | PER_TOKEN),
    "EP 2 x DP 2": (4, EP2 | ALL_TO_ALL),
    "EP 2 x DP 2, all-gather": (4, EP2 | ALL_GATHER | PER_TOKEN),
    "EP 2 x ETP 2": (4, TP2 | ALL_TO_ALL | {"expert_model_parallel_size": 2}),
    "EP 2 x PP 2": (4, EP2 | TP2 | ALL_TO_ALL | {"pipeline_model_parallel_size": 2}),
}
# Large enough to be a fair part of the gradient.
ROUTER = {
    "moe_router_load_balancing_type": ["aux_loss"],
    "moe_aux_loss_coeff": [0.3],
    "moe_z_loss_coeff": 0.02,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3_moe")


def _log_probs(model, tokens, response):
    logits = model(input_ids=torch.tensor([tokens])).logits[0, -response - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens[-response:])[:, None])[:, 0]


@pytest.fixture(scope="module")
def rollout(checkpoint):
    """Its old log-probs lie around those of the model."""
    batch = random_rollout(vocab_size=256, num_samples=12)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    for i, (tokens, response) in enumerate(zip(batch["tokens"], batch["response_lengths"], strict=True)):
        with torch.no_grad():
            chosen = _log_probs(model, tokens, response)
        noise = 0.3 * torch.randn(chosen.shape, generator=generator)
        batch["rollout_log_probs"][i] = (chosen + noise).tolist()
    return batch


def _router_losses(model, sequences):
    """Switch Transformer's eq. 4 (Fedus et al. 2021) and ST-MoE's eq. 5, summed over layers."""
    outputs = [model(torch.tensor([tokens]), output_router_logits=True).router_logits for tokens in sequences]
    balance = z = 0.0
    for parts in zip(*outputs, strict=True):
        logits = torch.cat(parts)
        shares = logits.softmax(-1)
        chosen = torch.zeros_like(shares).scatter(1, shares.topk(2).indices, 1.0)
        balance = balance + 4 * (chosen.mean(0) / 2 * shares.mean(0)).sum()
        z = z + logits.logsumexp(-1).square().mean()
    return balance, z


def _policy_loss(model, batch, i):
    """PPO's clipped loss of a sample's tokens, without its mask."""
    new = _log_probs(model, batch["tokens"][i], batch["response_lengths"][i])
    ratio = (new - torch.tensor(batch["rollout_log_probs"][i])).exp()
    advantage = batch["rewards"][i]
    return torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.28) * advantage)


def _transformers_step(checkpoint, args, batch, micro_batches):
    """Gradient clipping and AdamW on the policy's loss and the mean of the routers' over micro-batches."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), eps=args.adam_eps)
    masks = [torch.tensor(mask).float() for mask in batch["loss_masks"]]
    tokens = sum(mask.sum() for mask in masks)
    policy = 0.0
    for i, mask in enumerate(masks):
        scale = 1 / tokens if args.calculate_per_token_loss else 1 / mask.sum() / len(masks)
        policy = policy + (_policy_loss(model, batch, i) * mask).sum() * scale
    losses = [_router_losses(model, [batch["tokens"][i] for i in members]) for members in micro_batches]
    balance, z = (sum(kind) / len(losses) for kind in zip(*losses, strict=True))
    (policy + 0.3 * balance + 0.02 * z).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    layers = sum(layer.mlp.__class__.__name__.endswith("SparseMoeBlock") for layer in model.model.layers)
    return {
        "train/loss": float(policy.detach()),
        "train/grad_norm": float(norm),
        "train/moe_load_balancing_loss": float(balance.detach()) / layers,
        "train/moe_z_loss": float(z.detach()) / layers,
    }, model


def _megatron_step(rank, args, rollout):
    worker = TrainWorker(args)
    worker.start()
    shard = split(args, rollout, worker.parallel_config())
    report = worker.train_shard(0, shard)[0]
    weights, tensors = {}, HfWeights(args, worker.backend.state.model)
    for bucket in tensors.buckets(1 << 30):
        weights.update({name: tensor.clone() for name, tensor in bucket})
    micro_batches = [[shard["partition"][i] for i in members] for members in shard["micro_batch_indices"]]
    replica = worker.parallel_config()["dp_rank"]
    found = {"report": report, "weights": weights}
    return {**found, "replica": replica, "micro_batches": micro_batches}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_step_agrees_with_transformers(layout, checkpoint, rollout, tmp_path):
    world_size, overrides = LAYOUTS[layout]
    args = trainer_args(
        checkpoint,
        use_rollout_logprobs=True,
        max_tokens_per_gpu=32,
        global_batch_size=12,
        adam_eps=1e-5,  # where a gradient is about 0, a smaller one makes a step of a rounding error's sign
        **ROUTER,
        **overrides,
    )
    results = run_ranks(_megatron_step, world_size, args, rollout)
    of_replica = {result["replica"]: result["micro_batches"] for result in results}
    micro_batches = [members for replica in of_replica.values() for members in replica]
    assert len(micro_batches) > len(of_replica)
    expected, model = _transformers_step(checkpoint, args, rollout, micro_batches)
    (report,) = [result["report"] for result in results if result["report"]]
    (step,) = report["train"]
    for name, value in expected.items():
        assert step[name] == pytest.approx(value, rel=1e-5), name
    assert step["train/pg_clipfrac"] > 0
    model.save_pretrained(tmp_path)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for result in results:
        for name, weight in _fused(result["weights"]).items():
            torch.testing.assert_close(
                weight, wanted[name], rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_losses_of_routers_are_scaled_as_the_policys_in_float16(checkpoint, rollout):
    scale = dict(initial_loss_scale=2.0**10, min_loss_scale=1.0, loss_scale_window=1000, hysteresis=1)
    flags = dict(params_dtype=torch.float16, fp16=True, loss_scale=None, global_batch_size=12, **scale)
    args = trainer_args(checkpoint, use_rollout_logprobs=True, max_tokens_per_gpu=32, **flags, **ROUTER)
    (result,) = run_ranks(_megatron_step, 1, args, rollout)
    expected, _ = _transformers_step(checkpoint, args, rollout, result["micro_batches"])
    (step,) = result["report"]["train"]
    for name, value in expected.items():
        assert step[name] == pytest.approx(value, rel=1e-2), name
    assert step["train/skipped"] == 0


def _fused(weights):
    """Experts stacked, as transformers has them in memory."""
    rest = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    for layer in {name.split(".experts.")[0] for name in weights if ".experts." in name}:
        of = lambda kind, layer=layer: [weights[f"{layer}.experts.{e}.{kind}_proj.weight"] for e in range(4)]
        pairs = [torch.cat(pair) for pair in zip(of("gate"), of("up"), strict=True)]
        rest[f"{layer}.experts.gate_up_proj"] = torch.stack(pairs)
        rest[f"{layer}.experts.down_proj"] = torch.stack(of("down"))
    return rest
