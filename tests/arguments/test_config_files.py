"""``--config``: flags from files are flags, and all that is wrong with them is told with file and line."""

from pathlib import Path

import pytest

from slime.arguments import UsageError, validated_args
from slime.arguments.config_record import record
from slime.arguments.core.config_files import expand

MISTAKEN = """\
optimizer:
  lr: 4e-4
  lr: 3
  weight_decay: fast
optimiser:
  adam_beta1: 0.9
rollout:
  num_rollout: 1_000
  rollout_batch_sise: 4
  global_batch_size: ${env:NOT_THERE}
precision:
  fp32: 3
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def write_file(text: str, name: str = "run.yaml") -> str:
        (tmp_path / name).write_text(text)
        return name

    return write_file


def words_of(*argv: str) -> list[str]:
    expanded = expand(argv)
    assert expanded.mistakes == []
    return expanded.words[: len(expanded.words) - len(argv)]


def test_values_become_the_words_that_set_them(write, monkeypatch) -> None:
    monkeypatch.setenv("SETS", "/data")
    path = write(
        "optimizer: {lr: 4e-4, adam-beta2: 0.98}\n"
        "run_dir: outputs/mine\n"
        "num_rollout: 1_000\n"
        "fp32: true\ncolocate: false\n"
        "prompt_data: ${env:SETS}/rl.jsonl\ntrace: ${run_dir}/trace.json\n"
        "eval_prompt_data: [held_out, data/eval.jsonl]\n"
        "train_env_vars: {A: b}\n"
        "async: true\n"
        "sglang: {sglang_log_level: info}\n"
    )
    assert words_of("--config", path) == [
        *("--lr=0.0004", "--adam-beta2=0.98", "--run-dir=outputs/mine", "--num-rollout=1000", "--fp32"),
        *("--prompt-data=/data/rl.jsonl", "--trace=outputs/mine/trace.json"),
        *("--eval-prompt-data", "held_out", "data/eval.jsonl"),
        '--train-env-vars={"A": "b"}',
        *("--async", "--sglang-log-level=info", "--save=outputs/mine", "--load=outputs/mine"),
    ]


def test_later_files_win_and_the_command_line_over_all(write) -> None:
    first = write("lr: 1e-4\nseed: 1\nfp32: true\nadam_beta1: 0.8\n")
    second = write("seed = 2\n[precision]\nfp32 = false\n[optimizer]\nlr = 2e-4\n", "more.toml")
    argv = ["--config", first, f"--config={second}", "--lr", "3e-4"]
    assert words_of(*argv) == ["--seed=2", "--adam-beta1=0.8"]
    assert words_of("--config", second, "--config", first)[:2] == ["--seed=1", "--fp32"]


def test_all_mistakes_are_told_with_their_lines(write) -> None:
    with pytest.raises(UsageError) as raised:
        validated_args(["--config", write(MISTAKEN)])
    messages = [message for message in raised.value.messages if message.startswith("run.yaml:")]
    assert messages == [
        "run.yaml:3: lr stands in line 2 already (wanted: once)",
        "run.yaml:5: optimiser is not a heading (did you mean optimizer?)",
        "run.yaml:10: --global-batch-size: ${env:NOT_THERE}: the environment has no NOT_THERE",
        "run.yaml:12: --fp32: is 3 (wanted: true or false)",
        "run.yaml:4: --weight-decay: invalid float value: 'fast'",
        "run.yaml:9: --rollout-batch-sise: unknown flag (did you mean --rollout-batch-size?)",
    ]
    # What stands in the file wrongly is not called missing as well.
    assert not any("--rollout-batch-size: missing" in message for message in raised.value.messages)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "lr: [1\nseed: 2\n", "a.yaml:2: not valid YAML"),
        ("a.yaml", "- lr\n", "a.yaml:1: no mapping (wanted: flag: value)"),
        ("a.toml", "lr = 1\nseed == 2\n", "a.toml:2: not valid TOML"),
        ("a.toml", "[loss]\neps_clip = -3.0\n", "a.toml:2: --eps-clip -3.0: wanted"),
        ("a.yaml", "trace: ${run_dir}/x\n", "a.yaml:1: --trace: ${run_dir}: not known"),
        ("a.yaml", "trace: ${home}\n", "a.yaml:1: --trace: ${home}: unknown (wanted: ${env:NAME} or ${run_"),
        ("a.yaml", "lr:\n", "a.yaml:1: --lr: without a value"),
    ],
)
def test_files_that_cannot_be_used(write, name, text, message) -> None:
    with pytest.raises(UsageError) as raised:
        validated_args(["--config", write(text, name)])
    assert any(found.startswith(message) for found in raised.value.messages), raised.value.messages


def test_of_a_file_that_is_not_there_no_flag_is_missing() -> None:
    with pytest.raises(UsageError) as raised:
        validated_args(["--config", "/nowhere.yaml", "--lrr", "3"])
    assert list(raised.value.messages) == ["--config /nowhere.yaml: no such file", "--lrr: unknown flag"]


REQUIRED = ["--hf-checkpoint", "m", "--rollout-batch-size", "4"]


def test_the_record_reads_back_and_holds_no_secret(write) -> None:
    argv = [
        *(*REQUIRED, "--lr", "4e-4", "--fp32", "--eval-prompt-data", "a", "b.jsonl", "--run-dir", "out"),
        *("--wandb-key", "s3cr3t", "--rm-url", "http://me:pw@host/", "--run-name", "no"),
        *("--train-env-vars", '{"HF_TOKEN": "hf_x"}', "--router-policy", "round_robin"),
    ]
    text = record(argv)
    for secret in ("s3cr3t", "me:pw", "hf_x"):
        assert secret not in text
    assert "  lr: 0.0004\n" in text and "  # eps_clip: 0.2\n" in text
    assert "  # wandb_key: not written, it may be a secret\n" in text
    again = record(["--config", write(text)])
    assert live_lines(again) == live_lines(text) and "  save: out" in live_lines(text)


def live_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
