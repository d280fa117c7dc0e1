"""What engines and exports get is what the checkpoint held, under its names, however it is sharded."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.backends.fsdp_utils.hf_weights import FsdpHfTensors
from slime.config.run import run_config
from slime.ray.train_worker import TrainWorker
from slime.training.hf_export import ExportBase, save_hf_model_to_path
from tests.backends.fsdp_harness import fsdp_args, weights_of
from tests.backends.fsdp_utils.architectures import ARCHITECTURES, load, model_args, save
from tests.backends.fsdp_utils.conftest import BUCKET
from tests.families import tiny_family
from tests.megatron_harness import run_ranks, save_tiny_hf


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tensors_are_those_of_the_checkpoint(architecture, computed):
    path, results = computed(architecture)
    wanted = load_file(Path(path) / "model.safetensors")
    for result in results:
        found = dict(pair for bucket in result["buckets"] for pair in bucket)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), name
        assert len(result["buckets"]) > 1
        for bucket in result["buckets"]:
            # A layer of experts stays together, for a conversion may join its tensors.
            fits = sum(tensor.nbytes for _, tensor in bucket) <= BUCKET
            assert fits or len(bucket) == 1 or architecture in ("Qwen3Moe", "Mixtral")


def _exported(rank, args):
    (bucket,) = FsdpHfTensors(load(args), args.params_dtype).buckets(1 << 30)
    return dict(bucket)


def test_engines_get_the_format_that_is_trained_in(tmp_path):
    path = save(tmp_path, "Qwen3")
    wanted = load_file(tmp_path / "model.safetensors")
    (result,) = run_ranks(_exported, 1, model_args(path, params_dtype=torch.bfloat16))
    assert all(torch.equal(result[name], wanted[name].bfloat16()) for name in wanted)


def test_they_get_biases_of_experts_as_the_trainer_has_them(tmp_path):
    """In float32, as the Megatron trainer gives them: rounded ones would choose other experts."""
    tiny_family("deepseek_v3", tmp_path)
    wanted = load_file(tmp_path / "model.safetensors")
    args = model_args(str(tmp_path), params_dtype=torch.bfloat16, moe_router_bias_update_rate=0.0)
    (result,) = run_ranks(_exported, 1, args)
    biases = [name for name in result if name.endswith("e_score_correction_bias")]
    assert biases
    for name, tensor in result.items():
        held = wanted[name] if name in biases else wanted[name].bfloat16()
        assert tensor.dtype == held.dtype and torch.equal(tensor, held), name


def _export(rank, args, target):
    worker = TrainWorker(args)
    worker.start()
    save_hf_model_to_path(ExportBase.of(run_config(args)), target, worker.backend.weights(), 100_000)
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
