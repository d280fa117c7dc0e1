"""Flags of models whose attention is sparse: the shape is that of config.json, and indexers are frozen."""

import pytest

from slime.arguments import validated_args
from tests.families import tiny_family
from tools.make_tiny_model import make_tokenizer


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """GLM-5 of 4 layers, of which the second and the fourth share the indexer of the one before."""
    path = tmp_path_factory.mktemp("shared")
    tiny_family("glm_moe_dsa-shared", path, vocab_size=512)
    make_tokenizer().save_pretrained(path)
    return path


def test_the_shape_comes_from_config_json(words, shared):
    args = validated_args(words(hf_checkpoint=shared, freeze_indexer=True, dsa_indexer_topk=6))
    assert (args.dsa_indexer_n_heads, args.dsa_indexer_head_dim, args.dsa_indexer_topk) == (8, 16, 6)
    assert args.dsa_indexer_freq == (1, 0, 1, 0) and args.freeze_indexer


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"freeze_indexer": True, "dsa_indexer_topk": 7},
            "--dsa-indexer-topk 7: config.json of --hf-checkpoint says 6",
        ),
        (
            {"freeze_indexer": True, "enable_mtp_training": True, "mtp_num_layers": 1},
            "--enable-mtp-training: glm_moe_dsa has no such layers that are known",
        ),
    ],
)
def test_what_cannot_be(words, refusal, shared, flags, message):
    assert refusal(words(hf_checkpoint=shared, **flags)).startswith(message)


def test_a_run_that_does_not_freeze_the_indexers_is_told_what_becomes_of_them(words, notes, shared):
    told = "--freeze-indexer: not given; what an indexer chooses has no gradient"
    assert sum(line.startswith(told) for line in notes(words(hf_checkpoint=shared))) == 1
    assert not any(told in line for line in notes(words(hf_checkpoint=shared, freeze_indexer=True)))


def test_a_bias_that_latent_attention_has_not_is_passed_over(words, shared, refusal):
    """As the original's GLM 4.7 scripts have it."""
    assert (
        validated_args(words(hf_checkpoint=shared, freeze_indexer=True, add_qkv_bias=True)).add_qkv_bias
        is False
    )
    assert refusal(words(add_qkv_bias=True)).startswith("--add-qkv-bias: config.json")


def test_other_models_have_none(words, refusal):
    message = "--freeze-indexer: config.json of --hf-checkpoint describes a model without an indexer"
    assert refusal(words(freeze_indexer=True)).startswith(message)
    assert refusal(words(dsa_indexer_topk=2)).startswith("--dsa-indexer-topk 2: config.json")
