"""Bad input is answered with one line that names what was found and what was wanted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.arguments import validated_args
from slime.models import FAMILIES
from tests.each import hold_each
from tests.forking import ForkedScript

ROOT = Path(__file__).parents[2]


def test_a_missing_data_file_is_named(words, refusal, tmp_path):
    assert refusal(words(prompt_data=tmp_path / "no.jsonl")) == (
        f"--prompt-data: {tmp_path}/no.jsonl: no such data file"
    )


def test_a_malformed_line_is_named_with_its_number(words, refusal, data):
    data.write_text('{"input": "1", "label": "1"}\n\n{"input": "2", \n')
    assert refusal(words()).startswith(f"--prompt-data: {data}:3: not valid JSON")


def test_a_line_that_is_no_object_is_named(words, refusal, data):
    data.write_text('{"input": "1", "label": "1"}\n[1, 2]\n')
    assert refusal(words()) == f"--prompt-data: {data}:2: expected a JSON object, found list"


def test_a_record_without_the_field_is_named_with_the_fields_it_has(words, refusal, data):
    data.write_text('{"input": "1", "label": "1"}\n{"prompt": "2", "label": "2"}\n')
    assert refusal(words()) == f"--prompt-data: {data}:2 has no field 'input' (found: label, prompt)"


def test_a_data_file_of_another_kind_is_refused(words, refusal, tmp_path):
    (tmp_path / "data.csv").write_text("a,b\n")
    assert "expected .jsonl or .parquet" in refusal(words(prompt_data=tmp_path / "data.csv"))


def test_a_broken_parquet_file_is_refused(words, refusal, tmp_path):
    (tmp_path / "data.parquet").write_text("no parquet")
    assert "not a parquet file" in refusal(words(prompt_data=tmp_path / "data.parquet"))


def test_a_bad_eval_file_is_named_with_its_dataset(words, refusal, tmp_path):
    line = words(eval_interval=1, eval_prompt_data=["held_out", tmp_path / "no.jsonl"])
    assert refusal(line) == f"eval dataset held_out: {tmp_path}/no.jsonl: no such data file"


def test_a_missing_checkpoint_is_named(words, refusal, tmp_path):
    assert refusal(words(hf_checkpoint=tmp_path / "none")) == (
        f"--hf-checkpoint {tmp_path}/none: {tmp_path}/none/config.json: not found "
        "(wanted: a local Hugging Face checkpoint directory)"
    )


def test_a_checkpoint_without_weights_is_refused(words, refusal, altered_checkpoint):
    path = altered_checkpoint()
    (path / "model.safetensors").unlink()
    assert refusal(words(hf_checkpoint=path)) == f"--hf-checkpoint {path}: holds no .safetensors file"


def test_an_unsupported_model_type_is_refused_with_those_that_are(words, refusal, altered_checkpoint):
    message = refusal(words(hf_checkpoint=altered_checkpoint(model_type="gpt2")))
    assert f"model_type 'gpt2' is not supported (wanted: {', '.join(FAMILIES)})" in message


def test_a_tokenizer_larger_than_the_model_is_refused(words, refusal, altered_checkpoint):
    message = refusal(words(hf_checkpoint=altered_checkpoint(vocab_size=256)))
    assert message.endswith("does not fit the model: token id 269, but vocab_size 256 (config.json)")


def test_a_broken_tokenizer_is_refused(words, refusal, altered_checkpoint):
    path = altered_checkpoint()
    (path / "tokenizer.json").write_text("{}")
    assert "its tokenizer does not load" in refusal(words(hf_checkpoint=path))


def test_a_tokenizer_that_is_code_has_to_be_trusted(words, refusal, altered_checkpoint):
    """As those of Kimi and Moonlight; for Moonlight's kind of model transformers would take another one."""
    path = altered_checkpoint()
    (path / "tokenizer.json").rename(path / "tiktoken.model")
    classes = {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]}
    (path / "tokenizer_config.json").write_text(json.dumps({"auto_map": classes}))
    assert refusal(words(hf_checkpoint=path)).endswith(
        "its tokenizer does not load (it is code that comes with the checkpoint: "
        "tokenization_moonshot.TikTokenTokenizer; wanted: --trust-remote-code)"
    )


