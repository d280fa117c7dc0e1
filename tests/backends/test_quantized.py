"""Quantised checkpoints in the trainers and the embedded engine: weights are the dequantised ones."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from slime.backends.embedded_engine.admission import Limits
from slime.backends.embedded_engine.build import build_executor
from slime.backends.embedded_engine.checkpoint import load_checkpoint
from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.model_config import ModelConfig
from slime.backends.embedded_engine.weight_updater import WeightUpdater
from slime.config.run import run_config
from slime.models.checkpoint.stored_format import StoredFormat
from slime.models.checkpoint.weights_dir import WeightsReader
from tests.backends.fsdp_utils.architectures import load, model_args
from tests.families import tiny_family
from tests.megatron_harness import make_args, run_ranks
from tools.convert_hf_to_fp8 import main as to_fp8
from tools.convert_hf_to_int4 import main as to_int4
from tools.convert_hf_to_mxfp4 import main as to_mxfp4
from tools.convert_hf_to_mxfp8 import main as to_mxfp8

KINDS = ("fp8", "int4", "mxfp4", "mxfp8")
LIMITS = Limits(rows=4, tokens=512, chunk=64, context=128)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """Mixtures of experts in each of these forms; the weights that each stands for."""
    root = tmp_path_factory.mktemp("quantized")
    tiny_family("qwen2_moe", root / "plain")
    words = ["--model-dir", str(root / "plain"), "--save-dir"]
    assert to_fp8([*words, str(root / "fp8"), "--block-size", "32", "24"]) == 0
    assert to_int4([*words, str(root / "int4"), "--group-size", "16"]) == 0
    tiny_family("gpt_oss", root / "sinks", num_hidden_layers=2)
    assert to_mxfp4(["--model-dir", str(root / "sinks"), "--save-dir", str(root / "mxfp4")]) == 0
    tiny_family("qwen2_moe", root / "wide", moe_intermediate_size=64, shared_expert_intermediate_size=96)
    assert to_mxfp8(["--model-dir", str(root / "wide"), "--save-dir", str(root / "mxfp8")]) == 0
    found = {}
    for kind in KINDS:
        with WeightsReader(root / kind) as reader:
            assert reader.quantized
            found[kind] = root / kind, dict(reader.items())
    return found


def _megatron(rank, runs):
    from slime.backends.megatron_utils.hf_weights import HfWeights, load_hf_weights
    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.model_provider import get_model
    from slime.training.hf_export import ExportBase, save_hf_model_to_path

    init(run_config(runs[0][0]))
    for args, target in runs:
        model = get_model(run_config(args))
        load_hf_weights(args, model, args.hf_checkpoint)
        save_hf_model_to_path(ExportBase.of(run_config(args)), target, HfWeights(args, model))


def test_megatron_trains_and_exports_the_dequantised_weights(quantized, tmp_path):
    layout = {
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "expert_model_parallel_size": 2,
    }
    runs = [
        (
            make_args(path, **layout, moe_router_load_balancing_type=["none"], moe_aux_loss_coeff=[0.0]),
            tmp_path / kind,
        )
        for kind, (path, _) in quantized.items()
    ]
    run_ranks(_megatron, 2, runs)
    for kind, (_, weights) in quantized.items():
        with WeightsReader(tmp_path / kind) as reader:
            exported = dict(reader.items())
        assert exported.keys() == weights.keys()
        assert all(torch.equal(exported[name], weights[name]) for name in weights)
        assert "quantization_config" not in json.loads((tmp_path / kind / "config.json").read_text())


def _fsdp(rank, paths):
    from slime.backends.fsdp_utils.hf_weights import FsdpHfTensors

    found = []
    for path in paths:
        model = load(model_args(path))
        (bucket,) = FsdpHfTensors(model, torch.float32).buckets(1 << 30)
        found.append({name: tensor.clone() for name, tensor in bucket})
    return found


def test_fsdp_trains_the_dequantised_weights(quantized):
    paths = [str(path) for path, _ in quantized.values()]
    (found,) = run_ranks(_fsdp, 1, paths)
    for exported, (_, weights) in zip(found, quantized.values(), strict=True):
        assert exported.keys() == weights.keys()
        assert all(torch.equal(exported[name], weights[name]) for name in weights)


@pytest.mark.parametrize("kind", KINDS)
def test_the_embedded_engine_serves_the_dequantised_weights(quantized, kind):
    path, weights = quantized[kind]
    _, served = build_executor(path, ModelConfig.from_directory(path), LIMITS)
    load_checkpoint(served, path)
    assert served.named.keys() == weights.keys()
    assert all(torch.equal(served.named[name], weights[name]) for name in weights)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5_moe", "gpt_oss"])
def test_an_update_leaves_the_embedded_engine_as_loading_would(family, tmp_path):
    """With biases of experts, which are float32 in an engine of bfloat16; with experts in one tensor."""
    tiny_family(family, tmp_path / "plain")
    path = tmp_path / "quantised"
    words = ["--model-dir", str(tmp_path / "plain"), "--save-dir", str(path)]
    assert (to_mxfp4(words) if family == "gpt_oss" else to_fp8([*words, "--block-size", "32", "24"])) == 0
    config = replace(ModelConfig.from_directory(path), dtype=torch.bfloat16)
    _, served = build_executor(path, config, LIMITS)
    load_checkpoint(served, path)
    wanted = served.copy()
    assert family != "deepseek_v3" or torch.float32 in {tensor.dtype for tensor in wanted.values()}
    for tensor in served.named.values():
        tensor.zero_()
    updater = WeightUpdater(SimpleNamespace(released=set()), served, StoredFormat(path))
    updater._load([*load_file(path / "model.safetensors").items()])
    assert all(torch.equal(served.named[name], wanted[name]) for name in wanted)


_EXPERT = "model.layers.0.mlp.experts.1.down_proj.weight"
_EXPERTS = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("kind", "spec", "said"),
    [
        ("fp8", (_EXPERT, torch.bfloat16, (64, 48)), "torch.bfloat16 .*wanted: torch.float8_e4m3fn"),
        ("fp8", (f"{_EXPERT}_scale_inv", torch.float32, (2, 3)), r"wanted: torch.float32 \[2, 2\]"),
        ("int4", (_EXPERT, torch.bfloat16, (64, 48)), "is stored as"),
        ("mxfp4", (_EXPERTS, torch.bfloat16, (4, 96, 64)), "is stored as .*_blocks, .*_scales"),
        ("mxfp4", (f"{_EXPERTS}_scales", torch.uint8, (4, 64, 2)), r"wanted: torch.uint8 \[4, 64, 3\]"),
        ("mxfp8", (f"{_EXPERT}_scale_inv", torch.float32, (64, 2)), r"wanted: torch.uint8 \[64, 2\]"),
        ("int4", ("model.norm.weight", torch.bfloat16, (65,)), r"shape \[65\]"),
        ("fp8", ("lm_head.weight", torch.float8_e4m3fn, (256, 64)), "wanted: a floating point dtype"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_received(quantized, kind, spec, said):
    path = quantized[kind][0]
    _, served = build_executor(path, ModelConfig.from_directory(path), LIMITS)
    updater = WeightUpdater(SimpleNamespace(released=set()), served, StoredFormat(path))
    updater.session = "all"
    updater.groups = SimpleNamespace(
        check=lambda name: None, device=lambda name: "cpu", receive=lambda *_: pytest.fail("received")
    )
    with pytest.raises(BadRequest, match=said):
        updater.from_group("group", [spec], "flattened_bucket", None, False)
