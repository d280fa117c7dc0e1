"""What follows from the flags."""

import pytest
import torch

from slime.arguments import UsageError, validated_args


def test_a_colocated_run_shares_and_offloads(words):
    args = validated_args(words(actor_num_gpus_per_node=2))
    assert (args.rollout_num_gpus, args.offload_train, args.offload_rollout) == (2, True, True)
    assert (args.trainer_world_size, args.world_size, args.sglang_tp_size) == (2, 2, 1)


def test_a_disaggregated_run_offloads_nothing(words):
    args = validated_args(words(colocate=None, rollout_num_gpus=2))
    assert (args.offload_train, args.offload_rollout) == (False, False)


def test_offload_can_be_switched_off_under_colocate(words):
    args = validated_args([*words(), "--no-offload-train"])
    assert (args.offload_train, args.offload_rollout) == (False, True)


def test_offload_is_shorthand_and_leaves_no_attribute(words):
    args = validated_args(words(colocate=None, rollout_num_gpus=1, offload=True))
    assert args.offload_train
    assert args.offload_rollout
    assert not hasattr(args, "offload")


def test_the_environment_has_the_key_that_no_flag_gives(words, monkeypatch):
    assert validated_args(words()).sglang_api_key is None
    monkeypatch.setenv("SLIME_API_KEY", "of the environment")
    assert validated_args(words()).sglang_api_key == "of the environment"
    assert validated_args(words(sglang_api_key="given")).sglang_api_key == "given"
    monkeypatch.setenv("SLIME_API_KEY", "")
    assert validated_args(words()).sglang_api_key is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_steps_per_rollout": 1}, 16),
        ({"num_steps_per_rollout": 4}, 4),
        ({"global_batch_size": 8}, 8),
        ({"global_batch_size": 4, "num_steps_per_rollout": 4}, 4),
    ],
)
def test_samples_of_an_optimizer_step(words, changes, expected):
    assert validated_args(words(**changes)).global_batch_size == expected


@pytest.mark.parametrize("idle", [{"debug_rollout_only": True}, {"num_rollout": 0}])
def test_a_run_without_optimizer_steps_needs_not_say_their_size(words, idle):
    args = validated_args(words(num_steps_per_rollout=None, **idle))
    assert args.global_batch_size == 16


def test_steps_are_as_in_megatron_lm_where_nobody_says_their_size(words):
    """A micro-batch on each data-parallel rank."""
    steps = dict(num_steps_per_rollout=None, micro_batch_size=2)
    assert validated_args(words(**steps)).global_batch_size == 2
    assert validated_args(words(**steps, actor_num_gpus_per_node=4)).global_batch_size == 8
    halves = dict(actor_num_gpus_per_node=4, tensor_model_parallel_size=2)
    assert validated_args(words(**steps, **halves)).global_batch_size == 4


def test_the_shape_comes_from_the_checkpoint(words):
    args = validated_args(words())
    assert (args.num_layers, args.hidden_size, args.num_attention_heads) == (3, 128, 4)
    assert (args.num_query_groups, args.kv_channels, args.ffn_hidden_size) == (2, 32, 256)
    assert (args.vocab_size, args.padded_vocab_size, args.model_type) == (320, 384, "qwen3")
    assert args.norm_epsilon == args.layernorm_epsilon
    assert (args.swiglu, args.qk_layernorm, args.add_bias_linear) == (True, True, False)
    assert not args.untie_embeddings_and_output_weights


def test_a_shape_flag_that_agrees_is_accepted(words):
    line = words(num_layers=3, rotary_base=10000, swiglu=True, group_query_attention=True)
    assert validated_args(line).num_layers == 3


