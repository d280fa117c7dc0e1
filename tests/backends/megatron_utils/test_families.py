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


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_export_equals_import_bit_for_bit_on_every_rank(checkpoints, results, layout, family):
    stored = stored_tensors(family, checkpoints[family][0])
    for rank in results(layout):
        weights = rank[family]["weights"]
        assert weights.keys() == stored.keys()
        for name, tensor in stored.items():
            assert torch.equal(weights[name], tensor), name
