"""What users get wrong most: each is one line, before anything starts."""

import json
import socket

import pytest

from slime.arguments.validate.user_code import HOOK_CALLS
from slime.rollout.base_types import accepted
from tests.plugin_contracts.contracts import CONTRACTS


@pytest.mark.parametrize(
    ("words_after", "said"),
    [
        (["--num_rollout", "3"], "--num_rollout: unknown flag (did you mean --num-rollout?)"),
        (["--use-kl-loss=True"], "--use-kl-loss=True: takes no value (wanted: --use-kl-loss, or without)"),
        (["--colocate", "true"], "'true': not expected here (wanted: a flag)"),
        (["–save", "x"], "'–save': begins with another sign than - (wanted: --save)"),
        (["—lr", "1"], "'—lr': begins with another sign than - (wanted: --lr)"),
        ([" "], "' ': not expected here (wanted: a flag)"),
        (["trainer.n_gpus_per_node=8"], "'trainer.n_gpus_per_node=8': not expected here (wanted: a flag)"),
        (
            ["--advantage-estimator", "GRPO"],
            "--advantage-estimator: invalid choice: 'GRPO' (choose from 'grpo'",
        ),
        (["--lr", "1e-6x"], "--lr: invalid float value: '1e-6x'"),
        (["--lr", "-1e-6"], "--lr: expected one argument"),
        (["--optimizer", "adamw"], "--optimizer: invalid choice: 'adamw'"),
        (["--eval-interval", "0"], "--eval-interval 0: wanted more than 0"),
        (["--num-rollout", "-1"], "--num-rollout -1: wanted 0 or more"),
        (["--rollout-temperature", "0"], "--rollout-temperature 0.0: wanted more than 0"),
        (["--apply-chat-template-kwargs", "{a: 1}"], "--apply-chat-template-kwargs: wanted a JSON object"),
        (["--sglang-router-port", "70000"], "--sglang-router-port 70000: wanted 1 to 65535"),
        (["--rollout-stop", "</a>", ""], "--rollout-stop '': ends every answer at its first token"),
        (["--global-batch-size", "6"], "--global-batch-size 6: 16 samples of a rollout"),
    ],
)
def test_words_of_the_command_line(words, refusal, words_after, said):
    assert refusal([*words(), *words_after]).startswith(said)


@pytest.mark.parametrize(
    ("flag", "path"),
    [
        *(("save", "~/ckpt"), ("save_hf", "~/hf"), ("metrics_file", "~/m.jsonl"), ("load", "~/ckpt")),
        *(("hf_checkpoint", "~/models/Qwen3-4B"), ("prompt_data", "~/d.jsonl"), ("eval_config", "~")),
    ],
)
def test_a_tilde_that_no_shell_has_replaced(words, refusal, flag, path):
    """As in ``--save=~/ckpt``: a run would write below a directory of that name."""
    name = f"--{flag.replace('_', '-')}"
    assert refusal(words(**{flag: path})).startswith(f"{name} {path}: begins with ~")


def test_a_path_with_spaces_is_a_path(words, notes, data):
    spaced = data.rename(data.with_name("my prompts.jsonl"))
    assert notes(words(prompt_data=spaced)) == notes(words(prompt_data=f"{spaced}@[0:4]")) == []


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ('{"input": "1", ', "900: not valid JSON"),
        ({"prompt": "1", "label": "1"}, "900 has no field 'input' (found: label, prompt)"),
        ({"input": "1"}, "900 has no field 'label' (found: input)"),
        ({"input": None, "label": "1"}, "900: field 'input' is null"),
        ({"input": "", "label": "1"}, "900: field 'input' is blank"),
        ({"input": 5.5, "label": "1"}, "900: field 'input' is 5.5, expected text or a list of messages"),
        ({"input": "1", "label": None}, "900: field 'label' is null"),
        (
            {"input": [{"role": "user", "content": "1"}], "label": "1"},
            "900: field 'input' is a list of messages",
        ),
    ],
)
def test_one_bad_record_among_many(words, refusal, data, record, said):
    lines = [json.dumps({"input": f"{i}+1", "label": str(i + 1)}) for i in range(1000)]
    lines[899] = record if isinstance(record, str) else json.dumps(record)
    data.write_text("\n".join(lines))
    assert refusal(words()).startswith(f"--prompt-data: {data}:{said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("evaluation: {datasets: []}", "has no datasets (found: evaluation; wanted: datasets, a list)"),
        ("eval: {dataset: []}", "unknown key 'dataset' (did you mean datasets?)"),
        ("eval:\n\tdatasets: 1", "line 2: found character that cannot start any token"),
        ("datasets: {name: a, path: x.jsonl}", "datasets is one dataset (wanted: a list of them"),
        ("datasets: [{name: a, path: x.jsonl, max_tokens: 5}]", "dataset a: unknown key 'max_tokens'"),
        ("datasets: [{name: a}]", "dataset a: path is missing"),
        ("datasets: [{name: a, path: '${oc.env:NO_SUCH_VARIABLE}'}]", "'NO_SUCH_VARIABLE' not found"),
    ],
)
def test_an_eval_config(words, refusal, tmp_path, text, said):
    path = tmp_path / "eval.yaml"
    path.write_text(text)
    message = refusal(words(eval_config=path, eval_interval=1))
    assert message.startswith("--eval-config") and said in message


