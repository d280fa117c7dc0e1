"""What each engine rank gets of which trainer rank is what SGLang's ranks have of the same checkpoint."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.model_config import ModelConfig
from slime.backends.embedded_engine.parameters import Parameters
from slime.backends.embedded_engine.served_shards import ServedShards
from slime.models.blocks import Area, Block, as_matrix
from slime.models.served_layout import ServedTensor, served_layout
from slime.weight_sync.shards.moves import Sources, require_all_served
from tests.megatron_harness import make_args, save_tiny_hf
from tests.weight_sync.pretended_trainer import pretended_ranks
from tests.weight_sync.sglang_ranks import rank_of_sglang

MODELS = {
    "qwen3, tied": ("qwen3", dict(vocab_size=190)),
    "qwen2, biases": ("qwen2", dict(vocab_size=250, num_attention_heads=4, num_key_value_heads=4)),
    "llama, one key head": ("llama", dict(num_key_value_heads=1)),
    "experts": ("qwen3_moe", dict(vocab_size=200)),
}
SIZES = (1, 2, 4)


class Model:
    def __init__(self, directory: Path, name: str) -> None:
        kind, overrides = MODELS[name]
        self.path = save_tiny_hf(directory, kind, **overrides)
        self.state = load_file(directory / "model.safetensors")
        self.config = json.loads((directory / "config.json").read_text())

    def args(self, tensor: int):
        return make_args(self.path, tensor_model_parallel_size=tensor)


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    return Model(tmp_path_factory.mktemp("hf"), request.param)


def layout_of(args, rank, size):
    return served_layout(args, args if args.num_experts else None, rank, size)


def taken(model, args, ranks, place, giver):
    """The tensors of an engine's rank as trainer rank ``giver`` hands them over."""
    sources, found = Sources(ranks.held), {}
    for tensor in layout_of(args, *place):
        target = torch.full(tensor.shape, torch.nan)
        matrix = as_matrix(target)
        matrix[len(matrix) - tensor.padding :] = 0
        for move in sources.moves(giver, tensor):
            value = as_matrix(ranks.values[move.source][move.held])
            assert torch.isnan(move.placed.of(matrix)).all()
            move.placed.of(matrix).copy_(move.taken.of(value))
        found[tensor.name] = target
    return found


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("tensor", SIZES)
def test_engine_ranks_get_what_sglang_s_would_have(model, tensor, pipeline):
    args = model.args(tensor)
    ranks = pretended_ranks(model.state, args, tensor, pipeline)
    shapes = {name: tuple(t.shape) for name, t in model.state.items()}
    if model.config["tie_word_embeddings"]:
        shapes.pop("lm_head.weight", None)
    for size in SIZES:
        require_all_served(shapes, [layout_of(args, rank, size) for rank in range(size)])
        of_ranks = []
        for rank in range(size):
            found = taken(model, args, ranks, (rank, size), rank % len(ranks.held))
            wanted = rank_of_sglang(model.state, model.config, rank, size)
            assert found.keys() == wanted.keys()
            wrong = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
            assert not wrong, (size, rank, wrong)
            of_ranks.append([*found.items()])
        _engine_holds_the_checkpoint(model, of_ranks)


def _engine_holds_the_checkpoint(model, of_ranks):
    weights = Parameters(ModelConfig.from_directory(model.path))
    weights.flat.fill_(torch.nan)
    names = ServedShards(weights, len(of_ranks)).update(of_ranks)
    assert names == weights.named.keys()
    wrong = [name for name, value in weights.named.items() if not torch.equal(value, model.state[name])]
    assert not wrong, wrong


@pytest.mark.parametrize("tensor", [2, 4])
def test_nothing_is_moved_between_ranks_whose_slices_are_the_engine_s(model, tensor):
    """But for rows of the vocabulary, which both pad in their own way, and experts, which are spread."""
    args = model.args(tensor)
    ranks = pretended_ranks(model.state, args, tensor)
    sources = Sources(ranks.held)
    for rank in range(tensor):
        for one in layout_of(args, rank, tensor):
            moves = sources.moves(rank, one)
            if args.num_query_groups < tensor and "qkv" in one.name:
                continue  # the trainer's ranks share the rows of a group as they come
            if "embed" not in one.name and "lm_head" not in one.name and "experts" not in one.name:
                assert {move.source for move in moves} == {rank}, one.name


def test_copies_of_a_model_are_read_where_they_are_next(model):
    args = model.args(2)
    ranks = pretended_ranks(model.state, args, tensor=2, copies=2)
    sources = Sources(ranks.held)
    (norm,) = [one for one in layout_of(args, 0, 4) if one.name == "model.norm.weight"]
    assert [sources.moves(giver, norm)[0].source for giver in range(4)] == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Model(tmp_path_factory.mktemp("tiny"), "qwen3, tied")


