"""What ``--check`` estimates is what trainers that are really built have, on the CPU."""

import pytest

from slime.check.activations import activations, not_estimated
from slime.check.kernels import Kernels
from slime.check.layout import layout_of
from slime.check.needs import trained_roles
from slime.config.run import run_config
from slime.models import FAMILIES
from tests.check.harness import (
    NAMES,
    activations_of_trainers,
    checked_args,
    states_of_trainers,
    write_config,
)
from tests.megatron_harness import run_ranks

pytestmark = pytest.mark.slow

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"num_virtual_stages_per_pipeline_rank": 2}
MTP = {"enable_mtp_training": True, "mtp_num_layers": 1}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
EXPERTS = (
    *("qwen3_moe", "qwen2_moe", "glm4_moe", "mixtral", "minimax_m2", "deepseek_v3", "deepseek_v32"),
    "qwen3_next",
)
UNEVEN = {"decoder_first_pipeline_num_layers": 1}
COUNTED = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
OF_EXPERTS = {"lora_rank": 6, "lora_target_modules": ["q_proj", ".*experts.*"]}
TP2_CASES = [
    *[(name, TP2) for name in ("qwen3", "qwen2", "glm4", *EXPERTS)],
    *[("qwen3", TP2 | {"lora_rank": 6}), ("qwen2_moe", TP2 | OF_EXPERTS)],
]
PP2_CASES = [
    *[(name, PP2) for name in ("qwen3", "llama", "glm4_moe", "moonlight", "glm_moe_dsa-shared")],
    *[("qwen3", PP2 | UNEVEN), ("glm4_moe", PP2 | COUNTED)],
]
LAYOUTS = {
    "TP 2": TP2_CASES,
    "TP 2, ETP 1": [("gpt_oss", TP2)],
    "PP 2": PP2_CASES,
    "PP 2 + VPP 2": [("qwen3", VPP2), ("glm4_moe", VPP2), ("glm4_moe", VPP2 | MTP)],
    "EP 2": [
        *[(name, EP2) for name in (*EXPERTS, "gpt_oss")],
        *[("llama", {}), ("deepseek_v3", EP2 | MTP), ("qwen3_moe", EP2 | OF_EXPERTS)],
    ],
}
OPTIMIZERS = [
    {"optimizer": "sgd"},
    {"use_stateless_adam": True},
    {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"},
    {"grad_reduce_in_bf16": True},
    {"freeze_params_name_list": ["embedding", "mlp"]},
    {"lora_rank": 6, "lora_exclude_modules": ["v_proj"]},
    {"fp16": True},
    {"ddp_pad_buckets_for_high_nccl_busbw": True},
]
LENGTHS = [64] * 4
# Without a fused norm a CPU keeps the row normed, and in bfloat16 both that and the row in float32.
CPU = Kernels(
    norm=lambda rows, features, size: 4 * rows + (4 if size == 4 else 6) * features,
    attention=lambda heads: 4 * heads,
    pads_values=False,
)
FULL = {"recompute_granularity": "full"}
FULL_OF_ONE = FULL | {"recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
RECOMPUTATIONS = [
    FULL_OF_ONE,
    FULL | {"recompute_method": "uniform", "recompute_num_layers": 2},
    FULL | {"recompute_method": "block", "recompute_num_layers": 2},
    SELECTIVE,
    SELECTIVE | {"recompute_modules": ["layernorm"]},
    SELECTIVE | {"recompute_modules": ["mlp", "moe"]},
]
# Segments are as long, which attention with sinks and delta nets ask.
LONGEST = {"rollout_max_context_len": max(LENGTHS)}
NOT_ESTIMATED = dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "glm_moe_dsa-shared"), "for sparse attention")
ACTIVATIONS = [
    *[("mimo", {"fp32": fp32, **MTP, "mtp_num_layers": 2}) for fp32 in (True, False)],
    *[(name, MTP | flags) for name in ("mimo", "glm4_moe") for flags in (FULL_OF_ONE, SELECTIVE)],
    *[
        (name, {"fp32": fp32, **LONGEST})
        for name in NAMES
        if name not in NOT_ESTIMATED
        for fp32 in (True, False)
    ],
    *[(name, flags) for name in ("qwen3", "glm4_moe", "moonlight") for flags in RECOMPUTATIONS],
    *[(name, flags | LONGEST) for name in ("qwen3_next", "gpt_oss") for flags in RECOMPUTATIONS],
]


