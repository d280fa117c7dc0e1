"""Each family: Megatron's logits are those of ``transformers``, and its weights survive a round trip.

Families and layouts are combined pairwise, by ``pytest -m nightly`` in the full product. The ranks of a
layout are started once and compute all of its families.
"""

from functools import cache

import pytest
import torch
import torch.distributed as dist

from slime.config.run import run_config
from tests.announced import announced
from tests.covering import covering, full_product, pairs
from tests.families import FAMILIES, stored_tensors, tiny_family, tolerance
from tests.megatron_harness import make_args, run_ranks

LENGTHS = [9, 30, 1, 9, 15]
# Experts with biases are not split.
BIASED = ["gpt_oss"]
MOE = [name for name, (_, own) in FAMILIES.items() if "num_experts_per_tok" in own]
SIZES = [1, 2]
FACTORS = {"family": [*FAMILIES], "TP": SIZES, "PP": SIZES, "EP": SIZES, "ETP": SIZES}


def _ranks(row):
    """Returns as few ranks as have all experts: groups of EP times ETP ranks are within a stage."""
    stage = max(row["TP"], row["EP"] * row["ETP"])
    return row["PP"] * stage


def _allowed(row):
    if row["family"] not in MOE:
        return row["EP"] == row["ETP"] == 1
    unsplit = row["ETP"] == 1 or (row["TP"] == 2 and row["family"] not in BIASED)
    return unsplit and _ranks(row) <= 4


_PARTLY_ROTATED = {
    **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4},
    "partial_rotary_factor": 0.5,
}
# What published models, or such as are made of them, set otherwise than the tiny ones of `tests.families`.
VARIANTS = {
    "all experts' shares": ("qwen3_next", {"norm_topk_prob": False, "mlp_only_layers": None}),
    "every second layer has experts": (
        "qwen3_next",
        {"decoder_sparse_step": 2, "mlp_only_layers": [], "tie_word_embeddings": True},
    ),
    "delta nets in other layers, longer context": (
        "qwen3_5_text",
        {
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "linear_attention"],
            **{"rope_parameters": _PARTLY_ROTATED, "tie_word_embeddings": False, "linear_num_value_heads": 2},
        },
    ),
    "as many groups as heads": (
        "qwen3_5_moe_text",
        {"num_key_value_heads": 8, "rope_parameters": _PARTLY_ROTATED, "tie_word_embeddings": True},
    ),
    "windows in other layers": (
        "gpt_oss",
        {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "swiglu_limit": 7.0},
            **{"head_dim": 24, "tie_word_embeddings": True, "num_experts_per_tok": 4},
        },
    ),
    "no dense layer, a large factor": (
        "deepseek_v2",
        {"first_k_dense_replace": 0, "routed_scaling_factor": 16.0, "n_group": 2, "topk_group": 1},
    ),
    "linear rotary embedding": (
        "deepseek_v2-lite",
        {
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
            **{"first_k_dense_replace": 2, "tie_word_embeddings": True, "n_shared_experts": 1},
        },
    ),
}
# Beside its ranks a case costs what is done once: the reference, what is written and compared.
PAIRWISE = covering(FACTORS, _allowed, cost=lambda row: 4 + _ranks(row))
PRODUCT = full_product(FACTORS, _allowed)


def _name(row):
    sizes = [f"{kind} {size}" for kind, size in row.items() if size == 2]
    return ", ".join([row["family"], *(sizes or ["1 process"])])


CASES = [pytest.param(row, id=_name(row)) for row in PAIRWISE]
CASES += [
    pytest.param(row, id=_name(row), marks=pytest.mark.nightly) for row in PRODUCT if row not in PAIRWISE
]