@pytest.mark.parametrize(
    ("flag", "dtype"),
    [(None, torch.bfloat16), ("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)],
)
def test_precision(words, flag, dtype):
    args = validated_args(words(**({flag: True} if flag else {})))
    assert args.params_dtype == dtype
    assert args.bf16 == (dtype == torch.bfloat16)


def test_a_run_without_checkpoint_starts_at_zero_and_loads_no_optimizer(words, tmp_path):
    args = validated_args(words(load=tmp_path / "run", save=tmp_path / "run", save_interval=1))
    assert (args.start_rollout_id, args.no_load_optim, args.no_load_rng, args.finetune) == (
        0,
        True,
        True,
        True,
    )


def test_a_checkpoint_is_resumed_with_its_optimizer(words, own_checkpoint):
    args = validated_args(words(load=own_checkpoint))
    assert (args.start_rollout_id, args.no_load_optim, args.finetune) == (None, None, False)


def test_negated_switches_set_the_positive_attribute(words):
    args = validated_args(words(disable_rewards_normalization=True))
    assert args.rewards_normalization is False
    assert args.compute_advantages_and_returns is True


def test_a_single_sample_is_not_divided_by_its_deviation(words):
    assert validated_args(words()).grpo_std_normalization is True
    single = dict(n_samples_per_prompt=1, disable_rewards_normalization=True)
    assert validated_args(words(**single)).grpo_std_normalization is False


def test_defaults_that_follow_another_flag(words):
    args = validated_args(
        words(eps_clip=0.3, reward_key="score", max_tokens_per_gpu=64, rollout_max_context_len=32)
    )
    assert args.eps_clip_high == 0.3
    assert args.eval_reward_key == "score"
    assert args.log_probs_max_tokens_per_gpu == 64
    assert args.rollout_max_prompt_len == 31
    assert args.over_sampling_batch_size == 4
    assert args.eval_function_path == args.rollout_function_path


def test_balancing_by_flops_balances_data(words):
    args = validated_args(words(balance_by_flops=True, use_dynamic_batch_size=True, max_tokens_per_gpu=64))
    assert args.balance_data


def test_dump_details_names_both_dumps(words, tmp_path):
    args = validated_args(words(dump_details=tmp_path))
    assert args.save_debug_rollout_data == f"{tmp_path}/rollout_data/{{rollout_id}}.pt"
    assert args.save_debug_train_data == f"{tmp_path}/train_data/{{rollout_id}}.pt"


def test_a_dump_to_train_on_leaves_the_engines_out(words, tmp_path):
    torch.save({}, tmp_path / "0.pt")
    args = validated_args(words(load_debug_rollout_data=f"{tmp_path}/{{rollout_id}}.pt", colocate=None))
    assert (args.debug_train_only, args.rollout_num_gpus) == (True, 0)


def test_auto_takes_the_embedded_engine_where_sglang_is_missing(words, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert validated_args(words()).rollout_engine == "embedded"


def test_sglang_must_be_installed_to_be_chosen(words, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--rollout-engine sglang: sglang is not installed"):
        validated_args(words(rollout_engine="sglang"))


def test_a_custom_config_wins_and_what_is_derived_follows_it(words, tmp_path):
    (tmp_path / "more.yaml").write_text("rollout_batch_size: 8\nlr: 1\nmine: {a: 1}\n")
    args = validated_args(words(custom_config_path=tmp_path / "more.yaml"))
    assert (args.rollout_batch_size, args.global_batch_size, args.mine) == (8, 32, {"a": 1})
    assert isinstance(args.lr, float)


def test_numbers_of_yaml_may_be_written_as_on_the_command_line(words, tmp_path):
    (tmp_path / "more.yaml").write_text("lr: 4e-4\nweight_decay: 1E-2\nmine: [-1e+3, '4e-4']\n")
    args = validated_args(words(custom_config_path=tmp_path / "more.yaml"))
    assert (args.lr, args.weight_decay, args.mine) == (4e-4, 0.01, [-1000.0, "4e-4"])


OWN_KEYS = {
    "max_tokens": "max_tokens_per_gpu",
    "use_mis": "use_tis",
    "rm_types": "rm_type",
    "eval_top_n": "eval_top_k",
    "partial_rollouts": "partial_rollout",
    "rollout_max_context": "rollout_max_context_len",
}


def test_keys_of_ones_own_may_be_like_flags(words, notes, tmp_path):
    path = tmp_path / "more.yaml"
    path.write_text("".join(f"{key}: [own]\n" for key in OWN_KEYS) + "horizon: 3\n")
    line = words(custom_config_path=path)
    said = [
        f"{key} is not a flag and taken for a key of your own (did you mean {OWN_KEYS[key]}?)"
        for key in OWN_KEYS
    ]
    assert notes(line) == [f"--custom-config-path {path}: {text}" for text in said]
    args = validated_args(line)
    assert args.horizon == 3 and all(getattr(args, key) == ["own"] for key in OWN_KEYS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("rollout_batchsize: 4\n", r"rollout_batchsize is not a flag \(did you mean rollout_batch_size\?"),
        ("partail_rollout: 4\n", r"partail_rollout is not a flag \(did you mean partial_rollout\?"),
        ("a: [", "not valid YAML"),
        ("- 1\n", "holds list"),
        ("rollout_batch_size: many\n", "rollout_batch_size is 'many' \\(wanted: int\\)"),
        ("use_distributed_post: true\n", "--use-distributed-post: not supported"),
        ("advantage_estimator: grop\n", "advantage_estimator is 'grop' \\(wanted: grpo or "),
        ("custom_rm_path: [a.b]\n", r"custom_rm_path is \['a.b'\] \(wanted: str\)"),
        ("eval_prompt_data: dapo\n", "eval_prompt_data is 'dapo' \\(wanted: list of str\\)"),
        ("rollout_engine: sglang\n", "--rollout-engine sglang: sglang is not installed"),
        ("lr: .nan\n", r"lr is nan \(wanted: a finite number, 0 to 1\)"),
        ("lr: null\n", r"lr is None \(wanted: float\)"),
        ("n_samples_per_prompt: true\n", r"n_samples_per_prompt is True \(wanted: int\)"),
        ("rollout_stop_token_ids: [1, x]\n", r"rollout_stop_token_ids is \[1, 'x'\] \(wanted: int\)"),
        ("tensor_model_parallel_size: 0\n", r"tensor_model_parallel_size is 0 \(wanted: more than 0\)"),
        ("router_policy: best\n", r"router_policy is 'best' \(wanted: random or round_robin or "),
        ("router_queue_size: 1.5\n", r"router_queue_size is 1.5 \(wanted: int\)"),
        ("rolout_batch_size: 4\n", r"rolout_batch_size is not a flag \(did you mean rollout_batch_size\?"),
        ("grpo_std_normalization: true\n", "grpo_std_normalization follows from other flags"),
        ("sglang_model_routers: {}\n", "sglang_model_routers follows from other flags"),
        ("custom_config_path: x.yaml\n", "custom_config_path cannot name another file"),
        ("5: 6\n", "5 is not a name"),
        ("day: 2024-13-45\n", "not valid YAML"),
    ],
)
def test_a_bad_custom_config_is_refused(words, tmp_path, text, message):
    if text is not None:
        (tmp_path / "more.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        validated_args(words(custom_config_path=tmp_path / "more.yaml"))


def test_a_data_source_of_ones_own_needs_no_file(words):
    validated_args(words(data_source_path="tests.rollout.plugins.BareSource", prompt_data=None))


@pytest.mark.parametrize(
    ("own", "path"),
    [
        ("custom_convert_samples_to_train_data_path", "tests.plugin_contracts.recorders.convert"),
        ("custom_generate_function_path", "tests.rollout.plugins.split_generate"),
        ("rollout_function_path", "tests.rollout.plugins.own_rollout"),
    ],
)
def test_one_sample_per_prompt_is_enough_for_user_code_that_makes_its_own_groups(words, own, path):
    assert validated_args(words(n_samples_per_prompt=1, **{own: path})).n_samples_per_prompt == 1
