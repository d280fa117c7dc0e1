"""Which layers get an adapter: those that the Megatron trainer gives one, and no others by name."""

import pytest
import torch

from slime.adapters.linears import linears
from slime.backends.fsdp_utils.lora import Adapter, adapters_of, attach_adapters, require_used, turn_off
from slime.backends.fsdp_utils.model import empty_model
from slime.backends.megatron_utils import model_on_paper
from slime.backends.megatron_utils.lora import adapter_rules
from slime.config.lora import LoraConfig
from slime.config.model import ModelConfig
from slime.config.run import filled
from tests.backends.fsdp_utils.architectures import save
from tests.families import ALL, save_tiny_config, tiny_family
from tests.megatron_harness import save_tiny_hf
from tests.trainer_batches import trainer_args

EXPERTS = {
    **{"moe_router_load_balancing_type": ["none"], "moe_aux_loss_coeff": [0.0]},
    **{"moe_router_bias_update_rate": 0.0, "moe_token_dispatcher_type": "alltoall"},
}
# Gated delta nets have no adapters, megatron-core's layers of indexers none either.
FAMILIES = [name for name in ALL if "linear_num_key_heads" not in ALL[name][1] and "dsa" not in name]
FAMILIES.remove("deepseek_v32")
# transformers has no model of these without code of their own.
FAMILIES = [name for name in FAMILIES if name not in ("mimo", "kimi_k2")]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_is_the_same_with_either_trainer(family, tmp_path):
    save_tiny_config(family, tmp_path)
    args = trainer_args(tmp_path, lora_rank=2, **EXPERTS)
    rule_for = adapter_rules(filled(ModelConfig, args))
    names = [p.name for p in model_on_paper.parameters(args, "actor") if ".adapters." in p.name]
    wanted = {rule_for(name).hf_names[0] for name in names}
    model = _adapted(tmp_path, LoraConfig(lora_rank=2))
    found = {name for adapter in adapters_of(model).values() for name, _ in adapter.parts()}
    assert found == wanted and found


def _adapted(path, config):
    model = empty_model(path, trust_remote_code=False)
    attach_adapters(model, config, seed=1)
    return model


def test_indexers_have_none(tmp_path):
    save_tiny_config("glm_moe_dsa", tmp_path)
    names = [*adapters_of(_adapted(tmp_path, LoraConfig(lora_rank=2)))]
    assert any("self_attn" in name for name in names) and not any("indexer" in name for name in names)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("moe"), "qwen3_moe")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_target_modules": ["q_proj", "lm_head"]}, "names lm_head, which has no adapter here"),
        ({"lora_target_modules": ["mlp.gate"]}, r"names model.layers.0.mlp.gate, which has no adapter here"),
        (
            {"lora_target_modules": ["down_proj"]},  # of the dense layer, and of experts
            "names model.layers.0.mlp.experts.0.down_proj, which has no adapter here",
        ),
        (
            {"lora_target_modules": ["q_proj", "c_attn"]},
            "--lora-target-modules c_attn: no linear layer of Qwen3MoeForCausalLM (wanted: all-linear, a "
            "name such as model.layers.1.mlp.up_proj, its end, or a regex of all of it)",
        ),
        (
            {"lora_target_modules": ["q_proj", "input_layernorm"]},
            "--lora-target-modules input_layernorm: no linear layer of Qwen3MoeForCausalLM (wanted: ",
        ),
        (
            {"lora_target_modules": ["q_proj"], "lora_exclude_modules": [r".*layers.*"]},
            "--lora-target-modules q_proj --lora-exclude-modules .*layers.*: no linear layer is a target",
        ),
    ],
)
def test_what_has_no_adapter_is_named(mixture, changes, message):
    with pytest.raises(ValueError) as caught:
        _adapted(mixture, LoraConfig(lora_rank=2, **changes))
    assert message in str(caught.value)


def test_an_adapter_has_the_format_of_its_layer():
    adapter = Adapter("layer", torch.nn.Linear(4, 6, dtype=torch.bfloat16), LoraConfig(lora_rank=2), seed=1)
    assert {param.dtype for param in adapter.parameters()} == {torch.bfloat16}


def test_what_is_excluded_may_be_named(mixture):
    config = LoraConfig(lora_rank=2, lora_target_modules=["down_proj"], lora_exclude_modules=[r".*experts.*"])
    assert [*adapters_of(_adapted(mixture, config))] == ["model.layers.1.mlp.down_proj.weight"]


def test_layers_that_are_not_torch_s_have_none(tmp_path):
    path = save(tmp_path, "GPT2")
    with pytest.raises(ValueError, match="--lora-target-modules all-linear: no linear layer is a target"):
        _adapted(path, LoraConfig(lora_rank=2))
    with pytest.raises(ValueError, match=r"names transformer\.h\.0\.attn\.c_attn, which has no adapter here"):
        _adapted(path, LoraConfig(lora_rank=2, lora_target_modules=["c_attn"]))


def test_the_base_is_frozen_and_an_adapter_adds_to_the_output_until_it_is_turned_off(tmp_path):
    model = tiny_family("qwen3", tmp_path)
    ids = torch.arange(12)[None] * 5 % 256
    with torch.no_grad():
        base = model(input_ids=ids).logits
        model._weight_prefix, model._weight_conversions = empty_model(tmp_path, False)._weight_prefix, []
        attach_adapters(model, LoraConfig(lora_rank=2), seed=1)
        assert torch.equal(model(input_ids=ids).logits, base)
        for adapter in adapters_of(model).values():
            adapter.lora_B.normal_()
        assert not torch.equal(model(input_ids=ids).logits, base)
        turn_off(model)
        assert torch.equal(model(input_ids=ids).logits, base)
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert trained == {f"{name}.adapters.lora_{part}" for name in linears(model) for part in "AB"}


def test_an_adapter_that_nothing_computes_is_named(tmp_path):
    model = tiny_family("qwen3", tmp_path)
    model._weight_prefix, model._weight_conversions = empty_model(tmp_path, False)._weight_prefix, []
    attach_adapters(model, LoraConfig(lora_rank=2, lora_target_modules=["q_proj", "down_proj"]), seed=1)
    mlp = model.model.layers[2].mlp
    mlp.forward = lambda x: torch.nn.functional.linear(mlp.up_proj(x), mlp.down_proj.weight)
    model(input_ids=torch.tensor([[1, 2, 3]]))
    with pytest.raises(ValueError) as caught:
        require_used(model)
    assert "model.layers.2.mlp.down_proj has an adapter that nothing computes" in str(caught.value)
    assert "(wanted: --lora-exclude-modules down_proj)" in str(caught.value)
    model.model.layers[2].mlp.down_proj(torch.zeros(1, 96))
    require_used(model)
