"""What --train-backend fsdp takes of the other trainer's flags, and what the other takes of its own."""

import json

import pytest

from slime.arguments import validated_args
from tests.arguments.conftest import write_empty_weights
from tests.families import save_tiny_config
from tools.make_tiny_model import make_config, make_tokenizer

REFUSED = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "decoupled_lr": 0.0,
    "apply_wd_to_qk_layernorm": True,
    "release_train": True,
    "enable_mtp_training": True,
    "custom_model_provider_path": "tests.arguments.test_fsdp.anything",
    "custom_megatron_init_path": "tests.arguments.test_fsdp.anything",
    "custom_megatron_before_train_step_hook_path": "tests.arguments.test_fsdp.anything",
    "custom_megatron_before_log_prob_hook_path": "tests.arguments.test_fsdp.anything",
}
IDLE = {
    "recompute_granularity": "full",
    "overlap_grad_reduce": True,
    "attention_backend": "flash",
    "no_ckpt_fully_parallel_save": True,
    "accumulate_allreduce_grads_in_fp32": True,
}
OWN = {"gradient_checkpointing": True, "attn_implementation": "sdpa", "fsdp_cpu_offload": True}


def anything(*args):
    """A plug-in."""


def option(name):
    return "--" + name.replace("_", "-")


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_honour_is_refused_by_name(words, refusal, name):
    changes = {name: REFUSED[name], "actor_num_gpus_per_node": 2}
    message = refusal(words(train_backend="fsdp", **changes))
    assert message.startswith(option(name))
    assert "not supported with --train-backend fsdp" in message


@pytest.mark.parametrize("name", IDLE)
def test_what_changes_nothing_gets_a_note(words, notes, name):
    extra = {"recompute_method": "uniform", "recompute_num_layers": 1} if name.startswith("recompute") else {}
    lines = notes(words(train_backend="fsdp", **{name: IDLE[name]}, **extra))
    assert [line for line in lines if line.startswith(f"{option(name)}: has no effect with")]


def test_ways_of_tokens_to_experts_are_idle(words, notes, tmp_path):
    tokenizer = make_tokenizer()
    make_config(tokenizer, "qwen3_moe").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    write_empty_weights(tmp_path)
    flags = {"moe_router_dtype": "fp64", "moe_token_dispatcher_type": "alltoall"}
    lines = notes(words(hf_checkpoint=tmp_path, train_backend="fsdp", **flags))
    assert lines == [f"{option(name)}: has no effect with --train-backend fsdp" for name in flags]


@pytest.mark.parametrize("name", OWN)
def test_its_own_flags_are_idle_with_megatron_and_not_here(words, notes, name):
    (line,) = notes(words(**{name: OWN[name]}))
    assert line.startswith(f"{option(name)}: has no effect without --train-backend fsdp")
    assert notes(words(train_backend="fsdp", **{name: OWN[name]})) == []


def test_it_needs_no_other_flag(words, notes):
    assert notes(words(train_backend="fsdp")) == []
    assert validated_args(words(train_backend="fsdp")).train_backend == "fsdp"


@pytest.mark.parametrize(
    ("backend", "found", "flag"),
    [
        ("megatron", "fsdp_dcp", "load"),
        ("megatron", "fsdp_dcp", "ref_load"),
        ("megatron", "fsdp_dcp", "critic_load"),
        ("fsdp", "torch_dist", "load"),
        ("fsdp", "torch_dist", "ref_load"),
    ],
)
def test_a_checkpoint_of_the_other_trainer_is_refused(words, refusal, tmp_path, backend, found, flag):
    iteration = tmp_path / "saved" / "iter_0000003"
    iteration.mkdir(parents=True)
    (iteration.parent / "latest_checkpointed_iteration.txt").write_text("3")
    (iteration / "metadata.json").write_text(json.dumps({"sharded_backend": found}))
    changes = {flag: iteration.parent, "use_kl_loss": True}
    changes |= {"advantage_estimator": "ppo"} if flag == "critic_load" else {}
    message = refusal(words(train_backend=backend, **changes))
    assert message.startswith(
        f"--{flag.replace('_', '-')} {iteration.parent}: its format is {found} (wanted: "
    )