def test_a_chat_template_that_the_tokenizer_lacks_is_refused(words, refusal, altered_checkpoint):
    path = altered_checkpoint()
    (path / "chat_template.jinja").unlink()
    assert refusal(words(hf_checkpoint=path, apply_chat_template=True)).startswith("--apply-chat-template:")


def test_a_reference_without_a_checkpoint_is_refused(words, refusal, tmp_path):
    assert refusal(words(ref_load=tmp_path)).startswith(f"--ref-load {tmp_path}: no checkpoint there")


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("num_layers", 4, "3"),
        ("hidden_size", 64, "128"),
        ("rotary_base", 5e5, "10000.0"),
        ("vocab_size", 9, "320"),
    ],
)
def test_a_shape_flag_that_contradicts_the_checkpoint_shows_both_values(words, refusal, flag, value, said):
    name = "--" + flag.replace("_", "-")
    assert refusal(words(**{flag: value})) == f"{name} {value}: config.json of --hf-checkpoint says {said}"


def test_an_unknown_flag_is_named_with_the_one_it_resembles(words, refusal):
    line = [*words(), "--global-batchsize", "4"]
    assert refusal(line) == "--global-batchsize: unknown flag (did you mean --global-batch-size?)"


def test_a_misspelt_required_flag_is_named_and_not_the_one_that_is_missing(words, refusal):
    line = [*words(rollout_batch_size=None), "--rollout-batchsize", "4"]
    assert refusal(line).startswith("--rollout-batchsize: unknown flag")


def test_an_abbreviation_is_an_unknown_flag(words, refusal):
    assert refusal([*words(), "--rollout-temp", "1"]).startswith("--rollout-temp: unknown flag")


def test_a_stray_word_is_named(words, refusal):
    assert refusal(["stray", *words()]) == "'stray': not expected here (wanted: a flag)"


