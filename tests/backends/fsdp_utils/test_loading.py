"""Weights come shard by shard: what ranks have in memory, and language models inside larger checkpoints."""

import resource

import pytest
import torch
from safetensors.torch import load_file

from slime.config.run import run_config
from slime.training.hf_export import ExportBase, save_hf_model_to_path
from tests.backends.fsdp_utils.architectures import load, model_args
from tests.families import WITH_IMAGES, stored_tensors, tiny_family
from tests.megatron_harness import run_ranks, save_tiny_hf

LAYERS = 12


def _logits_and_export(rank, args, target, ids):
    from slime.backends.fsdp_utils.hf_weights import FsdpHfTensors

    model = load(args)
    weights = FsdpHfTensors(model, torch.float32)
    save_hf_model_to_path(ExportBase.of(run_config(args)), target, weights, 10_000)
    found = {name: tensor.clone() for bucket in weights.buckets(10_000) for name, tensor in bucket}
    with torch.no_grad():
        return model(input_ids=ids).logits, found


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_the_language_model_of_a_larger_checkpoint_is_trained(family, tmp_path):
    model = tiny_family(family, tmp_path / "in")
    stored = stored_tensors(family, tmp_path / "in")
    ids = torch.arange(20)[None] * 7 % 256
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    args = model_args(str(tmp_path / "in"))
    for logits, weights in run_ranks(_logits_and_export, 2, args, str(tmp_path / "out"), ids):
        assert (logits - wanted).abs().max() < 1e-4
        assert weights.keys() == stored.keys()
        assert all(torch.equal(weights[name], stored[name]) for name in stored)
    exported = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        exported |= load_file(file)
    before = load_file(tmp_path / "in/model.safetensors")
    assert exported.keys() == before.keys()
    assert all(torch.equal(exported[name], before[name]) for name in before)


def _growth(rank, args, small):
    from slime.backends.fsdp_utils.initialize import init
    from slime.backends.fsdp_utils.loading import load_hf_weights
    from slime.backends.fsdp_utils.model import build_model

    mesh, _ = init(run_config(args))
    load_hf_weights(
        small, build_model(run_config(small), mesh), small.hf_checkpoint
    )  # imports what is imported late
    model = build_model(run_config(args), mesh)
    before = _peak()
    load_hf_weights(args, model, args.hf_checkpoint)
    return _peak() - before


def _peak():
    """Bytes that were resident at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_no_rank_holds_the_whole_model(tmp_path):
    """Shards are in memory when loading starts: what comes on top is a part of the model.

    Beside a layer and its copies that is what is mapped of the file, 32 MiB, and what the allocator keeps.
    """
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": LAYERS}
    path = save_tiny_hf(tmp_path / "large", "qwen3", **sizes)
    small = model_args(save_tiny_hf(tmp_path / "small", "qwen3"))
    size = (tmp_path / "large/model.safetensors").stat().st_size
    for growth in run_ranks(_growth, 2, model_args(path), small):
        assert growth < 0.25 * size + 64 * 2**20, (growth, size)
