"""Flags of experts: what config.json says, Megatron-LM's notation, and what is refused."""

import json

import pytest

from slime.arguments import UsageError, validated_args
from slime.arguments.groups.moe import layer_kinds
from tests.arguments.conftest import write_empty_weights
from tests.families import tiny_family
from tools.make_tiny_model import make_config, make_tokenizer


@pytest.fixture(scope="session")
def experts(tmp_path_factory):
    """A mixture of 8 experts, 2 of them for a token, each 64 wide; the first of 3 layers is dense."""
    path = tmp_path_factory.mktemp("experts")
    tokenizer = make_tokenizer()
    make_config(tokenizer, "qwen3_moe").save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"mlp_only_layers": [0]}))
    tokenizer.save_pretrained(path)
    write_empty_weights(path)
    return path


def test_the_shape_comes_from_config_json(words, experts):
    args = validated_args(words(hf_checkpoint=experts))
    assert (args.num_experts, args.moe_router_topk, args.moe_ffn_hidden_size) == (8, 2, 64)
    assert args.moe_layer_freq == (0, 1, 1) and args.moe_router_pre_softmax is False
    assert (args.moe_router_load_balancing_type, args.moe_aux_loss_coeff) == (["aux_loss"], [0.0])


def test_flags_that_say_the_same_are_accepted(words, experts):
    same = {
        "num_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 64,
        "moe_layer_freq": "[0]*1+[1]*2",
        "moe_router_score_function": "softmax",
        "moe_token_drop_policy": "probs",
        "moe_aux_loss_coeff": 0,
    }
    assert validated_args(words(hf_checkpoint=experts, **same)).moe_layer_freq == (0, 1, 1)


def test_experts_are_split_as_attention_is_unless_told(words, experts):
    flags = {"actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    flags |= {"hf_checkpoint": experts}
    assert validated_args(words(**flags)).expert_tensor_parallel_size == 2
    whole = validated_args(words(**flags, expert_tensor_parallel_size=1, expert_model_parallel_size=2))
    assert (whole.expert_tensor_parallel_size, whole.expert_model_parallel_size) == (1, 2)


@pytest.fixture(scope="session")
def biased(tmp_path_factory):
    """Experts with biases."""
    path = tmp_path_factory.mktemp("biased")
    tiny_family("gpt_oss", path, vocab_size=512)
    make_tokenizer().save_pretrained(path)
    return path


def test_experts_with_biases_are_not_split(biased, words, refusal):
    flags = {"actor_num_gpus_per_node": 2, "hf_checkpoint": biased, **TP2}
    assert validated_args(words(**flags)).expert_tensor_parallel_size == 1
    message = refusal(words(**flags, expert_tensor_parallel_size=2))
    assert message.startswith(
        "--expert-tensor-parallel-size 2: experts of this model have biases (wanted: 1)"
    )
    message = refusal(words(**flags, disable_bias_linear=True))
    assert message.startswith("--disable-bias-linear: config.json of --hf-checkpoint describes a model with")


def test_shared_experts_are_split_as_attention_is(tmp_path, words, refusal, capsys):
    tiny_family("qwen2_moe", tmp_path, vocab_size=512, shared_expert_intermediate_size=41)
    make_tokenizer().save_pretrained(tmp_path)
    capsys.readouterr()
    message = refusal(words(actor_num_gpus_per_node=2, hf_checkpoint=tmp_path, **TP2))
    assert message.startswith("--tensor-model-parallel-size 2 does not divide the width 41 of shared")


def test_kernels_that_are_not_there_are_a_note(words, experts, notes):
    told = notes(words(hf_checkpoint=experts, moe_grouped_gemm=True, moe_permute_fusion=True))
    assert [line.split(":")[0] for line in told] == ["--moe-grouped-gemm", "--moe-permute-fusion"]


def test_deepep_moves_the_same_tokens_as_all_to_all_does(words, experts, notes):
    line = words(hf_checkpoint=experts, moe_token_dispatcher_type="flex", moe_enable_deepep=True)
    assert [text.split(":")[0] for text in notes(line)] == [
        "--moe-enable-deepep",
        "--moe-token-dispatcher-type flex",
    ]
    assert validated_args(line).moe_token_dispatcher_type == "alltoall"


def test_what_changes_nothing_is_accepted_for_a_dense_model(words):
    harmless = {"expert_tensor_parallel_size": 1, "moe_token_dispatcher_type": "alltoall", "num_experts": 0}
    args = validated_args(words(**harmless, moe_router_load_balancing_type="none"))
    assert (args.num_experts, args.expert_tensor_parallel_size) == (0, None)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("1", (1, 1, 1, 1)),
        ("2", (1, 0, 1, 0)),
        ("[0]*1+[1]*3", (0, 1, 1, 1)),
        ("([0]*1 + [1]*1)*2", (0, 1, 0, 1)),
        ("[0,1,1,0]", (0, 1, 1, 0)),
    ],
)
def test_the_notation_of_layers(text, kinds):
    assert layer_kinds(text, 4) == kinds


@pytest.mark.parametrize(
    "text", ["0", "-1", "[1]*3", "[2]*4", "x", "", "__import__('os')", "[1]*10**9", "[[1]]*4"]
)
def test_other_notation_is_refused(text):
    with pytest.raises(UsageError, match=r"--moe-layer-freq .*: wanted a number, or a list"):
        layer_kinds(text, 4)


TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_experts": 4}, "--num-experts 4: config.json of --hf-checkpoint says 8"),
        (
            {"moe_layer_freq": "[1]*3"},
            "--moe-layer-freq [1]*3: config.json of --hf-checkpoint says (0, 1, 1)",
        ),
        ({"moe_router_pre_softmax": True}, "--moe-router-pre-softmax: config.json of --hf-checkpoint says"),
        (
            {"expert_model_parallel_size": 3, "actor_num_gpus_per_node": 3, "rollout_batch_size": 3},
            "--expert-model-parallel-size 3 does not divide num_experts 8 (config.json)",
        ),
        (
            {"expert_model_parallel_size": 4, "actor_num_gpus_per_node": 2},
            "--expert-model-parallel-size 4 x --expert-tensor-parallel-size 1 x "
            "--pipeline-model-parallel-size 1: does not divide 2 trainer GPUs",
        ),
        (
            {"expert_tensor_parallel_size": 2, "actor_num_gpus_per_node": 2},
            "--expert-tensor-parallel-size 2 does not divide --tensor-model-parallel-size 1",
        ),
        (
            {"tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 2},
            "--tensor-model-parallel-size 2: a model with experts needs --sequence-parallel too",
        ),
        (
            {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
            "--moe-router-load-balancing-type seq_aux_loss: not supported (wanted: aux_loss or none)",
        ),
        ({"moe_aux_loss_coeff": [0.1, 0.2]}, "--moe-aux-loss-coeff 0.1 0.2: wanted one number"),
        (
            {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "none"},
            "--moe-aux-loss-coeff 0.1: has no effect without aux_loss",
        ),
        (
            {"moe_aux_loss_coeff": 0.1, "train_backend": "fsdp"},
            "--moe-aux-loss-coeff: not supported with --train-backend fsdp (wanted: 0)",
        ),
        (
            {"moe_z_loss_coeff": 0.1, "train_backend": "fsdp"},
            "--moe-z-loss-coeff: not supported with --train-backend fsdp (wanted: 0)",
        ),
        (
            {"moe_router_score_function": "sigmoid"},
            "--moe-router-score-function sigmoid: config.json of --hf-checkpoint says softmax",
        ),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "--moe-router-load-balancing-type sinkhorn: not"),
        (
            {"recompute_granularity": "selective", "recompute_modules": "moe_act"},
            "--recompute-modules moe_act: not supported (wanted: core_attn, layernorm, mlp, moe)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(words, experts, refusal, flags, message):
    assert refusal(words(hf_checkpoint=experts, **flags)).startswith(message)


@pytest.mark.parametrize(
    "flags",
    [
        {"num_experts": 8},
        {"num_experts": 8, "moe_layer_freq": "[1]*3"},
        {"moe_router_topk": 2},
        {"expert_model_parallel_size": 2, "actor_num_gpus_per_node": 2},
        {"expert_tensor_parallel_size": 2, "actor_num_gpus_per_node": 2, **TP2},
        {"moe_aux_loss_coeff": 0.1},
        {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0},
        {"moe_z_loss_coeff": 0.1},
        {"moe_grouped_gemm": True},
        {"moe_router_dtype": "fp32"},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_a_dense_model_has_no_use_for_them(words, refusals, flags):
    name = "--" + next(iter(flags)).replace("_", "-")
    messages = refusals(words(**flags))
    assert messages[0].startswith(name)
    end = "config.json of --hf-checkpoint describes a model without experts"
    assert all(message.endswith(end) for message in messages)


def test_replaying_the_engines_routes_implies_replay(words, experts):
    args = validated_args(
        words(hf_checkpoint=experts, use_rollout_routing_replay=True, use_slime_router=True)
    )
    assert (args.use_routing_replay, args.records_routes) == (True, False)
    args = validated_args(words(hf_checkpoint=experts, use_routing_replay=True))
    assert (args.use_routing_replay, args.records_routes) == (True, True)
    assert validated_args(words(hf_checkpoint=experts)).records_routes is False


def test_the_engines_routes_come_through_a_router_that_passes_them_on(words, notes, experts):
    line = words(hf_checkpoint=experts, use_rollout_routing_replay=True)
    assert validated_args(line).use_slime_router
    assert notes(line)[0].startswith("--use-rollout-routing-replay: taken with --use-slime-router")
    assert not validated_args(words(hf_checkpoint=experts, use_routing_replay=True)).use_slime_router


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"use_rollout_routing_replay": True, "router_policy": "round_robin"},
            "--use-rollout-routing-replay: sglang-router drops return_routed_experts from requests "
            "(wanted: --use-slime-router)",
        ),
        (
            {"use_routing_replay": True, "use_rollout_logprobs": True},
            "--use-routing-replay: --use-rollout-logprobs leaves out the pass that would record routes",
        ),
        (
            {
                "use_routing_replay": True,
                "loss_type": "sft_loss",
                "disable_compute_advantages_and_returns": True,
            },
            "--use-routing-replay: without advantages there is no pass that records routes",
        ),
        (
            {"use_rollout_routing_replay": True, "use_slime_router": True, "loss_type": "sft_loss"},
            "--use-rollout-routing-replay: no engine makes the tokens of --loss-type sft_loss",
        ),
        (
            {"use_routing_replay": True, "train_backend": "fsdp"},
            "--use-routing-replay: not supported with --train-backend fsdp (leave it out)",
        ),
    ],
)
def test_replay_without_routes_is_refused(words, experts, refusal, flags, message):
    assert refusal(words(hf_checkpoint=experts, **flags)) == message


def test_a_dense_model_has_no_routes_to_replay(words, refusal):
    message = refusal(words(use_rollout_routing_replay=True, use_slime_router=True))
    assert message == (
        "--use-rollout-routing-replay: config.json of --hf-checkpoint describes a model without experts"
    )
