"""Multi-token prediction (MTP) layers: their names, by family, and which tensors are theirs."""

from types import SimpleNamespace

import pytest
import torch

from slime.config.mtp import MtpConfig
from slime.models.decoder import DECODER_WEIGHTS
from slime.models.mtp import (
    DEEPSEEK_MTP,
    MIMO_MTP,
    QWEN_MTP,
    HiddenFirstRule,
    behind_last_layer,
    is_copy,
    trained_mtp_layers,
)
from slime.models.rules import Rule


def inner(name):
    return Rule((f"inner.{name}",)) if name == "norm.weight" else None


@pytest.mark.parametrize(
    ("rules", "own", "within"),
    [
        (DEEPSEEK_MTP, "model.layers.62.enorm.weight", "model.layers.62.inner.norm.weight"),
        (MIMO_MTP, "model.mtp_layers.1.token_layernorm.weight", "model.mtp_layers.1.inner.norm.weight"),
        (QWEN_MTP, "mtp.pre_fc_norm_embedding.weight", "mtp.layers.1.inner.norm.weight"),
    ],
)
def test_families_name_them_in_their_own_way(rules, own, within):
    assert rules.rule_for("mtp.layers.1.enorm.weight", 61, inner) == Rule((own,))
    assert rules.rule_for("mtp.layers.1.transformer_layer.norm.weight", 61, inner) == Rule((within,))
    for other in ("mtp.layers.1.norm.weight", "mtp.layers.1.transformer_layer.x", "decoder.layers.1.x"):
        assert rules.rule_for(other, 61, inner) is None


def test_their_parameters_are_their_own_and_those_of_the_layer_within():
    names = MIMO_MTP.names(2, ["a", "b"])
    own = ["enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight"]
    each = [*own, "transformer_layer.a", "transformer_layer.b"]
    assert names == [f"mtp.layers.{layer}.{name}" for layer in (0, 1) for name in each]
    assert MIMO_MTP.names(0, ["a"]) == []


def test_mimo_has_the_hidden_state_before_the_embedding():
    stored, ours = (
        torch.tensor([[1, 2, 11, 12], [3, 4, 13, 14]]),
        torch.tensor([[11, 12, 1, 2], [13, 14, 3, 4]]),
    )
    rule = HiddenFirstRule(("a",))
    assert torch.equal(rule.merge([stored], None), ours)
    assert torch.equal(rule.split(ours, None)[0], stored)


def test_tensors_behind_the_last_layer_and_copies_are_known_by_their_names():
    assert behind_last_layer("model.layers.61.enorm.weight", 61)
    assert behind_last_layer("model.layers.62.enorm.weight", 61)
    assert not behind_last_layer("model.layers.60.mlp.weight", 61)
    assert not behind_last_layer("model.norm.weight", 0)
    copies = ("embed_tokens", "shared_head.head", "shared_head.norm", "enorm")
    assert [is_copy(f"model.layers.61.{name}.weight") for name in copies] == [True, True, False, False]


@pytest.mark.parametrize(
    ("layers", "trains", "count"), [(None, True, 0), (2, True, 2), (2, False, 0), (None, False, 0)]
)
def test_they_are_trained_where_flags_say_so(layers, trains, count):
    assert trained_mtp_layers(MtpConfig(mtp_num_layers=layers, enable_mtp_training=trains)) == count


def test_a_model_has_as_many_as_it_is_told():
    shape = SimpleNamespace(
        **{"num_layers": 1, "add_qkv_bias": False, "qk_layernorm": False},
        **{"untie_embeddings_and_output_weights": False},
    )
    weights = DECODER_WEIGHTS.__class__(**{**vars(DECODER_WEIGHTS), "mtp": MIMO_MTP})
    without, one = weights.hf_names(shape), weights.hf_names(shape, mtp_layers=1)
    assert without == DECODER_WEIGHTS.hf_names(shape)
    more = one - without
    assert {name.split(".")[1] for name in more} == {"mtp_layers"} and len(more) == 4 + 9
    assert "model.mtp_layers.0.self_attn.q_proj.weight" in more
    assert "model.mtp_layers.0.self_attn.q_proj.bias" not in more
