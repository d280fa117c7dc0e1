"""HF -> Megatron -> HF at several layouts, bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.config.run import run_config
from tests.megatron_harness import MODEL_TYPES, make_args, run_ranks, save_tiny_hf

LAYOUTS = {
    "tp1": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2-uneven": {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1},
}


def _load_and_export(rank, args, path, max_bytes):
    from slime.backends.megatron_utils.hf_weights import HfWeights, load_hf_weights
    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.model_provider import get_model

    init(run_config(args))
    model = get_model(run_config(args))
    load_hf_weights(args, model, path)
    buckets = list(HfWeights(args, model).buckets(max_bytes))
    return [{name: tensor.clone() for name, tensor in bucket} for bucket in buckets]


def _joined(buckets):
    return {name: tensor for bucket in buckets for name, tensor in bucket.items()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    return {model_type: save_tiny_hf(root / model_type, model_type) for model_type in MODEL_TYPES}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_round_trip_is_bit_exact_on_every_rank(checkpoints, model_type, layout):
    path = checkpoints[model_type]
    args = make_args(path, **LAYOUTS[layout])
    expected = load_file(f"{path}/model.safetensors")
    for buckets in run_ranks(_load_and_export, 1 if layout == "tp1" else 2, args, path, 50_000):
        assert len(buckets) > 3
        exported = _joined(buckets)
        assert exported.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(exported[name], tensor), name


def test_buckets_respect_the_limit_except_for_single_parameters(checkpoints):
    args = make_args(checkpoints["llama"])
    limit = 40_000
    (buckets,) = run_ranks(_load_and_export, 1, args, checkpoints["llama"], limit)
    for bucket in buckets:
        size = sum(tensor.nbytes for tensor in bucket.values())
        assert size <= limit or len({name.rsplit(".", 3)[0] for name in bucket}) == 1


def test_padding_of_the_vocabulary_is_added_and_cut_off(tmp_path):
    path = save_tiny_hf(tmp_path, "qwen2", vocab_size=251, tie_word_embeddings=True)
    args = make_args(path, tensor_model_parallel_size=2, padded_vocab_size=256)
    expected = load_file(f"{path}/model.safetensors")
    for buckets in run_ranks(_load_and_export, 2, args, path, 10**9):
        assert torch.equal(
            _joined(buckets)["model.embed_tokens.weight"], expected["model.embed_tokens.weight"]
        )


def test_a_sharded_checkpoint_loads_like_a_single_file(tmp_path, checkpoints):
    path = checkpoints["qwen3"]
    tensors = load_file(f"{path}/model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (buckets,) = run_ranks(_load_and_export, 1, make_args(path), str(tmp_path), 10**9)
    assert all(torch.equal(_joined(buckets)[name], tensors[name]) for name in names)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.pop("model.norm.weight"), "no tensor 'model.norm.weight'"),
        (lambda t: t.update(surplus=torch.ones(1)), "1 tensors that the model does not have: surplus"),
        (lambda t: t.update({"model.norm.weight": torch.ones(65)}), r"model.norm.weight \[65\]"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path, checkpoints, change, complaint):
    tensors = load_file(f"{checkpoints['llama']}/model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=complaint):
        run_ranks(_load_and_export, 1, make_args(checkpoints["llama"]), str(tmp_path), 10**9)
