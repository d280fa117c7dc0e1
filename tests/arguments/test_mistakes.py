"""A command line is told all its mistakes at once, and none that only follow from another one."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.arguments.core.errors import NotKnownError, UsageError
from slime.arguments.core.group import ConfigGroup
from slime.arguments.core.mistakes import Mistakes
from slime.arguments.core.run_args import RunArgs, forget
from tests.each import hold_each

ROOT = Path(__file__).parents[2]

FIVE = (
    ("--lrr 1e-6", "--lrr: unknown flag"),
    ("--eps-clip wide", "--eps-clip: invalid float value: 'wide'"),
    ("--use-kl-loss=True", "--use-kl-loss=True: takes no value (wanted: --use-kl-loss, or without)"),
    ("--rollout-temperature 0", "--rollout-temperature 0.0: wanted more than 0"),
    ("--kl-loss-coef 0.1", "--kl-loss-coef 0.1: needs --use-kl-loss"),
    ("--num-layers 7", "--num-layers 7: config.json of --hf-checkpoint says 3"),
    ("--ref-load /none", "--ref-load /none: no checkpoint there"),
    ("--prompt-data /none.jsonl", None),  # what takes long is looked at when all else is right
    (
        "--num_steps_per_rollout 3",
        "--num_steps_per_rollout: unknown flag (did you mean --num-steps-per-rollout?)",
    ),
    ("--micro-batch-size", "--micro-batch-size: expected one argument"),
)
"""Words, and what is said of them."""


def said_of(lines: list[str], starts: list[str]) -> None:
    assert len(lines) == len(starts), lines
    assert all(any(line.startswith(start) for line in lines) for start in starts), lines


def test_ten_mistakes_of_all_kinds_are_named_at_once(words, refusals):
    line = words(num_steps_per_rollout=None, global_batch_size=16)
    for text, _ in FIVE:
        line += text.split()
    said_of(refusals(line), [said for _, said in FIVE if said and "kl-loss-coef" not in said])


def test_train_py_names_five_mistakes(words):
    line = words(
        rollout_batch_size=None, actor_num_gpus_per_node=0, save_interval=2, n_samples_per_prompt="x"
    )
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *line, "--keep-old-actor", "--bogus"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    said_of(
        [line.removeprefix("error: ") for line in lines],
        [
            "--n-samples-per-prompt: invalid int value: 'x'",
            "--bogus: unknown flag",
            "--rollout-batch-size: missing (wanted: ",
            "--actor-num-gpus-per-node 0: wanted more than 0",
            "--save-interval: needs --save or --save-hf",
            "--keep-old-actor: train.py makes each rollout",
        ],
    )


def test_no_mistake_follows_from_another(words, refusals):
    """Each is what one wrong word would lead to if its value were taken for something else."""

    def check(case):
        changes, more, starts = case
        said_of(refusals([*words(**changes), *more]), starts)

    hold_each(
        [
            # A misspelt flag is not missing; what is worked out from it is not wrong.
            (
                dict(hf_checkpoint=None),
                ["--hf-chekpoint", "x"],
                ["--hf-chekpoint: unknown flag (did you mean"],
            ),
            (dict(rollout_batch_size=None), ["--rollout-batchsize", "4"], ["--rollout-batchsize: unknown"]),
            (dict(rollout_batch_size="four"), [], ["--rollout-batch-size: invalid int value"]),
            # No model, no shape that others disagree with.
            (dict(hf_checkpoint="/none", num_attention_heads=3, num_layers=7), [], ["--hf-checkpoint /none"]),
            (dict(hf_checkpoint="/none", moe_layer_freq="1"), [], ["--hf-checkpoint /none"]),
            # Its directories are below another one.
            (dict(dump_details="/dev/null/x"), [], ["--dump-details /dev/null/x: "]),
            (
                dict(colocate=None),
                ["--save-interval", "2"],
                ["--rollout-num-gpus: missing", "--save-interval: needs"],
            ),
        ],
        check,
        name=lambda case: str(case[2]),
    )


def test_several_faults_of_files_are_named(words, refusals, tmp_path, altered_checkpoint):
    config = tmp_path / "config.yaml"
    config.write_text("lr: high\nglobal_batch_size: 3.5\nnum_rolout: 2\nmine: 1\n")
    lines = refusals(words(custom_config_path=config, seed="x"))
    said_of(
        lines,
        [
            "--seed: invalid int value",
            f"--custom-config-path {config}:1: lr is 'high'",
            f"--custom-config-path {config}:2: global_batch_size is 3.5",
            f"--custom-config-path {config}:3: num_rolout is not a flag",
        ],
    )
    lines = refusals(words(hf_checkpoint=altered_checkpoint(vocab_size=200), custom_rm_path="json.no"))
    said_of(lines, ["--custom-rm-path json.no: module", "--hf-checkpoint "])


def test_options_of_megatron_lm_that_are_refused_are_all_named(words, refusals):
    lines = refusals([*words(), "--use-mup", "--fp8-format", "e4m3"])
    said_of(lines, ["--use-mup", "--fp8-format e4m3"])


def test_a_rule_ends_where_it_reads_a_value_that_is_not_known():
    args = RunArgs(a=1, b=2)
    forget(args, ["a"])

    def rule(args):
        yield f"--b {args.b}: wrong"
        yield f"--a {args.a}: never"

    mistakes = Mistakes()
    mistakes.of_rule(rule, args)
    assert mistakes.messages == ["--b 2: wrong"]
    with pytest.raises(NotKnownError):
        getattr(args, "a", None)


def test_what_an_earlier_message_is_about_is_not_judged_again():
    mistakes = Mistakes()
    mistakes.add("--a 1: wanted 2", "--b 1: wanted 2")
    mistakes.add("--c 3: above --a 1", "--d: missing", "--a-b: missing")
    assert mistakes.messages == ["--a 1: wanted 2", "--b 1: wanted 2", "--d: missing", "--a-b: missing"]


def test_a_rule_that_breaks_down_is_a_fault_of_ours_unless_something_was_refused_before():
    def rule(args):
        return iter([str(1 // args.size)])

    mistakes = Mistakes()
    with pytest.raises(ZeroDivisionError):
        mistakes.of_rule(rule, SimpleNamespace(size=0))
    mistakes.add("--size 0: wanted more than 0")
    mistakes.of_rule(rule, SimpleNamespace(size=0))
    assert mistakes.messages == ["--size 0: wanted more than 0"]


def test_what_a_config_group_could_not_derive_is_not_known():
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Derived:
        c: int
        d: int

    def derive(args):
        args.c = args.d = 1
        raise UsageError("--b: wrong")

    args = RunArgs(b=1)
    Mistakes().of_derivation(ConfigGroup({}, derived=Derived, derive=derive), args)
    assert vars(args).keys() >= {"b"} and not {"c", "d"} & vars(args).keys()
    with pytest.raises(NotKnownError):
        _ = args.c


def test_a_data_source_whose_name_needs_a_look_is_checked_last(words, refusal, data):
    """The cheaper looks come first: no file is read where a flag is wrong."""
    data.write_text(json.dumps({"input": "1"}) + "\n")
    assert refusal(words(num_layers=7)).startswith("--num-layers 7")
    assert "has no field 'label'" in refusal(words())
