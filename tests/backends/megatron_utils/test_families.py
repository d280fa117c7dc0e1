"""Each family: Megatron's logits are those of ``transformers``, and its weights survive a round trip.

The ranks of a layout are started once and compute all families.
"""

from functools import cache

import pytest
import torch
import torch.distributed as dist

from tests.families import FAMILIES, stored_tensors, tiny_family, tolerance
from tests.megatron_harness import make_args, run_ranks

LENGTHS = [9, 30, 1, 9, 15]
LAYOUTS = {
    "1 process": {},
    "TP 2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP 2": {"pipeline_model_parallel_size": 2},
    "EP 2": {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
}
# Experts with biases are not split.
ETP1 = {**LAYOUTS["TP 2"], "expert_tensor_parallel_size": 1}
BIASED = ["gpt_oss"]
MOE = [name for name, (_, own) in FAMILIES.items() if "num_experts_per_tok" in own]
MEMBERS = dict.fromkeys(LAYOUTS, FAMILIES) | {
    "TP 2": [name for name in FAMILIES if name not in BIASED],
    "TP 2, ETP 1": BIASED,
    "EP 2": MOE,
}
LAYOUTS["TP 2, ETP 1"] = ETP1
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
CASES = [(layout, family) for layout, families in MEMBERS.items() for family in families]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(directory, transformers model) of each family."""
    root = tmp_path_factory.mktemp("families")
    return {name: (root / name, tiny_family(name, root / name)) for name in FAMILIES}


@pytest.fixture(scope="module")
def results(checkpoints):
    """What the ranks of a layout give for all of its families."""

    @cache
    def of(layout):
        families = [family for case, family in CASES if case == layout]
        losses = {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.0]}
        runs = {name: make_args(checkpoints[name][0], **losses, **LAYOUTS[layout]) for name in families}
        return run_ranks(_logits_and_weights, 1 if layout == "1 process" else 2, runs)

    return of


def _segments():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(256, (length,), generator=generator) for length in LENGTHS]


def _logits_and_weights(rank, runs):
    from slime.backends.megatron_utils.initialize import init

    init(next(iter(runs.values())))
    return {name: _of_family(args) for name, args in runs.items()}


@torch.no_grad()
def _of_family(args):
    from megatron.core import parallel_state as mpu

    from slime.backends.megatron_utils.data import _packed_seq_params
    from slime.backends.megatron_utils.hf_weights import HfWeights, load_hf_weights
    from slime.backends.megatron_utils.model_provider import get_model

    model = get_model(args)
    load_hf_weights(args, model, args.hf_checkpoint)
    tokens = torch.cat(_segments())[None]
    if not mpu.is_pipeline_first_stage():
        hidden = torch.empty(tokens.numel(), 1, args.hidden_size)
        dist.recv(hidden, src=0)
        model[0].set_input_tensor(hidden)
    out = model[0](tokens, None, None, packed_seq_params=_packed_seq_params(LENGTHS, tokens.device))
    logits = None
    if mpu.is_pipeline_last_stage():
        parts = [torch.empty_like(out) for _ in range(args.tensor_model_parallel_size)]
        dist.all_gather(parts, out.contiguous(), group=mpu.get_tensor_model_parallel_group())
        logits = torch.cat(parts, dim=-1)[0, :, : args.vocab_size]
    else:
        dist.send(out, dst=1)
    buckets = HfWeights(args, model).buckets(50_000)
    weights = {name: tensor.clone() for bucket in buckets for name, tensor in bucket}
    return {"logits": logits, "weights": weights}


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_logits_are_those_of_transformers(checkpoints, results, layout, family):
    model = checkpoints[family][1]
    with torch.no_grad():
        expected = torch.cat([model(segment[None]).logits[0] for segment in _segments()])
    assert expected.std() > 0.1
    found = [rank[family]["logits"] for rank in results(layout) if rank[family]["logits"] is not None]
    assert found
    for logits in found:
        assert (logits - expected).abs().max() < tolerance(family)


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


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_export_equals_import_bit_for_bit_on_every_rank(checkpoints, results, layout, family):
    stored = stored_tensors(family, checkpoints[family][0])
    for rank in results(layout):
        weights = rank[family]["weights"]
        assert weights.keys() == stored.keys()
        for name, tensor in stored.items():
            assert torch.equal(weights[name], tensor), name