def test_a_missing_required_flag_is_named(words, refusal):
    assert refusal(words(rollout_batch_size=None)) == (
        "--rollout-batch-size: missing (wanted: prompts of one rollout)"
    )


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_such_module.f", "cannot import 'no_such_module'"),
        ("slime.utils.misc.nothing", "module 'slime.utils.misc' has no attribute 'nothing'"),
        ("nodots", "expected package.module.name"),
        ("slime.arguments.groups.rewards.RM_TYPES", "is dict (wanted: something to call)"),
        ("raising_plugin.f", "its import fails: RuntimeError: no key"),
        ("misspelt_plugin.f", "its import fails: SyntaxError"),
    ],
)
def test_a_wrong_dotted_path_is_named(words, refusal, tmp_path, monkeypatch, path, reason):
    (tmp_path / "raising_plugin.py").write_text("raise RuntimeError('no key')\n")
    (tmp_path / "misspelt_plugin.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert refusal(words(custom_rm_path=path)).startswith(f"--custom-rm-path {path}: {reason}")


def test_a_repeatable_dotted_path_is_resolved_each_time(words, refusal):
    line = [
        *words(rollout_sample_hook_path="tests.rollout.plugins.label_rm"),
        "--rollout-sample-hook-path",
        "json.no",
    ]
    assert refusal(line).startswith("--rollout-sample-hook-path json.no:")


@pytest.mark.parametrize(
    "flag",
    ["save", "save_hf", "metrics_file", "dump_details", "save_debug_rollout_data", "save_debug_train_data"],
)
def test_an_output_below_a_file_is_refused(words, refusal, tmp_path, flag):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "below"
    name = "--" + flag.replace("_", "-")
    changes = {"save_interval": 1} if flag in ("save", "save_hf") else {}
    expected = f"{name} {path}: {tmp_path}/file is a file (wanted: a directory)"
    assert refusal(words(**{flag: path}, **changes)) == expected


def test_a_directory_flag_that_names_a_file_is_refused(words, refusal, data):
    assert refusal(words(save=data, save_interval=1)).endswith("is a file (wanted: a directory)")


def test_a_file_flag_that_names_a_directory_is_refused(words, refusal, tmp_path):
    assert refusal(words(metrics_file=tmp_path)).endswith("is a directory (wanted: a file)")


def test_an_unknown_placeholder_in_an_output_is_refused(words, refusal, tmp_path):
    message = refusal(words(save_hf=f"{tmp_path}/{{step}}", save_interval=1))
    assert message.endswith("cannot fill in 'step' (wanted: no braces but {rollout_id})")


def test_a_dump_that_is_not_there_is_refused(words, refusal, tmp_path):
    line = words(load_debug_rollout_data=f"{tmp_path}/{{rollout_id}}.pt")
    assert refusal(line).endswith("no such file for rollout 0")


@pytest.mark.parametrize("content", [b"", b"no dump", b"PK\x03\x04 cut off"])
def test_a_dump_that_is_cut_off_is_refused(words, refusal, tmp_path, content):
    (tmp_path / "0.pt").write_bytes(content)
    line = words(load_debug_rollout_data=f"{tmp_path}/{{rollout_id}}.pt")
    assert refusal(line).endswith("the file for rollout 0 is not a dump, or is cut off")


@pytest.mark.parametrize("flag", ["eval_config", "custom_config_path"])
def test_a_pipe_is_not_waited_for(words, refusal, tmp_path, flag):
    os.mkfifo(tmp_path / "pipe.yaml")
    name = f"--{flag.replace('_', '-')} {tmp_path}"
    assert refusal(words(**{flag: tmp_path / "pipe.yaml"})) == f"{name}/pipe.yaml: is not a file"
    assert refusal(words(**{flag: tmp_path})) == f"{name}: is not a file"
    assert refusal(words(**{flag: tmp_path / "none"})) == f"{name}/none: no such file"


def test_a_pipe_is_no_weights(words, refusal, altered_checkpoint):
    path = altered_checkpoint()
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")
    assert refusal(words(hf_checkpoint=path)).endswith("not a readable safetensors file (is not a file)")


def test_a_file_is_no_directory_to_load(words, refusal, data):
    assert refusal(words(load=data)) == f"--load {data}: is not a directory"


CONTRADICTIONS = [
    (dict(global_batch_size=5), "--global-batch-size 5: does not divide 16 samples of a rollout"),
    (dict(num_steps_per_rollout=3), "--num-steps-per-rollout 3: does not divide 16 samples"),
    (dict(num_steps_per_rollout=2, global_batch_size=4), "--global-batch-size 4: 16 samples of a rollout"),
    (dict(micro_batch_size=3), "--global-batch-size 16: not a multiple of --micro-batch-size 3"),
    (dict(actor_num_gpus_per_node=3), "--global-batch-size 16: not a multiple of the data-parallel size 3"),
    (dict(over_sampling_batch_size=2), "--over-sampling-batch-size 2"),
    (dict(use_dynamic_batch_size=True), "--use-dynamic-batch-size: needs --max-tokens-per-gpu"),
    (
        dict(tensor_model_parallel_size=2),
        "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 1: does not divide 1 trainer GPUs",
    ),
    (
        dict(tensor_model_parallel_size=3, actor_num_gpus_per_node=3, rollout_num_gpus=1, colocate=None),
        "--tensor-model-parallel-size 3 does not divide num_attention_heads 4 (config.json)",
    ),
    (
        dict(pipeline_model_parallel_size=2, actor_num_gpus_per_node=2),
        "--pipeline-model-parallel-size 2 does not divide num_layers 3 (config.json)",
    ),
    (
        dict(context_parallel_size=2),
        "--tensor-model-parallel-size 1 x --pipeline-model-parallel-size 1 x --context-parallel-size 2: "
        "does not divide 1 trainer GPUs",
    ),
    (
        dict(context_parallel_size=2, actor_num_gpus_per_node=6),
        "--global-batch-size 16: not a multiple of the data-parallel size 3",
    ),
    (
        dict(num_virtual_stages_per_pipeline_rank=3),
        "--num-virtual-stages-per-pipeline-rank 3: needs a pipeline",
    ),
    (
        dict(
            num_layers_per_virtual_pipeline_stage=2, pipeline_model_parallel_size=3, actor_num_gpus_per_node=3
        ),
        "--num-layers-per-virtual-pipeline-stage 2 x --pipeline-model-parallel-size 3: does not divide",
    ),
    (
        dict(
            num_layers_per_virtual_pipeline_stage=1,
            num_virtual_stages_per_pipeline_rank=3,
        ),
        "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank: only one",
    ),
    (
        dict(
            **dict(num_virtual_stages_per_pipeline_rank=2, pipeline_model_parallel_size=3),
            actor_num_gpus_per_node=3,
        ),
        "--num-virtual-stages-per-pipeline-rank 2 x --pipeline-model-parallel-size 3: does not divide",
    ),
    (
        dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2),
        "--recompute-num-layers 2: does not divide the 3 layers of a pipeline stage (wanted: a number",
    ),
    (dict(bf16=True, fp16=True), "--bf16 and --fp16: only one precision at a time"),
    (dict(fp16=True, fp32=True), "--fp16 and --fp32: only one precision at a time"),
    (dict(ci_test=True, loss_type="sft_loss"), "--ci-test: --loss-type sft_loss has no log-probs"),
    (dict(num_rollout=None), "--num-rollout: missing"),
    (dict(prompt_data=None), "--prompt-data: missing"),
    (dict(colocate=None), "--rollout-num-gpus: missing"),
    (dict(eval_interval=1), "--eval-interval: needs --eval-prompt-data or --eval-config"),
    (dict(eval_interval=1, eval_prompt_data=["a", "b", "c"]), "--eval-prompt-data a b c: wanted pairs"),
    (dict(save_interval=1), "--save-interval: needs --save or --save-hf"),
    (dict(rollout_max_context_len=10**6), "--rollout-max-context-len 1000000: above max_position_embeddings"),
    (dict(kl_loss_coef=0.1), "--kl-loss-coef 0.1: needs --use-kl-loss"),
    (dict(use_unbiased_kl=True), "--use-unbiased-kl: needs --use-kl-loss"),
    (dict(custom_tis_function_path="os.getcwd"), "--custom-tis-function-path: needs --use-tis"),
    (dict(tis_type="mis"), "--tis-type: needs --use-tis"),
    (
        dict(use_tis=True, tis_type="mis", custom_tis_function_path="os.getcwd"),
        "--custom-tis-function-path and --tis-type mis: only one of them",
    ),
    (dict(use_tis=True, tis_clip_low=3), "--tis-clip-low 3.0: above --tis-clip 2.0"),
    (
        dict(use_tis=True, tis_type="mis", tis_lower_bound=3),
        "--tis-lower-bound 3.0: above --tis-upper-bound 2.0",
    ),
    (
        dict(use_tis=True, tis_type="mis", use_rs=True, rs_upper_bound=0.5, rs_lower_bound=1),
        "--rs-lower-bound 1.0: above --rs-upper-bound 0.5",
    ),
    (dict(use_tis=True, tis_type="mis", rs_veto_threshold=0.1), "--rs-veto-threshold 0.1: needs --use-rs"),
    (
        dict(
            **dict(use_tis=True, tis_type="mis", tis_batch_normalize=True, opsm_delta=0),
            **dict(disable_compute_advantages_and_returns=True, rollout_data_postprocess_path="os.getcwd"),
        ),
        "--tis-batch-normalize: without advantages there is no pass",
    ),
    (
        dict(pg_loss_denominator=9, calculate_per_token_loss=True),
        "--pg-loss-denominator and --calculate-per-token-loss: only one of them",
    ),
    (dict(pg_loss_denominator=0.5), "--pg-loss-denominator 0.5: wanted 1 or more"),
    (
        dict(overlong_buffer_len=10**6),
        "--overlong-buffer-len 1000000: above --rollout-max-response-len",
    ),
    (dict(use_opd=True), "--use-opd: needs --opd-type (sglang or megatron)"),
    (dict(use_opd=True, opd_type="megatron"), "--opd-type megatron: needs --opd-teacher-load"),
    (
        dict(use_opd=True, opd_type="sglang", opd_teacher_load="/x"),
        "--opd-teacher-load: needs --use-opd --opd-type megatron",
    ),
    (dict(opd_teacher_load="/x"), "--opd-teacher-load: needs --use-opd --opd-type megatron"),
    (dict(opd_teacher_ckpt_step=1), "--opd-teacher-ckpt-step: needs --use-opd --opd-type megatron"),
    (
        dict(use_opd=True, opd_type="megatron", opd_teacher_load="/none"),
        "--opd-teacher-load /none: no checkpoint there",
    ),
    (
        dict(use_opd=True, opd_type="sglang", disable_compute_advantages_and_returns=True),
        "--disable-compute-advantages-and-returns: the policy",
    ),
    (
        dict(custom_rm_path="slime.rollout.on_policy_distillation.reward_func"),
        "--custom-rm-path slime.rollout.on_policy_distillation.reward_func: needs --rm-url",
    ),
    (
        dict(disable_compute_advantages_and_returns=True),
        "--disable-compute-advantages-and-returns: the policy",
    ),
    (
        dict(use_rollout_entropy=True, use_rollout_logprobs=True),
        "--use-rollout-entropy: --use-rollout-logprobs",
    ),
    (dict(rm_type=None), "--rm-type: missing"),
    (dict(group_rm=True, eval_interval=1, eval_prompt_data=["a", "{data}"]), "--group-rm: evaluation scores"),
    (
        dict(rollout_function_path="slime.rollout.sft_rollout.generate_rollout"),
        "--n-samples-per-prompt 4: SFT takes each row once",
    ),
    (dict(disable_rollout_global_dataset=True), "--disable-rollout-global-dataset: needs a --rollout"),
    (
        dict(sglang_lora_paths="a"),
        "--sglang-lora-paths: not an option of the embedded engine",
    ),
    (dict(rm_type="maths"), "--rm-type maths: unknown (wanted: math, "),
    (dict(rm_type="remote_rm"), "--rm-type remote_rm: needs --rm-url"),
    (
        dict(rollout_top_k=50, router_policy="round_robin"),
        "--rollout-top-k 50: sglang-router drops return_sampling_mask and custom_params from requests",
    ),
    (dict(rollout_top_p=1.01), "--rollout-top-p 1.01: wanted more than 0, at most 1"),
    (dict(rollout_top_k=0), "--rollout-top-k 0: wanted 1 or more"),
    (
        dict(rollout_top_k=50, sglang_sampling_mask_max_tokens=40),
        "--rollout-top-k 50: above --sglang-sampling-mask-max-tokens 40",
    ),
    (dict(rollout_temperature=0), "--rollout-temperature 0.0: wanted more than 0"),
    (dict(rm_type="remote_rm", rm_url="ftp://x"), "--rm-url ftp://x: wanted an address, http://"),
    (dict(rm_url="localhost:80"), "--rm-url localhost:80: wanted an address, http://"),
    (dict(rm_url="http://"), "--rm-url http://: wanted an address"),
    (dict(rm_url="http://x:port"), "--rm-url http://x:port: wanted an address"),
    (dict(rm_url="http://[::1"), "--rm-url http://[::1: wanted an address"),
    (
        dict(allowed_hosts=["http://judge"]),
        "--allowed-hosts http://judge: wanted HOST, HOST:PORT or *.DOMAIN",
    ),
    (
        dict(rm_url="http://me:K@judge:8000/s", allowed_hosts=["judge:80", "*.x"]),
        "--rm-url: host judge:8000 is not in --allowed-hosts (judge:80, *.x)",
    ),
    (dict(rm_type="dapo"), "--rm-type dapo: gives a mapping of score, acc and pred"),
    (dict(rollout_max_response_len=None), "--rollout-max-response-len: missing"),
    (dict(rollout_max_context_len=16, rollout_max_prompt_len=16), "--rollout-max-prompt-len 16: above"),
    (dict(n_samples_per_prompt=0), "--n-samples-per-prompt 0: wanted more than 0"),
    (dict(num_rollout=-1), "--num-rollout -1: wanted 0 or more"),
    (dict(kl_coef=0.1, kl_loss_coef=0.1), "--kl-coef 0.1 and --kl-loss-coef 0.1: only one"),
    (dict(advantage_estimator="reinforce_plus_plus"), "--advantage-estimator reinforce_plus_plus: needs"),
    (dict(use_rollout_logprobs=True, use_tis=True), "--use-rollout-logprobs and --use-tis"),
    (dict(eps_clip_c=0.5), "--eps-clip-c 0.5: wanted more than 1"),
    (dict(loss_type="custom_loss"), "--loss-type custom_loss and --custom-loss-function-path"),
    (dict(debug_rollout_only=True, debug_train_only=True), "--debug-train-only and --debug-rollout-only"),
    (
        dict(save_debug_log_probs=True),
        "--save-debug-log-probs: needs --save-debug-train-data or --dump-details",
    ),
    (
        dict(otlp_endpoint="collector:4318"),
        "--otlp-endpoint collector:4318: is no web address (wanted: http://",
    ),
    (
        dict(otlp_endpoint="http://u:key@c:4318"),
        "--otlp-endpoint http://c: has more than host, port and path",
    ),
    (dict(otlp_endpoint="http://c/v1/traces?k=ey"), "--otlp-endpoint http://c: has more than host, port"),
    (dict(rollout_batch_size="many"), "--rollout-batch-size: invalid int value: 'many'"),
    (dict(loss_type="value_loss"), "--loss-type: invalid choice: 'value_loss'"),
    (
        dict(apply_chat_template_kwargs="[1]"),
        "--apply-chat-template-kwargs: wanted a JSON object, found '[1]'",
    ),
    (dict(sglang_admin_api_key="k"), "--sglang-admin-api-key: not supported"),
    (dict(lr_warmup_fraction=0.1, lr_warmup_iters=1), "--lr-warmup-fraction and --lr-warmup-iters"),
    (dict(lr_warmup_iters=2), "--lr-warmup-iters 2: wanted less than the 2 steps of the decay"),
    (dict(lr=1e-6, min_lr=1e-5), "--min-lr 1e-05: above --lr 1e-06"),
    (dict(exp_avg_dtype="bf16"), "--exp-avg-dtype bf16: needs --use-precision-aware-optimizer"),
    (dict(optimizer="sgd", use_stateless_adam=True), "--use-stateless-adam: needs --optimizer adam"),
    (
        dict(optimizer="sgd", use_precision_aware_optimizer=True),
        "--use-precision-aware-optimizer: needs --optimizer adam",
    ),
    (
        dict(use_stateless_adam=True, use_precision_aware_optimizer=True),
        "--use-stateless-adam: has no moments",
    ),
    (
        dict(recompute_granularity="full", recompute_num_layers=1),
        "--recompute-granularity full: needs --recompute-method and --recompute-num-layers",
    ),
    (
        dict(recompute_activations=True, recompute_num_layers=1),
        "--recompute-num-layers 1: needs --recompute-granularity full",
    ),
    (
        dict(recompute_granularity="selective", recompute_modules=["mlp", "attention"]),
        "--recompute-modules attention: not supported (wanted: core_attn, layernorm, mlp, moe)",
    ),
    (
        dict(
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
            distribute_saved_activations=True,
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            actor_num_gpus_per_node=2,
        ),
        "--distribute-saved-activations: not together with --sequence-parallel",
    ),
    (
        dict(freeze_params_name_list=["embed", "layers.("]),
        "--freeze-params-name-list layers.(: no regular expression: missing ), unterminated subpattern",
    ),
    (
        dict(keep_old_actor=True, debug_train_only=True, colocate=None),
        "--keep-old-actor: without engines no weights are sent",
    ),
    (
        dict(advantage_estimator="ppo", loss_type="sft_loss"),
        "--advantage-estimator ppo: --loss-type sft_loss has no use for a critic",
    ),
    (
        dict(recompute_activations=True, recompute_granularity="full"),
        "--recompute-activations and --recompute-granularity full: only one of them",
    ),
    (
        dict(load="/none", exit_on_missing_checkpoint=True),
        "--load /none: no checkpoint there (--exit-on-missing-checkpoint)",
    ),
    (dict(lr_decay_style="WSD"), "--lr-decay-style WSD: needs --lr-wsd-decay-iters"),
    (dict(weight_decay_incr_style="linear"), "--weight-decay-incr-style linear: needs"),
    (dict(fp32=True, grad_reduce_in_bf16=True), "--grad-reduce-in-bf16: needs --bf16"),
    (
        dict(accumulate_allreduce_grads_in_fp32=True, grad_reduce_in_bf16=True),
        "--accumulate-allreduce-grads-in-fp32 and --grad-reduce-in-bf16",
    ),
    (dict(no_use_distributed_optimizer=True), "--no-use-distributed-optimizer: not supported"),
    (dict(trainer_standbys=1), "--trainer-standbys 1: a trainer rank that is lost ends the run"),
    (
        dict(trainer_standbys=1, use_fault_tolerance=True, max_trainer_restarts=0, save="saved"),
        "--trainer-standbys 1: a trainer rank that is lost ends the run",
    ),
    (
        dict(trainer_standbys=1, use_fault_tolerance=True),
        "--trainer-standbys 1: ranks start again from a checkpoint of the run, and it writes none",
    ),
    (
        dict(trainer_standbys=1, debug_rollout_only=True),
        "--trainer-standbys 1: --debug-rollout-only has no trainer",
    ),
    (
        dict(trainer_snapshot_interval=2),
        "--trainer-snapshot-interval 2: a trainer rank that is lost ends the run (wanted: --use-fault-tol",
    ),
    (
        dict(trainer_snapshot_interval=2, debug_rollout_only=True),
        "--trainer-snapshot-interval 2: --debug-rollout-only has no trainer",
    ),
    (
        dict(trainer_snapshot_interval=2, use_fault_tolerance=True, trainer_snapshot_copies=1),
        "--trainer-snapshot-copies 1: --actor-num-nodes 1: no other node of the trainer could keep them",
    ),
    (
        dict(trainer_snapshot_copies=1, actor_num_nodes=2),
        "--trainer-snapshot-copies 1: no snapshots are taken (wanted: --trainer-snapshot-interval)",
    ),
    (
        dict(trainer_snapshot_interval=2, use_fault_tolerance=True, trainer_snapshot_dir="/dev/null"),
        "--trainer-snapshot-dir /dev/null: /dev/null is a file (wanted: a directory)",
    ),
    (dict(rollout_engine="vllm"), "--rollout-engine: invalid choice: 'vllm'"),
]