def test_each_family_is_computed_with_each_kind_of_parallelism_and_each_pair_of_kinds():
    assert pairs(PAIRWISE) == pairs(PRODUCT)
    assert {(row["family"], kind) for row in PAIRWISE for kind in ("TP", "PP") if row[kind] == 2} == {
        (family, kind) for family in FAMILIES for kind in ("TP", "PP")
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(directory, transformers model) of each family."""
    root = tmp_path_factory.mktemp("families")
    return {name: (root / name, tiny_family(name, root / name)) for name in FAMILIES}


@pytest.fixture(scope="module")
def expected(checkpoints):
    """The logits of ``transformers`` for a family."""

    @cache
    @torch.no_grad()
    def of(family):
        model = checkpoints[family][1]
        return torch.cat([model(segment[None]).logits[0] for segment in _segments()])

    return of


@pytest.fixture(scope="module")
def results(checkpoints, request):
    """What the ranks of a layout give for all of its families that are tested this time."""
    rows = [item.callspec.params["row"] for item in request.session.items if _is_of_this_file(item)]

    @cache
    def of(*sizes):
        families = {row["family"]: row for row in rows if _sizes(row) == sizes}
        runs = {name: make_args(checkpoints[name][0], **_flags(row)) for name, row in families.items()}
        return run_ranks(_logits_and_weights, _ranks(next(iter(families.values()))), runs)

    return lambda row: [rank[row["family"]] for rank in of(*_sizes(row))]


def _is_of_this_file(item):
    return item.module.__name__ == __name__ and "row" in item.fixturenames


def _sizes(row):
    return row["TP"], row["PP"], row["EP"], row["ETP"]


def _flags(row):
    parallel = {
        **{"tensor_model_parallel_size": row["TP"], "sequence_parallel": row["TP"] > 1},
        **{"pipeline_model_parallel_size": row["PP"], "expert_model_parallel_size": row["EP"]},
        "expert_tensor_parallel_size": row["ETP"],
    }
    return {**parallel, "moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.0]}


def _segments():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(256, (length,), generator=generator) for length in LENGTHS]


def _logits_and_weights(rank, runs):
    from slime.backends.megatron_utils.initialize import init

    init(run_config(next(iter(runs.values()))))
    return {name: _of_family(args) for name, args in runs.items()}


@torch.no_grad()
def _of_family(args):
    from megatron.core import parallel_state as mpu

    from slime.backends.megatron_utils.data import _packed_seq_params
    from slime.backends.megatron_utils.hf_weights import HfWeights, load_hf_weights
    from slime.backends.megatron_utils.model_provider import get_model

    model = get_model(run_config(args))
    load_hf_weights(args, model, args.hf_checkpoint)
    tokens = torch.cat(_segments())[None]
    if not mpu.is_pipeline_first_stage():
        hidden = torch.empty(tokens.numel() // args.tensor_model_parallel_size, 1, args.hidden_size)
        dist.recv(hidden, src=mpu.get_pipeline_model_parallel_prev_rank())
        model[0].set_input_tensor(hidden)
    out = model[0](tokens, None, None, packed_seq_params=_packed_seq_params(LENGTHS, tokens.device))
    logits = None
    if mpu.is_pipeline_last_stage():
        parts = [torch.empty_like(out) for _ in range(args.tensor_model_parallel_size)]
        dist.all_gather(parts, out.contiguous(), group=mpu.get_tensor_model_parallel_group())
        logits = torch.cat(parts, dim=-1)[0, :, : args.vocab_size]
    else:
        dist.send(out, dst=mpu.get_pipeline_model_parallel_next_rank())
    buckets = announced(HfWeights(args, model), 50_000)
    weights = {name: tensor.clone() for bucket in buckets for name, tensor in bucket}
    return {"logits": logits, "weights": weights}


@pytest.mark.parametrize("row", CASES)
def test_logits_are_those_of_transformers(expected, results, row):
    wanted = expected(row["family"])
    assert wanted.std() > 0.1
    found = [rank["logits"] for rank in results(row) if rank["logits"] is not None]
    assert len(found) == _ranks(row) / row["PP"]
    for logits in found:
        assert (logits - wanted).abs().max() < tolerance(row["family"])


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    """(what the trainer gives, the transformers model) of each."""
    root = tmp_path_factory.mktemp("variants")
    models = {
        name: tiny_family(family, root / str(number), **changes)
        for number, (name, (family, changes)) in enumerate(VARIANTS.items())
    }
    losses = {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.0]}
    runs = {name: make_args(root / str(number), **losses) for number, name in enumerate(VARIANTS)}
    (found,) = run_ranks(_logits_and_weights, 1, runs)
    return {name: (found[name], model) for name, model in models.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_model_sets_otherwise_is_computed_so(variants, variant):
    found, model = variants[variant]
    with torch.no_grad():
        expected = torch.cat([model(segment[None]).logits[0] for segment in _segments()])
    scale = expected.std().clamp(min=1)
    assert (found["logits"] - expected).abs().max() < tolerance(VARIANTS[variant][0]) * scale


@pytest.mark.parametrize("row", CASES)
def test_export_equals_import_bit_for_bit_on_every_rank(checkpoints, results, row):
    stored = stored_tensors(row["family"], checkpoints[row["family"]][0])
    for rank in results(row):
        assert rank["weights"].keys() == stored.keys()
        for name, tensor in stored.items():
            assert torch.equal(rank["weights"][name], tensor), name
