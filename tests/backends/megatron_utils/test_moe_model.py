"""A mixture of experts: its logits are those of transformers, and its weights survive a round trip."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from slime.config.run import run_config
from tests.announced import announced
from tests.megatron_harness import make_args, run_ranks, tiny_hf_model

pytestmark = pytest.mark.slow

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
LAYOUTS = {
    "1 process": (1, {}),
    "EP 2": (2, EP2),
    "EP 2, all-gather": (2, EP2 | {"moe_token_dispatcher_type": "allgather"}),
    "ETP 2": (2, TP2),
    "TP 2, whole experts": (2, TP2 | {"expert_tensor_parallel_size": 1}),
    "TP 2, EP 2": (2, TP2 | EP2),
    "PP 2": (2, {"pipeline_model_parallel_size": 2}),
    "EP 2 x ETP 2": (4, TP2 | {"expert_model_parallel_size": 2}),
    "EP 2 x PP 2": (4, EP2 | {"pipeline_model_parallel_size": 2}),
}
VARIANTS = {
    "published": {},
    "shares of all experts": {"norm_topk_prob": False, "num_experts_per_tok": 3},
    "one expert": {"norm_topk_prob": False, "num_experts_per_tok": 1},
    "every second layer": {"mlp_only_layers": [], "decoder_sparse_step": 2},
    "tied": {"tie_word_embeddings": True},
}
LENGTHS = [9, 30, 1, 9, 15]


def moe_args(path, **overrides):
    losses = {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.0]}
    return make_args(path, **losses, **overrides)


def _build(args):
    from slime.backends.megatron_utils.hf_weights import load_hf_weights
    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.model_provider import get_model

    init(run_config(args))
    model = get_model(run_config(args))
    load_hf_weights(args, model, args.hf_checkpoint)
    return model


def _segments(rank=0):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(256, (length,), generator=generator) for length in LENGTHS[3 * rank :]]


@torch.no_grad()
def _logits_and_weights(rank, args):
    """Each data-parallel rank computes a row of its own, longer or shorter than the others'."""
    from megatron.core import parallel_state as mpu

    from slime.backends.megatron_utils.data import _packed_seq_params
    from slime.backends.megatron_utils.hf_weights import HfWeights

    model = _build(args)
    segments = _segments(mpu.get_data_parallel_rank())
    tokens = torch.cat(segments)[None]
    packed = _packed_seq_params([len(segment) for segment in segments], tokens.device)
    stages = mpu.get_pipeline_model_parallel_group()
    if not mpu.is_pipeline_first_stage():
        hidden = torch.empty(tokens.numel(), 1, args.hidden_size)
        dist.recv(hidden, src=dist.get_global_rank(stages, 0))
        model[0].set_input_tensor(hidden)
    out = model[0](tokens, None, None, packed_seq_params=packed)
    logits = None
    if mpu.is_pipeline_last_stage():
        parts = [torch.empty_like(out) for _ in range(args.tensor_model_parallel_size)]
        dist.all_gather(parts, out.contiguous(), group=mpu.get_tensor_model_parallel_group())
        logits = torch.cat(parts, dim=-1)[0, :, : args.vocab_size]
    else:
        dist.send(out, dst=dist.get_global_rank(stages, 1))
    buckets = [dict(bucket) for bucket in announced(HfWeights(args, model), 50_000)]
    sizes = [sum(tensor.nbytes for tensor in bucket.values()) for bucket in buckets]
    weights = {name: tensor.clone() for bucket in buckets for name, tensor in bucket.items()}
    return {"logits": logits, "weights": weights, "sizes": sizes, "row": mpu.get_data_parallel_rank()}


def _check(tmp_path, layout, **variant):
    model = tiny_hf_model("qwen3_moe", **variant)
    model.save_pretrained(tmp_path)
    world_size, overrides = LAYOUTS[layout]
    stored = load_file(tmp_path / "model.safetensors")
    seen = 0
    for result in run_ranks(_logits_and_weights, world_size, moe_args(tmp_path, **overrides)):
        assert result["weights"].keys() == stored.keys()
        assert all(torch.equal(result["weights"][name], tensor) for name, tensor in stored.items())
        assert len(result["sizes"]) > 3 and max(result["sizes"][1:-1]) <= 50_000
        if result["logits"] is not None:
            with torch.no_grad():
                segments = _segments(result["row"])
                expected = torch.cat([model(segment[None]).logits[0] for segment in segments])
            assert (result["logits"] - expected).abs().max() < 1e-5
            assert expected.abs().max() > 1
            seen += 1
    assert seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_transformers_and_export_equals_import(tmp_path, layout):
    _check(tmp_path, layout)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "published"])
def test_so_they_are_for_what_config_json_can_say(tmp_path, variant):
    _check(tmp_path, "EP 2" if variant == "every second layer" else "1 process", **VARIANTS[variant])


def _copies(rank, args):
    from slime.backends.megatron_utils.hf_weights import HfWeights

    return sorted(HfWeights(args, _build(args)).ranks)


def test_copies_of_the_model_are_exported_independently_of_each_other(tmp_path):
    tiny_hf_model("qwen3_moe", num_hidden_layers=2).save_pretrained(tmp_path)
    assert run_ranks(_copies, 4, moe_args(tmp_path, **EP2)) == [[0, 1], [0, 1], [2, 3], [2, 3]]


@torch.no_grad()
def _double_router(rank, args):
    from slime.backends.megatron_utils.data import _packed_seq_params

    model, tokens = _build(args), torch.cat(_segments())[None]
    return model[0](tokens, None, None, packed_seq_params=_packed_seq_params(LENGTHS, tokens.device))[0]


def test_the_router_can_compute_in_float64(tmp_path):
    model = tiny_hf_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    (logits,) = run_ranks(_double_router, 1, moe_args(tmp_path, moe_router_dtype="fp64"))
    with torch.no_grad():
        expected = torch.cat([model(segment[None]).logits[0] for segment in _segments()])
    assert (logits - expected).abs().max() < 1e-5
