"""Rows of parameters and of tensors, told by numbers: each rule against an order that is written out."""

from types import SimpleNamespace

import pytest
import torch

from slime.models.families.gpt_oss import InterleavedGateUpRule, TransposedRule
from slime.models.rules import (
    ExpertRules,
    FusedGateUpRule,
    GatedQkvRule,
    GateUpRule,
    LayerKind,
    QkvRule,
    Rule,
    StackedRule,
    VocabRule,
    WeightMap,
)
from slime.models.weight_prefix import WeightPrefix

# Two query groups of two query heads each, whose width is 2.
SHAPE = SimpleNamespace(
    **{"num_query_groups": 2, "num_attention_heads": 4, "kv_channels": 2},
    **{"vocab_size": 3, "padded_vocab_size": 5},
    **{"num_layers": 2, "moe_layer_freq": (0, 1), "num_experts": 2, "marked": (1, 0)},
)
QUERY, KEY, VALUE = [*range(10, 18)], [*range(20, 24)], [*range(30, 34)]
GATED = [10, 11, 50, 51, 12, 13, 52, 53, 14, 15, 54, 55, 16, 17, 56, 57]  # each head, and then its gate


def rows(numbers):
    return torch.tensor(numbers)[:, None] * torch.tensor([1, 100])


@pytest.mark.parametrize(
    ("rule", "tensors", "whole"),
    [
        (
            QkvRule(("q", "k", "v")),
            [QUERY, KEY, VALUE],
            [10, 11, 12, 13, 20, 21, 30, 31, 14, 15, 16, 17, 22, 23, 32, 33],
        ),
        (
            GatedQkvRule(("q", "k", "v")),
            [GATED, KEY, VALUE],
            [
                *(10, 11, 12, 13, 50, 51, 52, 53, 20, 21, 30, 31),
                *(14, 15, 16, 17, 54, 55, 56, 57, 22, 23, 32, 33),
            ],
        ),
        (GateUpRule(("gate", "up")), [[1, 2], [3, 4]], [1, 2, 3, 4]),
        (FusedGateUpRule(("both",)), [[1, 2, 3, 4]], [1, 2, 3, 4]),
        (VocabRule(("words",)), [[1, 2, 3]], [1, 2, 3, 0, 0]),
        (Rule(("one",)), [[1, 2, 3]], [1, 2, 3]),
    ],
)
def test_rows_have_their_order(rule, tensors, whole):
    given = [rows(numbers) for numbers in tensors]
    assert torch.equal(rule.merge(given, SHAPE), rows(whole))
    for one in (rule, StackedRule(rule.hf_names, rule, 3)):
        back = one.split(rows(whole), SHAPE)
        assert [part.tolist() for part in back] == [part.tolist() for part in given]
    assert torch.equal(StackedRule(rule.hf_names, rule, 3).merge(given, SHAPE), rows(whole))


@pytest.mark.parametrize(
    ("rule", "size", "held"),
    [
        (Rule(("a",)), 2, [[range(4)], [range(4, 8)]]),
        (Rule(("a",)), 3, [[range(3)], [range(3, 6)], [range(6, 8)]]),
        (Rule(("a",)), 5, [[range(2)], [range(2, 4)], [range(4, 6)], [range(6, 8)], [range(8, 8)]]),
        (GateUpRule(("a", "b")), 2, [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]]),
    ],
)
def test_ranks_hold_neighbouring_rows(rule, size, held):
    """Of gate and up each; and together they hold the whole."""
    for one in (rule, StackedRule(rule.hf_names, rule, 0)):
        assert [one.ranges(8, rank, size) for rank in range(size)] == held
        shards = [torch.tensor([row for part in own for row in part]) for own in held]
        assert one.unshard(shards, 0).tolist() == [*range(8)]