@pytest.mark.parametrize("flag", ["load", "ref_load"])
def test_what_megatron_lms_converter_wrote_is_refused(words, refusal, tmp_path, flag):
    (tmp_path / "saved" / "release").mkdir(parents=True)
    (tmp_path / "saved" / "release" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("release")
    changes = {flag: tmp_path / "saved", "use_kl_loss": True}
    assert "its format is torch_dist (wanted: " in refusal(words(train_backend="fsdp", **changes))


def test_a_critic_float16_and_other_optimizers_are_taken(words, notes):
    for flags in (
        {"advantage_estimator": "ppo"},
        {"fp16": True, "initial_loss_scale": 1024.0, "hysteresis": 1},
        {"optimizer": "sgd", "sgd_momentum": 0.5},
        {"no_decoupled_weight_decay": True},
    ):
        assert notes(words(train_backend="fsdp", **flags)) == [], flags


def test_context_parallelism_needs_packed_rows(words, refusal, notes):
    flags = dict(train_backend="fsdp", context_parallel_size=2, actor_num_gpus_per_node=2, rollout_num_gpus=2)
    assert notes(words(**flags)) == []
    message = refusal(words(**flags, attn_implementation="sdpa"))
    assert "splits packed rows, which --attn-implementation sdpa does not have" in message


@pytest.fixture
def tiny_checkpoint(tmp_path):
    """``tiny_checkpoint(family)``: a directory that looks like one of it."""

    def make(family):
        path = tmp_path / family
        save_tiny_config(family, path, vocab_size=320)
        make_tokenizer().save_pretrained(path)
        write_empty_weights(path)
        return path

    return make


@pytest.mark.parametrize(
    ("family", "kind"),
    [("gpt_oss", "sinks"), ("glm_moe_dsa", "sparse attention"), ("qwen3_5_text", "linear attention")],
)
def test_context_parallelism_is_refused_early_where_rows_do_not_stay_packed(
    words, refusal, tiny_checkpoint, family, kind
):
    """The trainer would refuse it too, but only when the weights are there."""
    path = tiny_checkpoint(family)
    flags = {"hf_checkpoint": path, "train_backend": "fsdp", "actor_num_gpus_per_node": 2}
    if family == "glm_moe_dsa":
        flags |= {"freeze_indexer": True, "moe_router_bias_update_rate": 0}
    assert validated_args(words(**flags)).context_parallel_size == 1
    assert refusal(words(**flags, context_parallel_size=2)) == (
        f"--context-parallel-size 2: not with model_type {family}, whose {kind} "
        "--train-backend fsdp does not compute in packed rows (wanted: 1)"
    )


@pytest.mark.parametrize("more", [{}, {"check": True}])
def test_a_family_that_transformers_does_not_know_is_refused_before_anything_starts(
    words, refusal, tiny_checkpoint, more
):
    path = tiny_checkpoint("mimo")
    assert validated_args(words(hf_checkpoint=path)).model_type == "mimo"
    message = refusal(words(hf_checkpoint=path, train_backend="fsdp", **more))
    assert message.startswith(f"--hf-checkpoint {path}: --train-backend fsdp: {path / 'config.json'}: ")
    assert "model type `mimo`" in message
    assert message.endswith(
        "(wanted: an architecture that transformers knows, or code in the checkpoint and --trust-remote-code)"
    )
    assert validated_args([*words(hf_checkpoint=path, train_backend="fsdp"), "--debug-rollout-only"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"use_sliding_window": True}, "use_sliding_window True is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ],
)
def test_what_a_family_refuses_this_trainer_refuses_too(words, refusal, altered_checkpoint, change, named):
    path = altered_checkpoint(**change)
    line = [*words(hf_checkpoint=path, train_backend="fsdp", colocate=None), "--debug-train-only"]
    assert refusal(line) == refusal(words(hf_checkpoint=path))
    assert named in refusal(line)


def test_biases_of_experts_move_with_one_trainer_and_the_other_says_that_it_leaves_them_alone(
    words, notes, refusal, tiny_checkpoint
):
    path = tiny_checkpoint("glm4_moe")
    rate = "--moe-router-bias-update-rate"
    assert any(
        line.startswith(f"{rate} 0.001: each optimizer step moves")
        for line in notes(words(hf_checkpoint=path))
    )
    assert not any(rate in line for line in notes(words(hf_checkpoint=path, moe_router_bias_update_rate=0)))
    assert refusal(words(hf_checkpoint=path, train_backend="fsdp")) == (
        f"{rate} 0.001: not supported with --train-backend fsdp, which leaves the biases alone by which the "
        "router chooses experts (wanted: 0)"
    )
    fixed = words(hf_checkpoint=path, train_backend="fsdp", moe_router_bias_update_rate=0)
    assert validated_args(fixed).moe_router_bias_update_rate == 0
    assert not any(rate in line for line in notes(words(hf_checkpoint=tiny_checkpoint("mixtral"))))


def test_an_architecture_without_a_family_trains_where_no_embedded_engine_serves_it(
    words, refusal, altered_checkpoint
):
    path = altered_checkpoint(model_type="gpt_neox", intermediate_size=512)
    line = words(hf_checkpoint=path, train_backend="fsdp")
    assert refusal(line).startswith(f"--hf-checkpoint {path}: the embedded engine cannot serve it")
    assert "model_type 'gpt_neox' is not supported" in refusal(words(hf_checkpoint=path))
    args = validated_args(
        [*words(hf_checkpoint=path, train_backend="fsdp", colocate=None), "--debug-train-only"]
    )
    assert (args.model_type, args.ffn_hidden_size, args.num_layers) == ("gpt_neox", 512, 3)


def test_an_architecture_that_transformers_does_not_know_is_refused(words, refusal, altered_checkpoint):
    path = altered_checkpoint(model_type="unheard_of")
    message = refusal(words(hf_checkpoint=path, train_backend="fsdp"))
    assert message.startswith(f"--hf-checkpoint {path}: ")
    assert "unheard_of" in message


@pytest.mark.parametrize("model_type", ["t5", "distilbert"])
def test_an_architecture_that_is_no_causal_language_model_is_refused(
    words, refusal, altered_checkpoint, model_type
):
    """``AutoConfig`` knows it, ``AutoModelForCausalLM`` would say so only when the trainer builds it."""
    path = altered_checkpoint(model_type=model_type, intermediate_size=512)
    line = [*words(hf_checkpoint=path, train_backend="fsdp", colocate=None), "--debug-train-only"]
    message = refusal(line)
    assert message.startswith(f"--hf-checkpoint {path}: --train-backend fsdp: {path / 'config.json'}: ")
    assert "Config is of no causal language model (wanted: an architecture that transformers knows" in message
    config = json.loads((path / "config.json").read_text())
    own_code = {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
    (path / "config.json").write_text(json.dumps(config | own_code))
    assert "is of no causal language model" in refusal(line)
    (path / "modeling_own.py").write_text("class Own: ...")
    assert validated_args([*line, "--trust-remote-code"]).model_type == model_type
