"""Freezing goes by names of the whole model, whatever the parallel layout."""

import pytest

from slime.arguments.core.run_args import copied
from slime.backends.megatron_utils.initialize import init
from slime.backends.megatron_utils.model_provider import freeze_model_params, get_model
from slime.backends.megatron_utils.named_params import named_params
from slime.config.run import run_config
from slime.ray.train_worker import TrainWorker
from tests.megatron_harness import make_args, run_ranks, save_tiny_hf
from tests.run_args import config_with
from tests.trainer_batches import random_rollout, split, trainer_args

EMBEDDING = "embedding.word_embeddings.weight"
PP2 = {"pipeline_model_parallel_size": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Makes a checkpoint with tied embeddings."""
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


def _outcome(args, flags):
    """What trains under these flags on this rank, or the complaint about them."""
    try:
        chunks = get_model(run_config(copied(args, **flags)))
    except ValueError as error:
        return str(error)
    return sorted(name for name, param in named_params(chunks) if param.requires_grad)


def _outcomes(rank, args, *flags):
    init(run_config(args))
    return [_outcome(args, each) for each in flags]


def _only(*patterns):
    return {"only_train_params_name_list": list(patterns)}


def _freeze(*patterns):
    return {"freeze_params_name_list": list(patterns)}


def test_names_are_those_of_the_whole_model(checkpoint):
    flags = [
        _freeze(r"decoder\.layers\.0\."),
        _only("final_layernorm", r"layers\.2\.mlp.*fc1.weight"),
        _only("k_lay"),
    ]
    whole, first, last = (
        dict(enumerate(result))
        for world_size, extra in ((1, {}), (2, PP2))
        for result in run_ranks(_outcomes, world_size, make_args(checkpoint, **extra), *flags)
    )
    # The last stage keeps a copy of the embedding as its output layer.
    split_up = {i: sorted({*first[i], *last[i]} - {"output_layer.weight"}) for i in whole}
    assert split_up == whole
    assert not any(name.startswith("decoder.layers.0.") for name in whole[0])
    assert any(name.startswith("decoder.layers.2.") for name in whole[0])
    assert last[1] == ["decoder.final_layernorm.weight", "decoder.layers.2.mlp.linear_fc1.weight"]
    assert len(whole[2]) == 4


def test_both_copies_of_a_tied_weight_share_one_fate(checkpoint):
    args = make_args(checkpoint, **PP2)
    first, last = run_ranks(
        _outcomes, 2, args, _freeze("embedding"), _only("embedding"), _freeze("output_layer")
    )
    assert EMBEDDING not in first[0] and "output_layer.weight" not in last[0]
    assert first[1] == [EMBEDDING] and last[1] == ["output_layer.weight"]
    # As on one stage, where there is no output layer of its own.
    assert first[2] == last[2] and "--freeze-params-name-list 'output_layer'" in first[2]


def test_an_untied_output_layer_has_its_own_name(tmp_path):
    args = make_args(save_tiny_hf(tmp_path, "llama"), **PP2)
    first, last = run_ranks(_outcomes, 2, args, _freeze("embedding"), _only("output_layer"))
    assert EMBEDDING not in first[0] and "output_layer.weight" in last[0]
    assert first[1] == [] and last[1] == ["output_layer.weight"]


def test_patterns_that_do_nothing_are_refused_on_every_stage(checkpoint):
    args = make_args(checkpoint, **PP2)
    first, last = run_ranks(
        _outcomes, 2, args, _only("final_layernorm", "embeding"), _freeze("layers.9"), _freeze(".")
    )
    assert first == last
    assert "--only-train-params-name-list 'embeding': matches no parameter" in first[0]
    assert "--freeze-params-name-list 'layers.9': matches no parameter" in first[1]
    assert "--freeze-params-name-list '.': leaves no parameter to train" in first[2]


def _grad_norm(rank, args, rollout):
    worker = TrainWorker(args)
    worker.start()
    report = worker.train_shard(0, split(args, rollout, worker.parallel_config()))[0]
    return report["train"][0]["train/grad_norm"] if report else None


@pytest.mark.parametrize("flags", [_freeze("embedding"), _only("embedding")], ids=["frozen", "alone"])
def test_a_tied_embedding_trains_as_on_one_stage(checkpoint, flags):
    _expect_the_norm_of_one_stage(checkpoint, flags)


def test_a_stage_that_trains_nothing_has_no_moments_to_reset(checkpoint):
    _expect_the_norm_of_one_stage(checkpoint, _only(r"layers\.3\.") | {"reset_optimizer_states": True})


def _expect_the_norm_of_one_stage(checkpoint, flags):
    rollout = random_rollout(256)
    (expected,) = run_ranks(_grad_norm, 1, trainer_args(checkpoint, **flags), rollout)
    first, last = run_ranks(_grad_norm, 2, trainer_args(checkpoint, **flags, **PP2), rollout)
    assert first is None and last == pytest.approx(expected, rel=1e-4)


RECOMPUTED = {
    "norms": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    "layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


@pytest.mark.parametrize("recomputed", RECOMPUTED)
def test_layers_train_alike_if_computed_again_above_a_frozen_embedding(checkpoint, recomputed):
    rollout, mlps = random_rollout(256), _only("mlp")
    (expected,) = run_ranks(_grad_norm, 1, trainer_args(checkpoint, **mlps), rollout)
    (found,) = run_ranks(_grad_norm, 1, trainer_args(checkpoint, **mlps, **RECOMPUTED[recomputed]), rollout)
    assert expected > 0.1
    assert found == pytest.approx(expected, rel=1e-5)


def test_both_freezing_flags_are_refused():
    with pytest.raises(ValueError, match="exclude each other"):
        freeze_model_params(config_with(**_only("a"), **_freeze("b")).trainer, [])


def test_experts_are_frozen_by_their_number_in_the_whole_model(tmp_path):
    """Passes of expert-parallel ranks send messages in every layer up to the first one that trains."""
    experts = {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.0]}
    experts |= {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    args = make_args(save_tiny_hf(tmp_path, "qwen3_moe"), **experts)
    flags = [
        _freeze(r"local_experts\.3\."),
        _only(r"layers\.2\.mlp\.experts", r"layers\.3\.mlp\.experts\.local_experts\.0"),
        _only(r"local_experts\.3\.", r"layers\.0\.mlp\.router"),
        _only(r"local_experts\.3\.", "final_layernorm"),
        _only(r"local_experts\.3\.", "embedding"),
    ]
    first, last = run_ranks(_outcomes, 2, args, *flags)
    of_expert_3 = [".local_experts.3." in name for name in last[0]]
    assert any(".local_experts.2." in name for name in last[0]) and not any(of_expert_3)
    assert len(first[1]) == 6 and len(last[1]) == 4
    assert len(first[2]) == 1 and len(last[2]) == 7
    assert len(first[4]) == 1 and len(last[4]) == 7
    assert first[3] == last[3]
    assert "has an expert to train on some ranks only" in first[3]
