"""Adapters in PEFT's format: what they say, how they are written, and the numbers that they begin with."""

import math

import pytest
import torch

from slime.adapters import peft_format
from slime.adapters.lora import initial_down, merged
from slime.adapters.peft_config import not_computed, served_config
from slime.adapters.peft_format import read_adapter, tensor_name, write_adapter
from slime.backends.embedded_engine.adapters import read_projections
from slime.config.lora import LoraConfig

RANK, ALPHA = 4, 6.0


def test_the_scale_is_that_of_the_flags_whatever_sglang_makes_of_rslora():
    flags = LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, lora_use_rslora=True)
    config = served_config(flags, ["model.layers.0.mlp.up_proj"])
    assert config["target_modules"] == ["up_proj"]
    assert config["lora_alpha"] / config["r"] == read_projections({}, config, RANK)[1] == flags.lora_scale
    peft_says = {**config, "lora_alpha": ALPHA, "use_rslora": True}
    assert read_projections({}, peft_says, RANK)[1] == flags.lora_scale == ALPHA / 2


@pytest.mark.parametrize(
    ("key", "idle", "wanted"),
    [
        ("peft_type", "LORA", "LOHA"),
        ("bias", "none", "all"),
        ("use_dora", False, True),
        ("lora_bias", False, True),
        ("fan_in_fan_out", False, True),
        ("use_qalora", False, True),
        ("modules_to_save", [], ["lm_head"]),
        ("rank_pattern", {}, {"q_proj": 2}),
        ("alpha_pattern", {}, {"q_proj": 2}),
        ("layer_replication", None, [[0, 4]]),
        ("target_parameters", [], ["mlp.experts.down_proj"]),
        ("trainable_token_indices", {}, [1]),
    ],
)
def test_what_nothing_here_computes_is_named(key, idle, wanted):
    assert not_computed({"r": RANK, key: idle}) == []
    (line,) = not_computed({"r": RANK, key: wanted})
    assert line.startswith(f"says {key} {wanted!r}, which is not computed here")


def write(path):
    tensors = {tensor_name("layers.0.up_proj", part): torch.ones(2, 2) for part in ("lora_A", "lora_B")}
    write_adapter(path, tensors, LoraConfig(lora_rank=2), "base", ["layers.0.up_proj"])
    return tensors


def test_an_adapter_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def fill_the_disk(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    with monkeypatch.context() as failing, pytest.raises(OSError, match="No space left"):
        failing.setattr(peft_format, "save_file", fill_the_disk)
        write(tmp_path / "adapter")
    assert [*tmp_path.iterdir()] == []
    tensors = write(tmp_path / "adapter")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert read_adapter(tmp_path / "adapter").keys() == tensors.keys()


def test_layers_begin_with_numbers_of_their_own_that_are_the_same_in_each_run():
    begun = [
        initial_down(module, RANK, 16, seed) for module, seed in (("a", 1), ("b", 1), ("a", 2), ("a", 1))
    ]
    assert torch.equal(begun[0], begun[3])
    assert not any(torch.equal(begun[0], other) for other in begun[1:3])
    assert 0.5 / math.sqrt(16) < begun[0].abs().max() <= 1 / math.sqrt(16)


def test_what_is_merged_is_rounded_once():
    """Half of a last place and a little more goes up; the half alone, to which the rest rounds, does not."""
    weight, more = torch.ones(1, dtype=torch.bfloat16), torch.tensor([2**-8 + 2**-20])
    assert merged(weight, more).item() == 1 + 2**-7
