"""Mixtures of experts in the engine: their logits, and updates under the names of a checkpoint."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from slime.backends.embedded_engine.checkpoint import load_checkpoint
from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.executor import Executor
from slime.backends.embedded_engine.kv_cache import KVCache
from slime.backends.embedded_engine.mlp import ExpertWeights
from slime.backends.embedded_engine.model import CausalLM
from slime.backends.embedded_engine.model_config import ModelConfig
from slime.backends.embedded_engine.parameters import Parameters
from slime.config.model import MoeShape
from tests.engines.embedded import make_checkpoint

IDS = [(7 * i) % 256 for i in range(50)]
VARIANTS = {
    "weights that sum up to 1": {},
    "shares of all experts": {"norm_topk_prob": False},
    "one expert": {"norm_topk_prob": False, "num_experts_per_tok": 1},
    "all experts": {"num_experts_per_tok": 6},
    "tied": {"tie_word_embeddings": True},
}


def logits_of(config, parameters):
    cache = KVCache(config, 1, len(IDS))
    model = CausalLM(config, parameters, len(IDS))
    hidden = Executor(model, cache).prefill([IDS], 0)
    return model.logits(hidden[0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(tmp_path, variant):
    model = make_checkpoint(tmp_path, "qwen3_moe", **VARIANTS[variant])
    config = ModelConfig.from_directory(tmp_path)
    parameters = Parameters(config)
    load_checkpoint(parameters, tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0]
        assert (logits_of(config, parameters) - expected).abs().max() < 1e-5
    assert expected.std() > 0.1


def test_an_update_replaces_every_weight_in_place(tmp_path):
    make_checkpoint(tmp_path / "old", "qwen3_moe", seed=0)
    model = make_checkpoint(tmp_path / "new", "qwen3_moe", seed=1)
    config = ModelConfig.from_directory(tmp_path / "old")
    parameters = Parameters(config)
    load_checkpoint(parameters, tmp_path / "old")
    place = parameters.flat.data_ptr()
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    for name in sorted(tensors):
        parameters.update([(name, tensors[name])])
    assert parameters.flat.data_ptr() == place
    with torch.no_grad():
        gap = (logits_of(config, parameters) - model(torch.tensor([IDS])).logits[0]).abs().max()
    assert gap < 1e-5


@pytest.mark.parametrize(
    ("name", "shape", "complaint"),
    [
        ("model.layers.0.mlp.experts.6.down_proj.weight", (64, 40), "this qwen3_moe model has none"),
        ("model.layers.1.mlp.experts.0.down_proj.weight", (64, 40), "this qwen3_moe model has none"),
        ("model.layers.0.mlp.experts.0.down_proj.weight", (40, 64), r"shape \[40, 64\] .wanted: \[64, 40\]"),
        ("model.layers.0.mlp.gate_proj.weight", (96, 64), "this qwen3_moe model has none"),
    ],
)
def test_a_tensor_without_a_place_is_refused(tmp_path, name, shape, complaint):
    make_checkpoint(tmp_path, "qwen3_moe")
    parameters = Parameters(ModelConfig.from_directory(tmp_path))
    with pytest.raises(BadRequest, match=complaint):
        parameters.update([(name, torch.zeros(shape))])


def test_the_output_of_a_layer_is_the_weighted_sum_of_its_experts():
    """In float64, one token and one expert after the other."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    shape = MoeShape(
        num_experts=5,
        moe_router_topk=2,
        moe_ffn_hidden_size=3,
        moe_layer_freq=(1,),
        moe_router_pre_softmax=False,
    )
    layer = ExpertWeights(shape, draw(5, 4), draw(5, 6, 4), draw(5, 4, 3))
    x = draw(2, 7, 4)
    expected = torch.zeros_like(x)
    for index in [(i, j) for i in range(2) for j in range(7)]:
        scores = layer.router @ x[index]
        chosen = sorted(range(5), key=lambda e, scores=scores: -scores[e])[:2]
        total = sum(scores[e].exp() for e in chosen)
        for e in chosen:
            gate, up = (layer.gate_up[e] @ x[index]).chunk(2)
            expected[index] += scores[e].exp() / total * (layer.down[e] @ (F.silu(gate) * up))
    torch.testing.assert_close(layer.forward(x), expected, rtol=1e-6, atol=1e-6)
