"""Which checkpoints SGLang would serve as other models than they are."""

import pytest

from slime.arguments.validate.served_models import ModelConfig
from slime.arguments.validate.sglang_models import unlike_sglang
from tests.run_args import run_args


def run(path, **flags):
    models = [ModelConfig("m", model_path, None, 1, []) for model_path in (str(path), None)]
    given = {"rollout_engine": "sglang", "rollout_external": False, "served_models": models}
    return list(unlike_sglang(run_args(hf_checkpoint=str(path), **{**given, **flags})))


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize(
    ("layers", "dense"),
    [({"mlp_only_layers": [1]}, 1), ({"decoder_sparse_step": 2}, 0), ({"mlp_only_layers": []}, None)],
)
def test_a_dense_layer_among_those_with_experts_is_refused(altered_checkpoint, model_type, layers, dense):
    separate = {"num_hidden_layers": 2, "tie_word_embeddings": False}
    path = altered_checkpoint(model_type=model_type, **separate, **layers)
    said = run(path)
    assert [message.split(" is dense")[0] for message in said] == [f"{path}: layer {dense}"] * (
        dense is not None
    )
    assert run(path, rollout_external=True, served_models=[]) == said
    assert not run(path, rollout_engine="embedded")
    assert not run(path, served_models=[])


def test_other_families_have_other_names_for_it(altered_checkpoint):
    assert not run(altered_checkpoint(mlp_only_layers=[0]))


@pytest.mark.parametrize(
    "model_type", ["qwen2_moe", "qwen3_moe", "qwen3_next", "mixtral", "minimax_m2", "glm4_moe", "gpt_oss"]
)
def test_a_head_that_is_the_embedding_is_refused_where_sglang_makes_its_own(altered_checkpoint, model_type):
    changes = {"model_type": model_type, "num_hidden_layers": 2}
    tied = altered_checkpoint(**changes, tie_word_embeddings=True)
    (said,) = run(tied)
    assert said.startswith(f"{tied}: tie_word_embeddings is true, and SGLang gives a {model_type} an output")
    assert run(tied, rollout_external=True, served_models=[]) == [said]
    assert not run(tied, rollout_engine="embedded")
    assert not run(altered_checkpoint(**changes, tie_word_embeddings=False))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_families_that_sglang_ties_are_served(altered_checkpoint, model_type):
    assert not run(altered_checkpoint(model_type=model_type, tie_word_embeddings=True))
