"""Sparse attention in the trainer: it matters, it is recomputed alike, and engines agree with it."""

import pytest
import torch

from slime.backends.embedded_engine.admission import Limits
from slime.backends.embedded_engine.build import build_executor
from slime.backends.embedded_engine.checkpoint import load_checkpoint
from slime.backends.embedded_engine.model_config import ModelConfig
from slime.config.run import run_config
from tests.families import tiny_family
from tests.megatron_harness import make_args, run_ranks

pytestmark = pytest.mark.slow

LENGTHS = [9, 30, 1, 15]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RECOMPUTATIONS = [{}, FULL, {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}]
EXPERTS = {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.0]}
LIMITS = Limits(rows=4, tokens=512, chunk=64, context=128)


def rows():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(256, (length,), generator=generator) for length in LENGTHS]


def _outcomes(rank, runs):
    from slime.backends.megatron_utils.initialize import init

    init(run_config(runs[0]))
    return [_outcome(args) for args in runs]


def _outcome(args):
    """Log-probs of a packed batch's tokens, and the gradients of their sum."""
    from slime.backends.megatron_utils.data import _packed_seq_params
    from slime.backends.megatron_utils.hf_weights import load_hf_weights
    from slime.backends.megatron_utils.model_provider import get_model

    (model,) = get_model(run_config(args))
    load_hf_weights(args, [model], args.hf_checkpoint)
    model.train()
    tokens = torch.cat(rows())
    params = _packed_seq_params(LENGTHS, tokens.device)
    logits = model(tokens[None], None, None, packed_seq_params=params)[0]
    found = logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
    found.sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    return {"log_probs": found.detach(), "gradients": gradients, "frozen": frozen}


@pytest.fixture(scope="module", params=["deepseek_v32", "glm_moe_dsa-shared"])
def family(request, tmp_path_factory):
    """(name, directory, what the trainer computes with each kind of recomputation and with all keys)."""
    path = tmp_path_factory.mktemp("hf")
    tiny_family(request.param, path)
    flags = [{"freeze_indexer": True, **recomputed} for recomputed in RECOMPUTATIONS]
    runs = [make_args(path, **EXPERTS, **each) for each in (*flags, {"dsa_indexer_topk": 64})]
    return request.param, path, run_ranks(_outcomes, 1, runs)[0]


def test_attention_to_all_keys_would_be_another_model(family):
    _, _, (sparse, *_, dense) = family
    gap = (sparse["log_probs"] - dense["log_probs"]).abs()
    within = torch.cat([torch.arange(n) for n in LENGTHS])[: len(gap)] < 6
    assert gap[within].max() < 1e-5
    assert gap[~within].median() > 1e-2


def test_recomputed_layers_choose_the_same_keys(family):
    _, _, (wanted, *others, _) = family
    for found in others:
        assert torch.equal(found["log_probs"], wanted["log_probs"])
        assert found["gradients"].keys() == wanted["gradients"].keys()
        for name, gradient in wanted["gradients"].items():
            torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-5, atol=1e-6)


def test_the_indexers_alone_are_frozen(family):
    name, _, (frozen, *_, free) = family
    layers = (0, 2) if "shared" in name else range(4)
    parts = (
        "linear_wq_b.weight",
        "linear_wk.weight",
        "k_norm.weight",
        "k_norm.bias",
        "linear_weights_proj.weight",
    )
    names = [f"decoder.layers.{layer}.self_attention.indexer.{part}" for layer in layers for part in parts]
    assert sorted(frozen["frozen"]) == sorted(names) and free["frozen"] == []
    assert not any("indexer" in name for name in free["gradients"])


@torch.inference_mode()
def test_engines_give_the_log_probs_of_the_trainer(family):
    """Prompts of several lengths, the rest token by token."""
    _, path, (trained, *_) = family
    executor, weights = build_executor(path, ModelConfig.from_directory(path), LIMITS)
    load_checkpoint(weights, path)
    begin = 0
    for row in rows():
        ids, prompt = row.tolist(), max(1, len(row) // 3)
        hidden = [executor.prefill([ids[:prompt]], 0)[0]]
        for position, token in enumerate(ids[prompt:], prompt):
            one = torch.tensor([token]), torch.tensor([position])
            hidden.append(executor.decode(*one, 0, position + 1))
        logits = executor.model.logits(torch.cat(hidden))
        found = logits.log_softmax(-1)[:-1].gather(-1, row[1:, None])[:, 0]
        expected = trained["log_probs"][begin : begin + len(row) - 1]
        assert len(row) == 1 or (found - expected).abs().max() < 1e-5
        begin += len(row)
