"""What engines and exports get is what the checkpoint held, under its names, however it is sharded."""

import pytest
import torch
from safetensors.torch import load_file

from slime.backends.fsdp_utils.hf_weights import FsdpHfTensors
from slime.ray.train_worker import TrainWorker
from slime.training.hf_export import save_hf_model_to_path
from tests.backends.fsdp_harness import fsdp_args, weights_of
from tests.backends.fsdp_utils.architectures import ARCHITECTURES, load, model_args, save
from tests.megatron_harness import run_ranks, save_tiny_hf


def _exported(rank, args, max_bytes):
    model = load(args)
    sizes, tensors = [], {}
    for bucket in FsdpHfTensors(model, args.params_dtype).buckets(max_bytes):
        sizes.append([tensor.nbytes for _, tensor in bucket])
        tensors.update({name: tensor.clone() for name, tensor in bucket})
    return {"sizes": sizes, "tensors": tensors}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tensors_are_those_of_the_checkpoint(architecture, tmp_path):
    path = save(tmp_path, architecture)
    wanted = load_file(tmp_path / "model.safetensors")
    for result in run_ranks(_exported, 2, model_args(path), 20_000):
        assert result["tensors"].keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(result["tensors"][name], tensor), name
        # An expert layer stays together, for a conversion may join its tensors.
        assert all(sum(sizes) <= 20_000 or len(sizes) == 1 for sizes in result["sizes"]) or (
            architecture == "Qwen3Moe"
        )
        assert len(result["sizes"]) > 1


def test_engines_get_the_format_that_is_trained_in(tmp_path):
    path = save(tmp_path, "Qwen3")
    wanted = load_file(tmp_path / "model.safetensors")
    (result,) = run_ranks(_exported, 1, model_args(path, params_dtype=torch.bfloat16), 1 << 30)
    assert all(torch.equal(result["tensors"][name], wanted[name].bfloat16()) for name in wanted)


def _export(rank, args, target):
    worker = TrainWorker(args)
    worker.start()
    save_hf_model_to_path(args, target, worker.backend.hf_tensors(), 100_000)
    worker.backend.save_hf(target)


def test_an_export_is_loaded_again(tmp_path):
    path = save_tiny_hf(tmp_path / "in", "qwen3")
    out = str(tmp_path / "out")
    run_ranks(_export, 2, fsdp_args(path), out)
    (found,), (wanted,) = (run_ranks(_weights, 1, fsdp_args(place)) for place in (out, path))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def _weights(rank, args):
    worker = TrainWorker(args)
    worker.start()
    return weights_of(worker)


def _refusal(rank, args):
    try:
        TrainWorker(args).start()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(("change", "said"), [("missing", "1 missing"), ("another shape", "1 mismatched")])
def test_all_ranks_hear_of_weights_that_do_not_fit(tmp_path, change, said):
    from safetensors.torch import save_file

    path = save_tiny_hf(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for line in run_ranks(_refusal, 2, fsdp_args(path)):
        assert line.startswith(path) and said in line and name in line
