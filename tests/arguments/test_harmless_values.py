"""A value that changes nothing is no reason to refuse a run, and the user is told."""

import pytest

import train
from slime.arguments import validated_args
from slime.arguments.core.parser import parse
from tests.each import hold_each

REQUIRED = ["--hf-checkpoint", "model", "--rollout-batch-size", "4"]


@pytest.mark.parametrize(
    "words",
    [
        ["--expert-model-parallel-size", "1"],
        ["--context-parallel-size", "1"],
        ["--num-virtual-stages-per-pipeline-rank", "1"],
        ["--hierarchical-context-parallel-sizes", "1"],
        ["--num-experts", "0"],
        ["--moe-layer-freq", "1"],
        ["--moe-aux-loss-coeff", "0.0"],
        ["--moe-router-load-balancing-type", "aux_loss"],
        ["--mtp-num-layers", "0"],
        ["--optimizer-offload-fraction", "1.0"],
        ["--attention-dropout", "0"],
        ["--hidden-dropout", "0.0"],
        ["--prefill-num-servers", "0"],
        ["--transformer-impl", "local"],
        ["--optimizer", "adam"],
        ["--rollout-top-p", "1"],
    ],
)
def test_a_size_of_one_or_a_weight_of_zero_means_the_default(words):
    given, left_out = vars(parse([*REQUIRED, *words], None)), vars(parse(REQUIRED, None))
    assert given == left_out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attention-dropout", "0.1"], "--attention-dropout 0.1: not supported (wanted: 0.0)"),
        (["--hidden-dropout", "0.1"], "--hidden-dropout 0.1: not supported (wanted: 0.0)"),
    ],
)
def test_a_value_that_changes_something_is_refused(words, message):
    with pytest.raises(ValueError) as error:
        parse([*REQUIRED, *words], None)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("words", "dest", "value"),
    [
        (["--persistent-save-interval", "3"], "save_interval", 3),
        (["--disable-ckpt-fully-parallel-save"], "no_ckpt_fully_parallel_save", True),
        (["--override-opt_param-scheduler"], "override_opt_param_scheduler", True),
        (["--use-checkpoint-opt_param-scheduler"], "use_checkpoint_opt_param_scheduler", True),
        (["--rotary-scaling-factor", "8"], "rope_scaling_factor", 8.0),
    ],
)
def test_megatron_lms_other_names_are_known(words, dest, value):
    assert getattr(parse([*REQUIRED, *words], None), dest) == value