def test_an_eval_dataset_whose_answers_end_at_once(words, refusal, tmp_path, data):
    path = tmp_path / "eval.yaml"
    path.write_text(f"datasets: [{{name: a, path: {data}, stop: ['']}}]")
    said = "eval dataset a: stop '': ends every answer at its first token"
    assert refusal(words(eval_config=path, eval_interval=1)).startswith(said)


def test_two_lists_of_eval_datasets(words, notes, tmp_path, data):
    path = tmp_path / "eval.yaml"
    path.write_text(f"datasets: [{{name: a, path: {data}}}]")
    told = notes(words(eval_config=path, eval_interval=1, eval_prompt_data=["b", data]))
    assert told == [f"--eval-prompt-data b {data}: has no effect with --eval-config"]


def test_eval_datasets_that_nobody_asks_about(words, notes, tmp_path, data):
    told = notes(words(eval_prompt_data=["b", data]))
    assert told == [f"--eval-prompt-data b {data}: has no effect without --eval-interval"]
    path = tmp_path / "eval.yaml"
    path.write_text(f"datasets: [{{name: a, path: {data}}}]")
    assert notes(words(eval_config=path)) == [f"--eval-config {path}: has no effect without --eval-interval"]
    assert notes(words(eval_config=path, eval_interval=1)) == []


SIGNATURES = [
    ("custom_rm_path", "def f(sample): ...", "(sample) (wanted: (args, sample); too many"),
    ("custom_rm_path", "async def f(args, sample, tokenizer): ...", "'tokenizer'"),
    ("custom_rm_path", "async def f(*, args, sample): ...", "too many positional"),
    ("custom_rm_path", "def f(completions, **kwargs): ...", "too many positional"),
    ("custom_generate_function_path", "async def f(args, sample): ...", "(args, sample, sampling_params)"),
    ("rollout_function_path", "def f(args): ...", "(args, rollout_id, data_source, evaluation=...)"),
    ("rollout_function_path", "def f(args, rollout_id, data_source): ...", "'evaluation'"),
    ("dynamic_sampling_filter_path", "def f(group): ...", "(args, group)"),
    ("rollout_sample_hook_path", "def f(sample): ...", "(args, sample)"),
    ("custom_reward_post_process_path", "def f(args): ...", "(args, samples)"),
    ("data_source_path", "class f: ...", "(args)"),
]


@pytest.mark.parametrize(("flag", "code", "said"), SIGNATURES)
def test_a_function_that_cannot_take_the_call(words, refusal, tmp_path, monkeypatch, flag, code, said):
    module = f"plug_in_{SIGNATURES.index((flag, code, said))}"
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    message = refusal(words(**{flag: f"{module}.f"}))
    assert (
        message.startswith(f"--{flag.replace('_', '-')} {module}.f: its parameters are ") and said in message
    )


async def by_position(args, sample, params, evaluation=False, /):
    """Never told by name."""


async def any_more(args, sample, params, *evaluation):
    """A generate function that takes any number of further arguments."""


@pytest.mark.parametrize("function", [by_position, any_more])
def test_what_is_given_by_name_only_to_who_can_take_it_refuses_nobody(function):
    assert HOOK_CALLS["custom_generate_function_path"].why_refused(function) is None
    function(1, 2, 3, **accepted(function, {"evaluation": True})).close()


