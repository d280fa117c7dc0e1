"""What nothing has trained goes back to the engines as the bits that the checkpoint has, in every format.

Codes and scales are drawn, so that they are what no rule of ours would choose: codes of the whole range,
groups that use little of it, scales of 24 bits.
"""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.config.run import run_config
from slime.models.checkpoint.stored_format import StoredFormat
from slime.utils.types import EngineEndpoint
from slime.weight_sync.update import WeightUpdate
from tests.backends.fsdp_utils.architectures import load, model_args
from tests.families import tiny_family
from tests.megatron_harness import make_args, run_ranks, save_tiny_hf
from tests.weight_sync.test_handle import Recorder

pytestmark = pytest.mark.slow

GROUP = 16
E8M0 = torch.float8_e8m0fnu


def _compressed(**weights):
    return {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": weights}}}


BLOCKS = {"quant_method": "fp8", "weight_block_size": [40, 24]}
FLOAT8, INTEGERS = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "int"}
# (quantization_config, name of the scales, their format)
FORMATS = {
    "fp8 blocks": (BLOCKS, "_scale_inv", torch.float32),
    "fp8 blocks, powers of two": (BLOCKS | {"scale_fmt": "ue8m0"}, "_scale_inv", torch.float32),
    "fp8 blocks, e8m0": (BLOCKS | {"scale_fmt": "ue8m0"}, "_scale_inv", E8M0),
    "fp8 tensor": ({"quant_method": "fp8"}, "_scale", torch.float32),
    "float8 tensor": (_compressed(**FLOAT8, strategy="tensor"), "_scale", torch.bfloat16),
    "float8 rows": (_compressed(**FLOAT8, strategy="channel"), "_scale", torch.bfloat16),
    "float8 blocks": (
        _compressed(**FLOAT8, strategy="block", block_structure=[40, 24]),
        "_scale",
        torch.float32,
    ),
    "int4 groups": (
        _compressed(**INTEGERS, strategy="group", group_size=GROUP),
        "_scale",
        torch.bfloat16,
    ),
    "int4 rows": (_compressed(**INTEGERS, strategy="channel"), "_scale", torch.float32),
    "mxfp4": ({"quant_method": "mxfp4"}, "_scales", torch.uint8),
    "mxfp8": ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, "_scale_inv", torch.uint8),
}


def _block(config, shape):
    if "weight_block_size" in config:
        return config["weight_block_size"]
    weights = config.get("config_groups", {}).get("g", {}).get("weights", {"strategy": "tensor"})
    return {
        "tensor": shape,
        "channel": (1, shape[1]),
        "block": weights.get("block_structure"),
        "group": (1, weights.get("group_size")),
    }[weights["strategy"]]


def _few_codes(codes, block):
    """Some blocks use little of the range, and one holds zeros alone."""
    rows, columns = block
    codes[:rows, :columns] = 0
    codes[-rows:, -columns:] = codes[-rows:, -columns:] % 3
    return codes


def _drawn_scales(shape, dtype, power_of_two, draw):
    exponents = torch.randint(-14, -6, shape, generator=draw)
    if power_of_two:
        return torch.ldexp(torch.ones(shape), exponents).to(dtype)
    return torch.ldexp(1 + torch.rand(shape, generator=draw), exponents).to(dtype)


def _drawn(name, shape, kind, draw):
    """What stands in the place of a matrix."""
    config, suffix, dtype = FORMATS[kind]
    if kind == "mxfp4":
        experts, inputs, outputs = shape
        groups = experts, outputs, inputs // 32
        blocks = torch.randint(256, (*groups, 16), dtype=torch.uint8, generator=draw)
        blocks[0] = blocks[0] & 0x11  # where scales could be smaller
        scales = torch.randint(115, 125, groups, dtype=torch.uint8, generator=draw)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}
    block = _block(config, shape)
    size = [math.ceil(total / part) for total, part in zip(shape, block, strict=True)]
    if kind == "mxfp8":
        scales = torch.randint(113, 121, size, dtype=torch.uint8, generator=draw)
    else:
        scales = _drawn_scales(size, dtype, "scale_fmt" in config, draw)
    if kind == "fp8 tensor":
        scales = scales.reshape(())
    if "int4" in kind:
        codes = _few_codes(torch.randint(-8, 8, shape, generator=draw), block)
        words = ((codes + 8).view(shape[0], -1, 8) << (4 * torch.arange(8))).sum(-1)
        scales[0, 0] = 0  # of zeros
        packed = torch.where(words >= 2**31, words - 2**32, words).int()
        return {f"{name}_packed": packed, f"{name}_scale": scales, f"{name}_shape": torch.tensor(shape)}
    bits = _few_codes(torch.randint(256, shape, dtype=torch.uint8, generator=draw), block)
    bits[(bits & 127) == 127] = 126  # NaN
    return {name: bits.view(torch.float8_e4m3fn), f"{name}{suffix}": scales}