WITHOUT_EFFECT = [
    (dict(sequence_parallel=True), "--sequence-parallel: is off at --tensor-model-parallel-size 1"),
    (dict(allgather_cp=True), "--allgather-cp: has no effect at --context-parallel-size 1"),
    (dict(kl_coef=0.1), "--kl-coef 0.1: grpo has no KL in its rewards, it will only be measured"),
    (dict(gamma=0.9), "--gamma 0.9: has no effect, grpo does not discount"),
    (
        dict(account_for_loss_in_pipeline_split=True),
        "--account-for-loss-in-pipeline-split: has no effect at",
    ),
    (dict(async_save=True), "--async-save: has no effect without --save and --save-interval"),
    (dict(initial_loss_scale=8), "--initial-loss-scale 8.0: has no effect without --fp16"),
    (dict(fp16=True, loss_scale=8, hysteresis=1), "--hysteresis 1: has no effect with --loss-scale 8.0"),
    (dict(optimizer="sgd", adam_beta2=0.5), "--adam-beta2 0.5: has no effect with --optimizer sgd"),
    (dict(recompute_method="block"), "--recompute-method block: has no effect without --recompute-gran"),
    (dict(recompute_num_layers=1), "--recompute-num-layers 1: has no effect without --recompute-gran"),
    (dict(recompute_modules="mlp"), "--recompute-modules mlp: has no effect without --recompute-gran"),
    (
        dict(advantage_estimator="rloo", disable_grpo_std_normalization=True),
        "--disable-grpo-std-normalization: has no effect, rloo does not divide by a deviation",
    ),
    (
        dict(advantage_estimator="ppo", disable_rewards_normalization=True),
        "--disable-rewards-normalization: has no effect, ppo does not normalize rewards",
    ),
    (
        dict(advantage_estimator="ppo", num_critic_only_steps=2),
        "--num-critic-only-steps 2: the actor trains in none of 2 rollouts",
    ),
    (dict(loss_type="sft_loss", use_tis=True), "--use-tis: has no effect with --loss-type sft_loss"),
    (dict(loss_type="sft_loss", entropy_coef=0.1), "--entropy-coef: has no effect with --loss-type sft"),
    (dict(lambd=0.95), "--lambd 0.95: has no effect without --advantage-estimator ppo"),
    (dict(value_clip=0.4), "--value-clip 0.4: has no effect without --advantage-estimator ppo"),
    (dict(opd_kl_coef=0.5), "--opd-kl-coef 0.5: has no effect without --use-opd"),
    (dict(sgd_momentum=0.5), "--sgd-momentum 0.5: has no effect without --optimizer sgd"),
    (
        dict(use_precision_aware_optimizer=True),
        "--use-precision-aware-optimizer: has no effect, the formats of --exp-avg-dtype",
    ),
    (
        dict(overlap_cpu_optimizer_d2h_h2d=True),
        "--overlap-cpu-optimizer-d2h-h2d: has no effect without --optimizer-cpu-offload",
    ),
    (dict(no_pin_cpu_grads=True), "--no-pin-cpu-grads: has no effect without --optimizer-cpu-offload"),
    (
        dict(optimizer_offload_fraction=0.5),
        "--optimizer-offload-fraction 0.5: has no effect without --optimizer-cpu-offload",
    ),
    (dict(opd_type="sglang"), "--opd-type sglang: has no effect without --use-opd"),
    (
        dict(use_opd=True, opd_type="sglang", rollout_temperature=0.5),
        "--opd-type sglang: engines give log-probs of prompts at temperature 1",
    ),
    (
        dict(partial_rollout=True),
        "--partial-rollout: tokens are older than the weights they train, and no",
    ),
    (
        dict(partial_rollout=True, use_tis=True, keep_old_actor=True),
        "--partial-rollout: tokens are older than the weights they train, corrected by --use-tis",
    ),
    (
        dict(
            token_log_dir="tokens",
            use_fault_tolerance=True,
            custom_generate_function_path="slime.rollout.text_generation.generate",
        ),
        "--token-log-dir tokens: answers of slime.rollout.text_generation.generate are not logged",
    ),
    (
        dict(over_sampling_batch_size=64, keep_surplus_groups=True),
        "--keep-surplus-groups: tokens are older",
    ),
    (
        dict(use_kl_loss=True, kl_loss_coef=0.1),
        "--kl-loss-type k1: has an expected gradient of 0 as a loss (wanted: k2, k3, low_var_kl, or k1, k3, "
        "low_var_kl with --use-unbiased-kl)",
    ),
    (
        dict(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2", use_unbiased_kl=True),
        "--kl-loss-type k2 with --use-unbiased-kl: has the wrong gradient (wanted: k1, k3, low_var_kl, or "
        "k2, k3, low_var_kl without --use-unbiased-kl)",
    ),
    (
        dict(
            advantage_estimator="reinforce_plus_plus",
            normalize_advantages=True,
            kl_coef=0.1,
            kl_loss_type="k3",
        ),
        "--kl-loss-type k3 with --kl-coef: has the wrong gradient in the reward (wanted: k1)",
    ),
    (
        dict(n_samples_per_prompt=1),
        "--n-samples-per-prompt 1: grpo compares the samples of a prompt, so every advantage is 0",
    ),
    (
        dict(global_batch_size=None, actor_num_gpus_per_node=2, micro_batch_size=2),
        "--global-batch-size: not given, so 4 as in Megatron-LM",
    ),
    (dict(tis_level="sequence"), "--tis-level: has no effect without --tis-type mis"),
    (dict(keep_old_actor=True, use_rollout_logprobs=True), "--keep-old-actor: has no effect"),
    (dict(overlong_penalty_factor=2), "--overlong-penalty-factor 2.0: needs --overlong-buffer-len"),
    (dict(muon_momentum=0.9), "--muon-momentum 0.9: has no effect without --optimizer muon"),
    (
        dict(update_weight_delta_encoding="overwrite"),
        "--update-weight-delta-encoding overwrite: has no effect without --update-weight-mode delta",
    ),
    (
        dict(update_weight_disk_dir="/tmp/versions"),
        "--update-weight-disk-dir /tmp/versions: has no effect without --update-weight-transport disk",
    ),
    (
        dict(update_weight_delta_checksum="blake3"),
        "--update-weight-delta-checksum blake3: has no effect without --update-weight-mode delta",
    ),
    (
        dict(update_weight_local_checkpoint_dir="/tmp/local"),
        "--update-weight-local-checkpoint-dir /tmp/local: has no effect without --update-weight-tran",
    ),
    (
        dict(update_weight_disk_keep_files=True),
        "--update-weight-disk-keep-files: has no effect without --update-weight-transport disk",
    ),
    (
        dict(served_policy_interval=5, no_check_served_policy=True),
        "--served-policy-interval 5: has no effect with --no-check-served-policy",
    ),
    (dict(save="out"), "--save: no checkpoint will be written without --save-interval"),
    (dict(save_hf="out"), "--save-hf: no checkpoint will be written without --save-interval"),
    (dict(load="/none"), "--load /none: no checkpoint there, the run begins with the weights of --hf-"),
    (
        dict(max_tokens_per_gpu=64),
        "--max-tokens-per-gpu 64: has no effect without --use-dynamic-batch-size",
    ),
    (
        dict(use_dynamic_batch_size=True, max_tokens_per_gpu=64, log_probs_max_tokens_per_gpu=32),
        "--log-probs-max-tokens-per-gpu 32: has no effect",
    ),
]


def test_what_has_no_effect_is_accepted_with_a_note(words, notes):
    def check(case):
        changes, note = case
        (line,) = notes(words(**changes))
        assert line.startswith(note), f"said {line!r}"

    hold_each(WITHOUT_EFFECT, check, name=lambda case: case[1])


def test_what_has_an_effect_gets_no_note(words, notes, own_checkpoint, tmp_path):
    discounted = dict(advantage_estimator="reinforce_plus_plus", normalize_advantages=True, gamma=0.9)
    assert notes(words(**discounted, kl_coef=0.1)) == []
    assert notes(words(tensor_model_parallel_size=2, actor_num_gpus_per_node=2, sequence_parallel=True)) == []
    assert notes(words(load=own_checkpoint, save=tmp_path / "out", save_interval=1)) == []
    assert notes(words(load=tmp_path / "run", save=tmp_path / "run", save_interval=1)) == []
    assert notes(words(over_sampling_batch_size=64)) == []
    assert notes(words(use_dynamic_batch_size=True, max_tokens_per_gpu=64)) == []
    assert notes(words(n_samples_per_prompt=1, disable_rewards_normalization=True)) == []
    assert notes(words(advantage_estimator="grpo", gamma=1, kl_coef=0, lambd=1)) == []


def test_sequence_parallelism_is_off_where_there_is_one_rank(words):
    assert validated_args(words(sequence_parallel=True)).sequence_parallel is False
    two = words(tensor_model_parallel_size=2, actor_num_gpus_per_node=2, sequence_parallel=True)
    assert validated_args(two).sequence_parallel is True


@pytest.mark.parametrize(
    ("backend", "gpu", "notes_", "message"),
    [
        ("nccl", True, [], None),
        ("gloo", False, [], None),
        ("nccl", False, ["--distributed-backend nccl: there is no GPU, gloo is used"], None),
        (
            "gloo",
            True,
            [],
            "--distributed-backend gloo: not supported on GPUs (wanted: nccl, or leave it out)",
        ),
    ],
)
def test_the_backend_is_that_of_the_hardware(
    words, notes, refusal, monkeypatch, backend, gpu, notes_, message
):
    monkeypatch.setattr("slime.utils.accelerator.has_gpu", lambda: gpu)
    monkeypatch.setattr("slime.arguments.groups.engines.contradictions", lambda args: iter(()))
    line = words(distributed_backend=backend, debug_rollout_only=True)
    if message:
        assert refusal(line) == message
    else:
        assert notes(line) == notes_


def test_a_load_directory_that_is_not_there_yet_begins_a_run(words, notes, checkpoint, tmp_path):
    line = words(load=tmp_path / "none", ref_load=checkpoint)
    args = validated_args(line)
    assert (args.start_rollout_id, args.finetune, args.no_load_optim) == (0, True, True)
    assert notes(line) == [
        f"--load {tmp_path}/none: no checkpoint there, the run begins with the weights of --ref-load"
    ]


def test_a_limit_on_the_context_of_evaluations_is_accepted(words, data):
    line = words(eval_interval=1, eval_prompt_data=["a", data])
    assert validated_args([*line, "--eval-max-context-len", "64"]).eval_max_context_len == 64
    assert validated_args([*line, "--rollout-max-context-len", "32"]).eval_max_context_len == 32


def test_train_py_sends_weights_after_every_rollout(words):
    args = validated_args(words(update_weights_interval=2))
    assert [*train.notes(args)] == [
        "--update-weights-interval 2: has no effect, train.py sends them after every rollout"
    ]
    assert [*train.notes(validated_args(words()))] == []


def test_weights_over_a_disk_need_a_directory(words, notes, refusal, tmp_path):
    line = words(update_weight_transport="disk")
    assert refusal(line).startswith("--update-weight-disk-dir: missing (wanted: a directory that trainer and")
    (tmp_path / "file").touch()
    refused = refusal([*line, "--update-weight-disk-dir", str(tmp_path / "file")])
    assert refused.startswith(f"--update-weight-disk-dir {tmp_path}/file: ")
    assert notes([*line, "--update-weight-disk-dir", str(tmp_path / "versions")]) == []