def test_the_experts_of_gpt_oss_lie_transposed_and_gate_and_up_take_turns():
    stored = torch.tensor([[1, 11, 2, 12], [3, 13, 4, 14]])
    rule = InterleavedGateUpRule(("both",))
    whole = torch.tensor([[1, 3], [2, 4], [11, 13], [12, 14]])
    assert torch.equal(rule.merge([stored], SHAPE), whole)
    (back,) = rule.split(whole, SHAPE)
    assert torch.equal(back, stored)
    assert torch.equal(TransposedRule(("a",)).merge([stored], SHAPE), stored.T)
    assert torch.equal(TransposedRule(("a",)).split(stored.T, SHAPE)[0], stored)


ONE_BY_ONE = ExpertRules({"mlp.router.weight": Rule(("gate",))}, {"fc.weight": Rule(("fc",))}, "mlp.{}.")
STACKED = ExpertRules({}, {"fc.weight": Rule(("fc",))}, "mlp.all.", stacked=True)
EXPERT = "mlp.experts.local_experts"


def test_experts_have_rules_of_their_own():
    assert ONE_BY_ONE.names(2) == ["mlp.router.weight", f"{EXPERT}.0.fc.weight", f"{EXPERT}.1.fc.weight"]
    assert ONE_BY_ONE.rule_for(f"{EXPERT}.7.fc.weight") == Rule(("mlp.7.fc",))
    stacked = STACKED.rule_for(f"{EXPERT}.7.fc.weight")
    assert (stacked.hf_names, stacked.expert) == (("mlp.all.fc",), 7)
    assert Rule(("a",)).expert is None
    assert ONE_BY_ONE.rule_for("mlp.router.weight").hf_names == ("gate",)
    assert ONE_BY_ONE.rule_for("mlp.router.bias") is ONE_BY_ONE.rule_for(f"{EXPERT}.7.fc.bias") is None


def weight_map(**changes):
    parts = {
        "of_model": {"words": Rule(("model.words",)), "head": Rule(("lm_head.weight",))},
        "layer_prefix": "model.layers.{}.",
        "of_layer": {"attention": Rule(("attn",)), "mlp.fc": Rule(("fc",))},
        "absent": lambda shape: {"head"},
        "experts": ONE_BY_ONE,
        "kinds": (LayerKind(lambda shape: shape.marked, {"net": Rule(("net",))}, instead_of="attention"),),
    }
    return WeightMap(**parts | changes)


def test_each_layer_has_the_tensors_of_its_kind():
    """The first one has a net in place of attention, the second one experts in place of an MLP."""
    experts = {f"model.layers.1.{name}" for name in ("attn", "gate", "mlp.0.fc", "mlp.1.fc")}
    first = {"model.layers.0.net", "model.layers.0.fc"}
    assert weight_map().hf_names(SHAPE) == {"model.words"} | first | experts
    inside = weight_map(prefix=WeightPrefix("text.", "head."), absent=lambda shape: ())
    renamed = {name.replace("model.", "text.", 1) for name in {"model.words"} | first | experts}
    assert inside.hf_names(SHAPE) == {"head.weight"} | renamed
    beside = LayerKind(lambda shape: None, {"net": Rule(("net",))})
    plain = weight_map(kinds=(beside,), experts=None)
    layers = {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("attn", "fc")}
    assert plain.hf_names(SHAPE) == {"model.words"} | layers
    assert beside.names(["attention"]) == ["attention", "net"]


def test_a_parameter_that_nobody_knows_is_named():
    found = weight_map()
    assert found.rule_for("words") == Rule(("model.words",))
    assert found.rule_for("decoder.layers.12.net") == Rule(("model.layers.12.net",))
    for name in ("decoder.layers.0.nothing", "nothing", f"decoder.layers.0.{EXPERT}.0.nothing"):
        with pytest.raises(ValueError, match=f"parameter '{name}': no Hugging Face counterpart is known"):
            found.rule_for(name)
    assert not found.untrained("anything", 2)