def test_every_contradiction_is_named(words, refusal):
    def check(case):
        changes, start = case
        message = refusal(words(**changes))
        assert message.startswith(start), f"said {message!r}"

    hold_each(CONTRADICTIONS, check, name=lambda case: case[1])


def test_evaluation_may_cut_the_vocabulary(words, data):
    cut = dict(rollout_top_k=-1, eval_top_k=5, eval_top_p=0.9)
    args = validated_args(words(**cut, eval_interval=1, eval_prompt_data=["some", str(data)]))
    (dataset,) = args.eval_datasets
    assert (dataset.top_k, dataset.top_p, args.rollout_top_k, args.rollout_top_p) == (5, 0.9, -1, 1.0)


@pytest.fixture
def forked_train(tmp_path):
    """``forked_train(line)``: as ``run_train`` gives it, from a process that has imported everything."""

    def run(line):
        process = ForkedScript(ROOT / "train.py", line, tmp_path / "output", tmp_path / "errors")
        status = process.wait(600)
        return status, (tmp_path / "errors").read_text().splitlines()[-1]

    return run


def run_train(line):
    """``python train.py`` as a user starts it: (exit status, last line on the screen)."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *line],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    return done.returncode, done.stderr.splitlines()[-1]


def test_train_py_refuses_an_unknown_flag(words):
    assert run_train([*words(), "--bogus"]) == (2, "error: --bogus: unknown flag")


def test_train_py_refuses_a_malformed_line_of_data(forked_train, words, data):
    data.write_text(json.dumps({"input": "1", "label": "1"}) + "\n{\n")
    status, last = forked_train(words())
    assert status == 2
    assert last.startswith(f"error: --prompt-data: {data}:2: not valid JSON")


def test_train_py_refuses_a_tokenizer_that_does_not_fit(forked_train, words, altered_checkpoint):
    status, last = forked_train(words(hf_checkpoint=altered_checkpoint(vocab_size=200)))
    assert status == 2
    assert last.endswith("token id 269, but vocab_size 200 (config.json)")


def test_train_py_refuses_a_wrong_dotted_path(forked_train, words):
    status, last = forked_train(words(custom_generate_function_path="slime.utils.misc.nothing"))
    assert status == 2
    assert last.startswith("error: --custom-generate-function-path slime.utils.misc.nothing: module")
