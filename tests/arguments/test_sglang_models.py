"""Which checkpoints SGLang would serve as other models than they are."""

from argparse import Namespace

import pytest

from slime.arguments.sglang_models import bad_experts


def run(path, **flags):
    models = [Namespace(model_path=str(path)), Namespace(model_path=None)]
    given = {"rollout_engine": "sglang", "rollout_external": False, "served_models": models}
    return list(bad_experts(Namespace(hf_checkpoint=str(path), **{**given, **flags})))


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize(
    ("layers", "dense"),
    [({"mlp_only_layers": [1]}, 1), ({"decoder_sparse_step": 2}, 0), ({"mlp_only_layers": []}, None)],
)
def test_a_dense_layer_among_those_with_experts_is_refused(altered_checkpoint, model_type, layers, dense):
    path = altered_checkpoint(model_type=model_type, num_hidden_layers=2, **layers)
    said = run(path)
    assert [message.split(" is dense")[0] for message in said] == [f"{path}: layer {dense}"] * (
        dense is not None
    )
    assert run(path, rollout_external=True, served_models=[]) == said
    assert not run(path, rollout_engine="embedded")
    assert not run(path, served_models=[])


def test_other_families_have_other_names_for_it(altered_checkpoint):
    assert not run(altered_checkpoint(mlp_only_layers=[0]))
