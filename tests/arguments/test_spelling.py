"""A guess is made only where it is near."""

import pytest

from slime.arguments import UsageError
from slime.arguments.parser import _unknown, build_parser, megatron_lm_flags, parse
from slime.arguments.spelling import nearest

REQUIRED = ["--hf-checkpoint", "model", "--rollout-batch-size", "4"]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--global-batchsize", "--global-batch-size"),
        ("--global_batch_size", "--global-batch-size"),
        ("--rolout-batch-size", "--rollout-batch-size"),
        ("--rollout-bathc-size", "--rollout-batch-size"),
        ("--n-sample-per-prompt", "--n-samples-per-prompt"),
        ("--num-rollouts", "--num-rollout"),
        ("--colocated", "--colocate"),
        ("--rollout-temp", "--rollout-temperature"),
        ("--Seed", "--seed"),
    ],
)
def test_a_slip_is_guessed(word, meant):
    with pytest.raises(UsageError, match=rf"^{word}: unknown flag \(did you mean {meant}\?\)$"):
        parse([*REQUIRED, word, "1"], None)


# Flags that other versions and projects know; the nearest of ours means something else.
FOREIGN = [
    "--post-self-attn-layernorm",
    "--disable-rollout-trim-samples",
    "--disable-weights-backuper",
    "--megatron-to-hf-mode",
    "--qkv-format",
    "--rollout-external",
    "--slime-router-health-check-failure-threshold",
    "--slime-router-max-connections",
    "--slime-router-middleware-paths",
    "--slime-router-timeout",
    "--train-memory-margin-bytes",
    "--use-dynamic-global-batch-size",
    "--use-slime-router",
    "--worker-urls",
    "--ci-metric-checker-key",
    "--ci-metric-checker-threshold",
    "--true-on-policy-mode",
    "--learning-rate",
    "--eval-max-new-tokens",
]


@pytest.mark.parametrize("word", FOREIGN)
def test_a_foreign_flag_is_not_taken_for_one_of_ours(word):
    with pytest.raises(UsageError, match=rf"^{word}: unknown flag$"):
        parse([*REQUIRED, word, "1"], None)


@pytest.mark.parametrize("word", ["--kv-lora-rank", "--mscale", "--v-head-dim", "--use-gated-attention"])
def test_a_flag_of_megatron_lm_is_named_as_such(word):
    with pytest.raises(UsageError, match=rf"^{word}: a flag of Megatron-LM that is not supported"):
        parse([*REQUIRED, word], None)


def test_every_flag_of_megatron_lm_is_known_or_named():
    parser, specs = build_parser("embedded")
    options = {option for action in parser._actions for option in action.option_strings}
    names = megatron_lm_flags()
    assert len(names) > 600
    wrong = [
        n for n in names - options if "a flag of Megatron-LM" not in _unknown(n, parser, specs, "sglang")
    ]
    assert wrong == []


def test_short_names_and_long_detours_are_no_slips():
    assert nearest("--lb", ["--lr"]) is None
    assert nearest("--save-interval", ["--eval-interval"]) is None
    assert nearest("", ["--lr"]) is None
