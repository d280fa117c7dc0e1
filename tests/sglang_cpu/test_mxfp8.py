"""MXFP8 by SGLang's own code: its quantiser makes the same bits, and its layers are of the same tensors."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.models.checkpoint.weights_dir import WeightsReader
from tests.families import tiny_family
from tools.convert_hf_to_mxfp8 import main as convert

pytestmark = pytest.mark.skipif(
    "SGLANG_USE_CPU_ENGINE" not in os.environ, reason="run by scripts/test-sglang.sh"
)


class Layer(torch.nn.Module):
    """What SGLang asks of a layer whose parameters it makes."""

    tp_group = None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("mxfp8")
    tiny_family("qwen3_moe", root / "plain", moe_intermediate_size=64)
    assert convert(["--model-dir", str(root / "plain"), "--save-dir", str(root / "made")]) == 0
    return root / "plain", root / "made"


def test_sglang_makes_and_reads_the_same_bits(model: tuple[Path, Path]) -> None:
    from sglang.kernels.ops.quantization.mxfp8_amd_gfx95 import _mxfp8_e4m3_quantize_torch
    from sglang.srt.layers.quantization.mxfp8_block_convert import dequant_mxfp8_2d_to_bf16

    plain, made = (load_file(path / "model.safetensors") for path in model)
    with WeightsReader(model[1]) as reader:
        for name in reader.quantized:
            codes, scales = made[name], made[f"{name}_scale_inv"]
            theirs = _mxfp8_e4m3_quantize_torch(plain[name])
            assert torch.equal(theirs[0].view(torch.uint8), codes.view(torch.uint8)), name
            assert torch.equal(theirs[1], scales), name
            assert torch.equal(dequant_mxfp8_2d_to_bf16(codes, scales), reader.read(name).bfloat16()), name
        assert len(reader.quantized) > 50


def test_its_layers_are_of_the_tensors_that_the_converter_writes(model: tuple[Path, Path]) -> None:
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
    from sglang.srt.layers.quantization.utils import is_layer_skipped

    made = load_file(model[1] / "model.safetensors")
    described = json.loads((model[1] / "config.json").read_text())["quantization_config"]
    config = Fp8Config.from_config(described)
    assert (config.get_name(), config.weight_block_size) == ("mxfp8", [1, 32])
    for name in [name for name in made if name.endswith("weight") and made[name].dim() == 2]:
        module = name.removesuffix(".weight")
        assert is_layer_skipped(module, config.ignored_layers) == (f"{name}_scale_inv" not in made)
        if f"{name}_scale_inv" in made:
            layer, (rows, columns) = Layer(), made[name].shape
            sizes = rows, columns, [rows], columns, rows
            Fp8LinearMethod.create_fp8_weight_(layer, True, config, True, *sizes, torch.bfloat16, None, True)
            for part, wanted in layer.named_parameters():
                found = made[f"{module}.{part}"]
                assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    for fused in ("self_attn.qkv_proj", "mlp.experts"):
        assert not is_layer_skipped(f"model.layers.0.{fused}", config.ignored_layers)
