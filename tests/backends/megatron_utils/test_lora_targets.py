"""Layers that no adapter can be beside are refused by name, before anything is attached."""

from types import SimpleNamespace

import pytest
import torch

from slime.backends.megatron_utils import lora
from slime.backends.megatron_utils.latent_attention import ReplicatedLinear
from slime.config.lora import LoraConfig


class Kept(ReplicatedLinear):
    """A layer of a kind that has adapters; this one speaks to other experts by itself."""

    explicit_expert_comm = True

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.weight = torch.nn.Parameter(torch.zeros(4, 4))


@pytest.mark.parametrize("kind", [lambda: torch.nn.Linear(4, 4), Kept])
def test_a_layer_of_another_kind_has_no_adapter(kind):
    linear = kind()
    shape = SimpleNamespace(model_type="qwen3", num_layers=1)
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    said = (
        rf"--lora-rank 2: model\.layers\.0\.self_attn\.o_proj is a {type(linear).__name__}, which has no "
        r"adapter here \(wanted: --lora-exclude-modules o_proj\)"
    )
    with pytest.raises(ValueError, match=said):
        lora._adapters_of(name, linear, LoraConfig(lora_rank=2), shape, 1)
    left_out = LoraConfig(lora_rank=2, lora_exclude_modules=["o_proj"])
    assert lora._adapters_of(name, linear, left_out, shape, 1) == []
