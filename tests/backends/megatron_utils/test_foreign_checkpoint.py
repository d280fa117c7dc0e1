"""Weights that Megatron-LM's converter wrote are loaded by their names, and nothing else of what it wrote."""

import argparse
import io
from pathlib import Path

import pytest
import torch

from slime.backends.megatron_utils.hf_weights import HfWeights
from slime.backends.megatron_utils.initialize import init
from slime.config.model import ModelConfig
from slime.config.run import filled, run_config
from slime.models import family_of
from slime.models.checkpoint.safetensors_dir import SafetensorReader
from slime.ray.train_worker import TrainWorker
from slime.training.checkpoint_dir import MARKER, find_checkpoint
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import trainer_args

pytestmark = pytest.mark.slow

# Names of TransformerEngine's layers, by those of plain ones.
LAYER = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight": "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight": "self_attention.linear_proj.weight",
    "self_attention.q_layernorm.weight": "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight": "self_attention.k_layernorm.weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.weight": "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight": "mlp.linear_fc2.weight",
}
# Of a mixture of experts: what is before them is fused with nothing.
LAYER_OF_EXPERTS = {
    **{name: fused for name, fused in LAYER.items() if not name.startswith(("mlp.", "pre_mlp"))},
    "pre_mlp_layernorm.weight": "pre_mlp_layernorm.weight",
    "mlp.router.weight": "mlp.router.weight",
}
OF_EXPERT = ("linear_fc1.weight", "linear_fc2.weight")
WHOLE = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight")


def _in_layer(args):
    """Yields, of what a layer has, the plain name, TransformerEngine's, and its place in a further axis."""
    if not getattr(args, "num_experts", None):
        yield from ((plain, fused, ()) for plain, fused in LAYER.items())
        return
    yield from ((plain, fused, ()) for plain, fused in LAYER_OF_EXPERTS.items())
    for expert in range(args.num_experts):
        for name in OF_EXPERT:
            plain = f"mlp.experts.local_experts.{expert}.{name}"
            # Of grouped and of sequential experts alike.
            yield plain, f"mlp.experts.experts.{name}", (expert, args.num_experts)


def _write(rank, args, hf, root, directory, numbered):
    """What the original's converter writes for ``hf``, as far as a trainer can see it."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    init(run_config(args))
    rules = family_of(args.model_type).weights
    content = {}
    with SafetensorReader(hf) as reader:

        def value(name):
            rule = rules.rule_for(name)
            return rule.merge([reader.read(hf_name) for hf_name in rule.hf_names], filled(ModelConfig, args))

        for name in (*WHOLE, *(["output_layer.weight"] if args.untie_embeddings_and_output_weights else [])):
            content[name] = ShardedTensor.from_rank_offsets(name, value(name))
        for layer in range(args.num_layers):
            for plain, fused, place in _in_layer(args):
                own = f"decoder.layers.{layer}.{plain}"
                key = f"decoder.layers.{layer}.{fused}" if numbered else f"decoder.layers.{fused}"
                offsets = () if numbered else ((0, layer, args.num_layers),)
                offsets += ((len(offsets), *place),) if place else ()
                content[own] = ShardedTensor.from_rank_offsets(
                    key, value(own), *offsets, prepend_axis_num=len(offsets)
                )
    for layer in range(args.num_layers):
        scales = (io.BytesIO(b"scales"), (args.num_layers,), (layer,))
        kind = "mlp.experts.experts" if getattr(args, "num_experts", None) else "mlp"
        key = f"decoder.layers.{kind}.linear_fc1._extra_state"
        content[f"decoder.layers.{layer}.mlp.linear_fc1._extra_state"] = ShardedObject(key, *scales)
    others = {"args": argparse.Namespace(num_layers=4), "checkpoint_version": 3.0, "iteration": 1}
    path = Path(root) / directory
    path.mkdir(parents=True)
    dist_checkpointing.save({"model": content, **others}, str(path))
    (Path(root) / MARKER).write_text("release" if directory == "release" else "1")
    return {}


def _load(rank, args, flag):
    worker = TrainWorker(args)
    try:
        start = worker.start()
    except ValueError as error:
        return {"error": str(error)}
    if flag == "ref_load":
        worker.backend.versions.restore("ref")
    buckets = HfWeights(args, worker.backend.state.model).buckets(1 << 30)
    return {"start": start, "weights": {name: t.clone() for bucket in buckets for name, t in bucket}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3", seed=0)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The model whose weights are converted: of another seed than the one that is trained."""
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3", seed=1)


def write(trained, converted, root, directory="release", numbered=False):
    run_ranks(_write, 1, trainer_args(trained), converted, str(root), directory, numbered)


def assert_is(weights, hf):
    with SafetensorReader(hf) as reader:
        assert set(weights) >= {name for name in reader.names() if "lm_head" not in name}
        for name, weight in weights.items():
            assert torch.equal(weight, reader.read(name)), name


@pytest.mark.parametrize("numbered", [False, True])
def test_a_release_is_loaded_by_its_names(trained, converted, tmp_path, numbered):
    write(trained, converted, tmp_path, numbered=numbered)
    assert find_checkpoint(tmp_path) == (0, tmp_path / "release")
    for layout in ({}, {"tensor_model_parallel_size": 2}):
        args = trainer_args(trained, load=str(tmp_path), finetune=True, **layout)
        results = run_ranks(_load, 2, args, "load")
        for result in results:
            assert result["start"] == 0
            assert_is(result["weights"], converted)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """Two mixtures of experts in every layer."""
    root = tmp_path_factory.mktemp("experts")
    return [save_tiny_hf(root / str(seed), "qwen3_moe", seed=seed, mlp_only_layers=[]) for seed in (0, 1)]


@pytest.mark.parametrize("numbered", [False, True])
def test_so_is_one_of_a_mixture_of_experts(experts, tmp_path, numbered):
    mine, other = experts
    write(mine, other, tmp_path, numbered=numbered)
    parallel = dict(expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    balance = dict(moe_router_load_balancing_type=["aux_loss"], moe_aux_loss_coeff=[0.0])
    flags = dict(
        moe_token_dispatcher_type="alltoall", load=str(tmp_path), finetune=True, **parallel, **balance
    )
    for result in run_ranks(_load, 2, trainer_args(mine, **flags), "load"):
        assert_is(result["weights"], other)


def test_a_release_is_a_reference(trained, converted, tmp_path):
    write(trained, converted, tmp_path)
    flags = dict(use_kl_loss=True, kl_loss_coef=0.1, ref_load=str(tmp_path), load=trained)
    (result,) = run_ranks(_load, 1, trainer_args(trained, **flags), "ref_load")
    assert_is(result["weights"], converted)


def test_of_a_numbered_checkpoint_of_megatron_lm_only_the_weights_can_be_loaded(trained, converted, tmp_path):
    write(trained, converted, tmp_path, directory="iter_0000001")
    (result,) = run_ranks(_load, 1, trainer_args(trained, load=str(tmp_path)), "load")
    assert "was not written by this trainer" in result["error"] and "--finetune" in result["error"]
    (result,) = run_ranks(_load, 1, trainer_args(trained, load=str(tmp_path), finetune=True), "load")
    assert_is(result["weights"], converted)


def test_a_release_that_is_not_there_is_named(tmp_path):
    (tmp_path / MARKER).write_text("release")
    with pytest.raises(FileNotFoundError, match="release: not there or incomplete, wanted release"):
        find_checkpoint(tmp_path)
