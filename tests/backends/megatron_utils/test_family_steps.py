"""One optimizer step of families with layers of their own agrees with plain transformers and AdamW."""

import math

import pytest
import torch
import transformers

from slime.backends.megatron_utils.hf_weights import HfWeights
from slime.models.chosen_keys import choose_first_of_equals
from slime.ray.train_worker import TrainWorker
from tests.families import tiny_family
from tests.megatron_harness import run_ranks
from tests.trainer_batches import random_rollout, split, trainer_args

pytestmark = pytest.mark.slow

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
TP4 = TP2 | {"tensor_model_parallel_size": 4}
CP2 = {"context_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
# Layers whose gradients have to be summed over ranks in a way of their own.
CASES = {
    "glm4, TP 2": ("glm4", TP2),
    "gemma3_text, TP 2": ("gemma3_text", TP2),
    "gemma3_text, CP 2": ("gemma3_text", CP2),
    "qwen2_moe, TP 2": ("qwen2_moe", TP2),
    "minimax_m2, TP 2": ("minimax_m2", TP2),
    "deepseek_v3, TP 2, EP 2": ("deepseek_v3", TP2 | EP2),
    "deepseek_v3, CP 2": ("deepseek_v3", CP2),
    "deepseek_v32, TP 2, EP 2": ("deepseek_v32", TP2 | EP2 | {"freeze_indexer": True}),
    "glm_moe_dsa with shared indexers, CP 2": ("glm_moe_dsa-shared", CP2 | {"freeze_indexer": True}),
    "glm_moe_dsa with an indexer shared by two stages": (
        "glm_moe_dsa-shared",
        PP2 | {"decoder_first_pipeline_num_layers": 3, "freeze_indexer": True},
    ),
    "glm_moe_dsa with indexers shared by virtual stages, contiguous CP 2": (
        "glm_moe_dsa-shared",
        {
            **(PP2 | CP2),
            **{"virtual_pipeline_model_parallel_size": 2, "allgather_cp": True, "freeze_indexer": True},
        },
    ),
    "deepseek_v2, TP 2": ("deepseek_v2", TP2),
    "moonlight, TP 2": ("moonlight", TP2),
    "qwen3_next, TP 2": ("qwen3_next", TP2),
    "qwen3_next, CP 2": ("qwen3_next", CP2),
    "qwen3_next, TP 4, 2 key-value heads": ("qwen3_next", TP4),
    "glm4, TP 4, 2 key-value heads": ("glm4", TP4),
    "gpt_oss, TP 2": ("gpt_oss", TP2 | {"expert_tensor_parallel_size": 1}),
    "gpt_oss, CP 2, EP 2": ("gpt_oss", CP2 | EP2),
}
ROUTER = {
    **{"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.0]},
    "moe_token_dispatcher_type": "alltoall",
}
RATE = 0.01
# Where a gradient is about 0, a smaller one would make a step of its sign, which is that of rounding errors.
EPS = 1e-5


def _log_probs(model, tokens, response):
    logits = model(input_ids=torch.tensor([tokens])).logits[0, -response - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens[-response:])[:, None])[:, 0]


def _transformers_step(path, rollout):
    """The gradient of PPO's loss at equal old and new log-probs, gradient clipping and AdamW."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    choose_first_of_equals(model)
    named = list(model.named_parameters())
    decayed = [p for name, p in named if p.dim() > 1 and not name.endswith("bias")]  # of all experts, 2 dims
    others = [p for name, p in named if p.dim() == 1 or name.endswith("bias")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), eps=EPS)
    for i, tokens in enumerate(rollout["tokens"]):
        log_probs = _log_probs(model, tokens, rollout["response_lengths"][i])
        rollout["rollout_log_probs"][i] = log_probs.tolist()
        mask = torch.tensor(rollout["loss_masks"][i])
        loss = -(log_probs * rollout["rewards"][i] * mask).sum() / mask.sum()
        (loss / len(rollout["tokens"])).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return float(norm), model


def _megatron_step(rank, args, rollout):
    worker = TrainWorker(args)
    worker.start()
    report = worker.train_shard(0, split(args, rollout, worker.parallel_config()))[0]
    weights = {}
    for bucket in HfWeights(args, worker.backend.state.model).buckets(1 << 30):
        weights.update({name: tensor.clone() for name, tensor in bucket})
    return {"report": report, "weights": weights}


@pytest.mark.parametrize("case", CASES)
def test_one_step_agrees_with_transformers(case, tmp_path):
    family, layout = CASES[case]
    sizes = [layout.get(f"{kind}_model_parallel_size", 1) for kind in ("tensor", "pipeline")]
    ranks = max(2, math.prod(sizes) * layout.get("context_parallel_size", 1))
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    tiny_family(family, tmp_path / "before", **(heads if case.startswith("qwen3_next, TP 4") else {}))
    rollout = random_rollout(vocab_size=256)
    norm, model = _transformers_step(tmp_path / "before", rollout)
    flags = {"use_rollout_logprobs": True, "moe_router_bias_update_rate": 0.0, **ROUTER, **layout}
    args = trainer_args(tmp_path / "before", adam_eps=EPS, **flags)
    results = run_ranks(_megatron_step, ranks, args, rollout)
    (report,) = [result["report"] for result in results if result["report"]]
    assert report["train"][0]["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    model.save_pretrained(tmp_path / "after")
    wanted = _stored(tmp_path / "after")
    for result in results:
        for name, weight in result["weights"].items():
            if not name.endswith("proj.bias"):  # some have no gradient but rounding errors
                torch.testing.assert_close(
                    weight, wanted[name], rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
                )


def _stored(path):
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


def test_a_step_moves_biases_of_experts_towards_a_balance(tmp_path):
    model = tiny_family("glm4_moe", tmp_path)
    rollout = random_rollout(vocab_size=256)
    counts = {}

    def count(module, inputs, output):
        counts[module] = counts.get(module, 0) + output[2].flatten().bincount(minlength=8)

    gates = {i: layer.mlp.gate for i, layer in enumerate(model.model.layers) if i > 0}
    for gate in gates.values():
        gate.register_forward_hook(count)
    with torch.no_grad():
        for tokens in rollout["tokens"]:
            model(torch.tensor([tokens]))
    flags = {"use_rollout_logprobs": True, "moe_router_bias_update_rate": RATE, **ROUTER, **EP2}
    results = run_ranks(_megatron_step, 2, trainer_args(tmp_path, **flags), rollout)
    for number, gate in gates.items():
        spare = (counts[gate].float().mean() - counts[gate]).sign()
        expected = gate.e_score_correction_bias + RATE * spare
        for result in results:
            found = result["weights"][f"model.layers.{number}.mlp.gate.e_score_correction_bias"]
            torch.testing.assert_close(found, expected)


def _routers(rank, args):
    """Returns a new trainer's biases of experts, as engines get them, and the dtypes of its routers."""
    worker = TrainWorker(args)
    worker.start()
    weights = {
        n: w for bucket in HfWeights(args, worker.backend.state.model).buckets(1 << 30) for n, w in bucket
    }
    kept = {
        name.rsplit(".", 1)[1]: str(buffer.dtype)
        for chunk in worker.backend.state.model
        for name, buffer in chunk.named_buffers()
        if "router" in name
    }
    return {"biases": {n: w.clone() for n, w in weights.items() if "correction_bias" in n}, "kept": kept}


def test_biases_of_experts_are_not_rounded(tmp_path):
    tiny_family("glm4_moe", tmp_path)
    args = trainer_args(tmp_path, params_dtype=torch.bfloat16, bf16=True, **ROUTER)
    (found,) = run_ranks(_routers, 1, args)
    stored = _stored(tmp_path)
    assert found["biases"] and all(torch.equal(bias, stored[name]) for name, bias in found["biases"].items())
    assert found["kept"] == dict.fromkeys(("expert_bias", "local_tokens_per_expert"), "torch.float32")