def _shown(value):
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


@pytest.fixture(scope="module")
def args_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("configs")

    def build(name, world_size, flags):
        return checked_args(write_config(name, root / name), world_size, **flags)

    return build


def _estimated(args, rank=0):
    (role,) = trained_roles(run_config(args))
    stage = role.stages[rank * role.layout.pp // role.layout.world]
    states = stage.states
    return {
        "parameters": sum(stage.parameters.values()),
        "weights": states.weights,
        "gradients": states.gradients,
        "optimizer": states.optimizer,
    }


def test_every_family_is_among_the_tiny_models(args_of):
    assert {args_of(name, 1, {}).model_type for name in NAMES} == FAMILIES.keys()


@pytest.mark.parametrize("name", NAMES)
def test_families_whose_activations_are_not_estimated_are_named(name, args_of):
    args = args_of(name, 1, {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64})
    assert not_estimated(run_config(args)) == NOT_ESTIMATED.get(name, "")
    (role,) = trained_roles(run_config(args))
    assert [stage.activations is None for stage in role.stages] == [name in NOT_ESTIMATED]


def test_states_of_every_family_are_counted_to_the_byte(args_of):
    runs = [args_of(name, 1, {"fp32": number % 2 == 0}) for number, name in enumerate(NAMES)]
    runs += [args_of("qwen3", 1, flags) for flags in OPTIMIZERS]
    runs += [args_of(name, 1, MTP) for name in ("mimo", "deepseek_v3", "glm4_moe", "qwen3_next")]
    (found,) = run_ranks(states_of_trainers, 1, runs)
    assert [_estimated(args) for args in runs] == found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_has_the_parameters_that_are_counted(layout, args_of):
    runs = [args_of(name, 2, flags) for name, flags in LAYOUTS[layout]]
    for rank, results in enumerate(run_ranks(states_of_trainers, 2, runs)):
        for args, found in zip(runs, results, strict=True):
            mine = _estimated(args, rank)
            assert mine["parameters"] == found["parameters"]
            # Up to the padding of buffers around a tied embedding, and of parts of them.
            assert mine == {name: pytest.approx(value, rel=0.01) for name, value in found.items()}


@pytest.fixture(scope="module")
def kept(args_of):
    runs = [args_of(name, 1, flags) for name, flags in ACTIVATIONS]
    (found,) = run_ranks(activations_of_trainers, 1, runs, LENGTHS)
    return list(zip(runs, found, strict=True))


@pytest.mark.parametrize("case", range(len(ACTIVATIONS)), ids=lambda case: _shown(ACTIVATIONS[case][0]))
def test_activations_are_those_that_autograd_keeps(case, kept):
    """Within a twentieth after the forward pass, and at the worst moment of forward and backward pass."""
    args, found = kept[case]
    config = run_config(args)
    mine = activations(config, layout_of(config), 0, sum(LENGTHS), kernels=CPU)
    logits = mine.logits / 2  # autograd keeps them, and not their gradient
    assert logits == found["logits"]
    assert mine.kept + logits == pytest.approx(found["kept"], rel=0.05)
    assert max(mine.kept + logits, mine.recomputing) == pytest.approx(found["most"], rel=0.05)
    assert found["left"] == 0


def test_logits_are_in_the_format_of_training_but_those_of_a_loss_of_the_users_own(args_of):
    custom = {
        "loss_type": "custom_loss",
        "custom_loss_function_path": "slime.training.losses.sft.sft_loss_function",
    }
    counted = []
    for flags in ({}, custom):
        config = run_config(args_of("qwen3", 1, flags))
        counted.append(activations(config, layout_of(config), 0, 10).logits / 10)
    vocabulary = config.model.padded_vocab_size
    assert counted == [2 * 2 * vocabulary, 2 * 4 * vocabulary]