def _is_quantised(name, tensor, kind):
    if kind == "mxfp4":
        return name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    return tensor.ndim == 2 and name.endswith("_proj.weight")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """By name of the format."""
    root = tmp_path_factory.mktemp("drawn")
    plain = {"mxfp4": root / "sinks"}
    tiny_family("gpt_oss", plain["mxfp4"], num_hidden_layers=2)
    other = root / "plain"
    save_tiny_hf(other, "qwen3_moe", num_hidden_layers=2, moe_intermediate_size=64)
    draw, found = torch.Generator().manual_seed(5), {}
    for number, (kind, form) in enumerate(FORMATS.items()):
        source, path = plain.get(kind, other), root / str(number)
        path.mkdir()
        tensors = {}
        for name, tensor in load_file(source / "model.safetensors").items():
            if _is_quantised(name, tensor, kind):
                tensors |= _drawn(name, tuple(tensor.shape), kind, draw)
            else:
                tensors[name] = tensor.bfloat16()
        config = json.loads((source / "config.json").read_text()) | {"quantization_config": form[0]}
        (path / "config.json").write_text(json.dumps(config))
        save_file(tensors, path / "model.safetensors")
        found[kind] = path
    return found


def _send(args, weights, path, url):
    update = WeightUpdate(run_config(args), weights, served=str(path))
    update.connect([EngineEndpoint(url, None, 1, 0)])
    try:
        update.run(1)
    finally:
        update.disconnect()


def _from_megatron(rank, runs):
    from slime.backends.megatron_utils.hf_weights import HfWeights, load_hf_weights
    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.model_provider import get_model

    init(run_config(runs[0][0]))
    for args, path, url in runs:
        model = get_model(run_config(args))
        load_hf_weights(args, model, path)
        _send(args, HfWeights(args, model), path, url)


def _from_fsdp(rank, runs):
    from slime.backends.fsdp_utils.hf_weights import FsdpHfTensors

    for args, path, url in runs:
        model = load(model_args(str(path)))
        _send(args, FsdpHfTensors(model, args.params_dtype), path, url)


SYNCS = {"megatron": _from_megatron, "fsdp": _from_fsdp}


@pytest.fixture(scope="module", params=[("megatron", torch.bfloat16), ("fsdp", torch.float32)], ids=str)
def received(request, checkpoints):
    """By name of the format what an engine got under version 1."""
    trainer, dtype = request.param
    engines = {kind: Recorder() for kind in checkpoints}
    for engine in engines.values():
        engine.start()
    runs = [(_args(path, dtype), str(path), engines[kind].url) for kind, path in checkpoints.items()]
    try:
        run_ranks(SYNCS[trainer], 1, runs)
    finally:
        for engine in engines.values():
            engine.stop()
    return {kind: engine.weights[0] for kind, engine in engines.items()}


def _args(path, dtype):
    experts = {"moe_router_load_balancing_type": ["none"], "moe_aux_loss_coeff": [0.0]}
    precision = {"params_dtype": dtype, "bf16": dtype == torch.bfloat16}
    return make_args(path, **experts, **precision, colocate=True, update_weight_buffer_size=100_000)


def _bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("kind", FORMATS)
def test_version_1_of_an_untrained_model_is_the_checkpoint_bit_for_bit(received, checkpoints, kind):
    wanted, found = load_file(checkpoints[kind] / "model.safetensors"), received[kind]
    assert found.keys() == wanted.keys()
    quantised = [name for name, tensor in wanted.items() if tensor.dtype.itemsize == 1 or "packed" in name]
    assert len(quantised) >= 4
    for name, tensor in wanted.items():
        if name in StoredFormat(checkpoints[kind])._parts:
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(_bits(found[name]), _bits(tensor)), name
        else:  # in the trainer's format, which holds it
            assert torch.equal(found[name].float(), tensor.float()), name