def test_a_reward_of_an_eval_dataset_that_cannot_take_the_call(words, refusal, tmp_path, data):
    path = tmp_path / "eval.yaml"
    path.write_text(f"datasets: [{{name: a, path: {data}, custom_rm_path: json.loads}}]")
    message = refusal(words(eval_config=path, eval_interval=1))
    assert message.startswith("eval dataset a: custom_rm_path json.loads: its parameters are (s, *,")


def test_functions_are_held_against_the_calls_that_are_made():
    """What tests/plugin_contracts/test_call_sites.py sees at the places of the calls."""
    calls = {
        contract.option.replace("-", "_"): (contract.positional, contract.keywords, contract.optional)
        for contract in CONTRACTS
    }
    assert {
        name: (call.positional, call.keywords, call.optional) for name, call in HOOK_CALLS.items()
    } == calls


@pytest.mark.parametrize("path", ["my_reward.py", "rewards/my_reward.score", "my_reward:score"])
def test_a_file_is_no_dotted_path(words, refusal, path):
    said = f"--custom-rm-path {path}: is not a dotted path (wanted: package.module.name"
    assert refusal(words(custom_rm_path=path)).startswith(said)


def test_one_sample_per_prompt_where_samples_are_compared(words, notes):
    for estimator in ("grpo", "gspo", "cispo", "rloo"):
        (line,) = notes(words(n_samples_per_prompt=1, advantage_estimator=estimator))
        assert line.startswith(f"--n-samples-per-prompt 1: {estimator} compares the samples of a prompt")
    whitened = dict(advantage_estimator="reinforce_plus_plus", normalize_advantages=True)
    for changes in (whitened, dict(entropy_coef=0.1), dict(num_rollout=0), dict(debug_rollout_only=True)):
        alone = dict(n_samples_per_prompt=1, rollout_num_gpus=1 if "debug_rollout_only" in changes else None)
        notes(words(**alone, **changes))


def test_a_pointer_of_git_lfs_is_no_weights(words, refusal, altered_checkpoint):
    path = altered_checkpoint()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 3957900840\n"
    (path / "model.safetensors").write_text(pointer)
    assert refusal(words(hf_checkpoint=path)).endswith("(a pointer of git-lfs; wanted: git lfs pull)")


@pytest.mark.parametrize("gone", [["tokenizer.json"], ["tokenizer.json", "tokenizer_config.json"]])
def test_a_checkpoint_that_was_copied_without_its_tokenizer(words, refusal, altered_checkpoint, gone):
    path = altered_checkpoint()
    for name in gone:
        (path / name).unlink()
    message = refusal(words(hf_checkpoint=path))
    assert message.startswith(f"--hf-checkpoint {path}: ") and "tokenizer" in message


def test_a_shard_that_was_not_copied(words, refusal, altered_checkpoint):
    path = altered_checkpoint()
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"model.embed_tokens.weight": "model-00002-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    said = "names files that do not exist: model-00002-of-00002.safetensors"
    assert refusal(words(hf_checkpoint=path)).endswith(said)


def test_a_training_checkpoint_that_was_half_copied(words, refusal, own_checkpoint, notes):
    iteration = own_checkpoint / "iter_0000003"
    (iteration / "common.pt").touch()
    said = f"--load {own_checkpoint}: iter_0000003"
    line = words(load=own_checkpoint)
    assert refusal(line) == f"{said} holds no .distcp file (wanted: a complete copy)"
    (iteration / "__0_0.distcp").touch()
    assert refusal(line) == f"{said}/.metadata is missing (wanted: a complete copy)"
    (iteration / ".metadata").touch()
    notes(line)
    (iteration / "metadata.json").unlink()
    assert refusal(line).startswith(f"{said} is missing or incomplete")


def test_a_name_of_the_hub_is_no_directory(words, refusal):
    assert refusal(words(hf_checkpoint="Qwen/Qwen3-4B")).endswith(
        "config.json: not found (wanted: a local Hugging Face checkpoint directory)"
    )


def test_a_port_in_use(words, refusal):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert refusal(words(sglang_router_port=port)).startswith(f"--sglang-router-port {port}: ")