def test_numbers_that_no_rank_holds_are_named(tiny):
    args = tiny.args(2)
    ranks = pretended_ranks(tiny.state, args, 2)
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    ranks.held[1] = [tensor for tensor in ranks.held[1] if tensor.name != name]
    wanted = next(
        one for one in layout_of(args, 0, 1) if one.name == "model.layers.1.self_attn.qkv_proj.weight"
    )
    said = (
        "engine tensor 'model.layers.1.self_attn.qkv_proj.weight': no trainer rank holds rows 64 to 128, "
        "columns 0 to 64, of 'model.layers.1.self_attn.q_proj.weight'"
    )
    with pytest.raises(ValueError, match=said):
        Sources(ranks.held).moves(0, wanted)


def test_weights_that_go_to_no_engine_rank_are_named(tiny):
    args = tiny.args(1)
    shapes = {name: tuple(tensor.shape) for name, tensor in tiny.state.items() if name != "lm_head.weight"}
    ranks = [layout_of(args, rank, 2) for rank in range(2)]
    require_all_served(shapes, ranks)
    norm = "model.layers.0.self_attn.q_norm.weight"
    without = [[one for one in tensors if one.name != norm] for tensors in ranks]
    with pytest.raises(ValueError, match=f"weight '{norm}': 0 numbers of it go to engines .wanted: all 16"):
        require_all_served(shapes, without)
    with pytest.raises(ValueError, match=r"embed_tokens.weight': 6144 numbers of it .* .wanted: all 12160"):
        require_all_served(shapes, [ranks[0], [one for one in ranks[1] if "embed" not in one.name]])
    del shapes[norm]
    with pytest.raises(ValueError, match=f"weight '{norm}': engines hold it, and the trainer has none"):
        require_all_served(shapes, ranks)


@pytest.mark.parametrize(
    ("row", "padding", "said"),
    [
        (3, 0, "w lies at row 3, column 0 .wanted: row 2"),
        (1, 0, "lies at row 1"),
        (2, 1, "4 rows and 1 of pad"),
    ],
)
def test_a_tensor_with_a_gap_or_an_overlap_is_named(row, padding, said):
    area = Area(range(2), range(3))
    blocks = (Block("w", area, 0), Block("w", area, row))
    with pytest.raises(ValueError, match=f"engine tensor 'joined': .*{said}"):
        ServedTensor("joined", (4, 3), blocks, padding).require_full()


def test_ranks_that_do_not_divide_a_model_are_refused(tiny):
    args = tiny.args(1)
    with pytest.raises(ValueError, match="engines of 3 ranks: do not divide num_attention_heads 8"):
        layout_of(args, 0, 3)
    args.num_query_groups = 3
    with pytest.raises(ValueError, match="engines of 2 ranks: neither divide num_query_groups 3"):
        layout_of(args, 0, 2)
    args.model_type = "deepseek_v3"
    with pytest.raises(ValueError, match="model_type deepseek_v3: how an engine's ranks hold its weights"):
        layout_of(args, 0, 1)


@pytest.fixture
def engine(tiny):
    """An engine of two ranks, and what these are to get."""
    weights = Parameters(ModelConfig.from_directory(tiny.path))
    given = [[*rank_of_sglang(tiny.state, tiny.config, rank, 2).items()] for rank in range(2)]
    return weights, ServedShards(weights, 2), given


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.3.mlp.gate_up_proj.weight"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_wrong_at_one_rank_is_seen(engine, tiny, rank, name):
    """Of what all of them hold, too."""
    weights, shards, given = engine
    given[rank] = [(one, tensor + (one == name)) for one, tensor in given[rank]]
    shards.update(given)
    wrong = {one for one, value in weights.named.items() if not torch.equal(value, tiny.state[one])}
    assert wrong and all(one in name or "mlp" in one for one in wrong)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda name, tensor: ("x", tensor), "tensor 'x': a rank of this model has none of that name"),
        (lambda name, tensor: (name, tensor[:1]), r"shape \[1.* \(wanted: \["),
        (lambda name, tensor: (name, tensor.int()), "int32 .wanted: a floating point"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_and_change_nothing(engine, change, said):
    weights, shards, given = engine
    weights.flat.fill_(7)
    wrong = [[*named[:-1], change(*named[-1])] for named in given]
    with pytest.raises(BadRequest, match=said):
        shards.update(wrong)
    with pytest.raises(BadRequest, match="TP rank 1: "):
        shards.update([given[0], given[1][:-1]])
    assert (weights.flat == 7).all()


def test_a_model_of_which_no_layout_is_known_is_refused(tiny):
    config = ModelConfig.from_directory(tiny.path)
    weights = Parameters(config)
    weights.config = replace(config, shape=replace(config.shape, add_mlp_bias=True))
    with pytest.raises(BadRequest, match="tensors of ranks: model_type qwen3: how an engine's ranks"):
        ServedShards(weights).update([[("model.norm.weight", torch.ones(64))]])
