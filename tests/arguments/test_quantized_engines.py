"""Which quantised engines can be given the trainer's weights."""

import pytest
import torch
from safetensors.torch import save_file

from slime.arguments.validate.quantized_engines import bad_formats, packed_beyond_experts
from slime.arguments.validate.served_models import PLACEHOLDER, ModelConfig, ServerGroupConfig
from tests.run_args import run_args, with_groups

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
POWERS = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
PER_TENSOR = {"quant_method": "fp8"}


def compressed(**weights):
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


GROUPS = compressed(num_bits=4, type="int", strategy="group", group_size=32)
CHANNELS = compressed(num_bits=8, type="float", strategy="channel")


def served(path, *overrides, update_weights=True):
    groups = [ServerGroupConfig("regular", 1, overrides=each) for each in overrides or ({},)]
    placeholder = ServerGroupConfig(PLACEHOLDER, 1, overrides={"quantization": "awq"})
    return ModelConfig("m", str(path), update_weights, 1, [*groups, placeholder])


def run(path, *models, **flags):
    given = {
        **{"hf_checkpoint": str(path), "debug_rollout_only": False, "rollout_external": False},
        **{"rollout_engine": "sglang", "check_weight_update_equal": False, "fp32": False, "fp16": False},
        **{"served_models": list(models) or [served(path)], **flags},
    }
    return list(bad_formats(with_groups(given)))


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (None, None),
        (BLOCKS, None),
        (GROUPS, None),
        (POWERS, None),
        (PER_TENSOR, "float8 weights that are not in blocks"),
        (CHANNELS, "float8 weights that are not in blocks"),
    ],
)
def test_sglang_takes_updates_in_some_formats(altered_checkpoint, described, said):
    path = altered_checkpoint(quantization_config=described)
    messages = run(path)
    assert len(messages) == (said is not None)
    assert all(said in message and message.startswith(f"{path}: ") for message in messages)
    assert len(run(path, rollout_external=True, served_models=[])) == len(messages)
    for harmless in (
        {"rollout_engine": "embedded"},
        {"debug_rollout_only": True},
        {"served_models": [served(path, update_weights=False)]},
    ):
        assert not run(path, **harmless)


def test_sglang_takes_no_updates_in_mxfp4(altered_checkpoint):
    path = altered_checkpoint(quantization_config={"quant_method": "mxfp4"}, model_type="gpt_oss")
    (message,) = run(path)
    assert message.startswith(f"{path}: SGLang packs MXFP4 weights anew")
    assert "tools/fp8_cast_bf16.py" in message
    assert run(path, rollout_external=True, served_models=[]) == [message]
    assert not run(path, served(path, update_weights=False))
    # bfloat16 holds all of these numbers.
    assert not run(path, rollout_engine="embedded", check_weight_update_equal=True)


@pytest.mark.parametrize(
    ("described", "flags", "refused"),
    [
        (None, {"quantization": "fp8"}, True),
        (None, {"quantization": "fp8", "load_format": "flash_rl"}, False),
        (None, {"quantization": "unquant"}, False),
        (BLOCKS, {"quantization": "fp8"}, False),
        (BLOCKS, {"quantization": "awq"}, True),
        (BLOCKS, {"quantization": "fp8", "speculative_algorithm": "EAGLE"}, False),
        (GROUPS, {"quantization": "compressed-tensors"}, False),
        (GROUPS, {"speculative_algorithm": "EAGLE"}, True),
        (GROUPS, {"moe_runner_backend": "deep_gemm"}, False),
        (POWERS, {"quantization": "mxfp8"}, False),
        (POWERS, {"quantization": "fp8"}, True),
        (None, {"quantization": "mxfp8"}, True),
        (POWERS, {"speculative_algorithm": "EAGLE"}, True),
        (POWERS, {"moe_runner_backend": "deep_gemm"}, True),
        (POWERS, {"moe_runner_backend": "flashinfer_trtllm"}, False),
    ],
)
def test_options_that_change_the_weights_are_refused(altered_checkpoint, described, flags, refused):
    path = altered_checkpoint(quantization_config=described)
    overridden = run(path, served(path, flags))
    assert len(overridden) == refused
    everywhere = run(path, **{f"sglang_{name}": value for name, value in flags.items()})
    assert everywhere == overridden
    for message in overridden:
        assert message.startswith(tuple(f"--sglang-{name.replace('_', '-')}" for name in flags))
    assert not run(path, served(path, flags), rollout_engine="embedded")


def test_all_updates_have_one_format(altered_checkpoint, checkpoint):
    path = altered_checkpoint(quantization_config=BLOCKS)
    (message,) = run(path, served(path), served(checkpoint))
    assert f"{path} and {checkpoint} have different quantization_config" in message
    assert not run(path, served(path), served(checkpoint, update_weights=False))


@pytest.mark.parametrize(
    ("described", "trained_in", "refused"),
    [
        (BLOCKS, "bf16", False),
        (BLOCKS, "fp32", False),
        (BLOCKS, "fp16", True),
        (BLOCKS | {"scale_fmt": "ue8m0"}, "fp16", True),
        (POWERS, "bf16", False),
        (POWERS, "fp16", True),
        (None, "fp16", False),
    ],
)
def test_what_is_rounded_does_not_come_back_equal(altered_checkpoint, described, trained_in, refused):
    path = altered_checkpoint(quantization_config=described)
    messages = run(path, check_weight_update_equal=True, **{trained_in: True})
    assert [message.split(":")[0] for message in messages] == ["--check-weight-update-equal"] * refused


@pytest.mark.parametrize("packed", ["mlp.experts.0.up_proj", "self_attn.q_proj"])
def test_sglang_replaces_packed_experts_alone(altered_checkpoint, packed):
    path = altered_checkpoint(quantization_config=GROUPS)
    name = f"model.layers.0.{packed}.weight"
    words = torch.empty(0, dtype=torch.int32)
    save_file({f"{name}_packed": words, f"{name}_scale": torch.empty(0)}, path / "model.safetensors")
    args = {"hf_checkpoint": str(path), "debug_rollout_only": False, "rollout_external": False}
    args |= {"served_models": [served(path)]}
    messages = list(packed_beyond_experts(run_args(**args, rollout_engine="sglang")))
    assert len(messages) == ("experts" not in packed)
    assert all(f"{path}: {name} is packed" in message for message in messages)
    assert not list(packed_beyond_experts(run_args(**args, rollout_engine="embedded")))
