"""Every option of Megatron-LM is known: honoured, without effect, or refused by its name with the reason."""

import re
from pathlib import Path

import pytest

from slime.arguments import UsageError, validated_args
from slime.arguments.core.foreign import foreign_flags
from slime.arguments.core.parser import build_parser, parse

REQUIRED = ["--hf-checkpoint", "model", "--rollout-batch-size", "4", "--rollout-engine", "embedded"]
# Each with a value that is not its default.
OPTIONS = Path(__file__).with_name("megatron_lm_options.txt").read_text().splitlines()


def outcome(*words):
    """The notes of a command line, or the one line that refuses it."""
    notes: list[str] = []
    try:
        parse([*REQUIRED, *words], None, notes)
    except UsageError as error:
        return str(error)
    return notes


def test_there_are_all_of_them():
    assert len(OPTIONS) == len({line.split()[0] for line in OPTIONS}) == 667


@pytest.fixture(scope="module")
def told():
    """What each option gets."""
    return {line: outcome(*line.split()) for line in OPTIONS}


def test_every_option_of_megatron_lm_parses_or_is_named(told):
    for line, found in told.items():
        text = found if isinstance(found, str) else " ".join(found)
        name = re.sub(r"^--(no-|disable-)?", "", line.split()[0])
        assert "unknown flag" not in text, line
        assert "did you mean" not in text, line
        assert not text or name in text, (line, text)
        assert "\n" not in text


def test_every_refusal_of_an_option_of_megatron_lm_has_a_reason(told):
    refused = [found for found in told.values() if isinstance(found, str)]
    assert len(refused) > 300
    assert [found for found in refused if "(wanted: leave it out)" in found] == []


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["--use-mcore-models"], "--use-mcore-models: has no effect, that is how it is done anyway"),
        (["--num-workers", "8"], "--num-workers 8: has no effect, Megatron-LM's data loader is not used"),
        (["--log-interval=1"], "--log-interval 1: has no effect, every step is logged"),
        (["--qkv-format", "thd"], "--qkv-format thd: has no effect, samples are packed"),
    ],
)
def test_what_has_no_effect_gets_a_note(words, note):
    (line,) = outcome(*words)
    assert line.startswith(note)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data-path", "a", "b"], "--data-path a b: not supported (wanted: leave it out: --prompt-data"),
        (["--train-iters", "3"], "--train-iters 3: not supported (wanted: --num-rollout"),
        (["--hybrid-mlp-ratio", "1"], "--hybrid-mlp-ratio 1: not supported (wanted: leave it out: the model"),
        (["--rl-partial-rollouts"], "--rl-partial-rollouts: not supported (wanted: leave it out"),
        (["--fp8-margin", "1"], "--fp8-margin 1: not supported (wanted: leave it out: TransformerEngine"),
    ],
)
def test_what_is_not_done_is_refused_with_the_reason(words, message):
    told = outcome(*words)
    assert isinstance(told, str)
    assert told.startswith(message)


@pytest.mark.parametrize(
    "words",
    [
        ["--timing-log-level", "0"],
        ["--mid-level-dataset-surplus", "5e-3"],
        ["--hybrid-mlp-ratio", "0"],
        ["--exit-signal", "SIGTERM"],
        ["--no-rl-partial-rollouts"],
        ["--dist-ckpt-format", "torch_dist"],
    ],
)
def test_a_default_that_is_spelt_out_changes_nothing(words):
    assert outcome(*words) == []
    assert vars(parse([*REQUIRED, *words], None)) == vars(parse(REQUIRED, None))


def test_the_three_optimizer_flags_of_the_originals_scripts_start(words, notes):
    three = dict(optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=True)
    (line,) = notes(words(**three, use_precision_aware_optimizer=True))
    assert line.startswith("--use-precision-aware-optimizer: has no effect, the formats")


def test_recompute_activations_is_another_name(words):
    assert validated_args(words(recompute_activations=True)).recompute_granularity == "selective"


def test_a_flag_of_ours_comes_before_a_table(monkeypatch):
    """A row may stay when the option becomes a flag, or a user declares one of that name."""

    def declare(parser):
        parser.add_argument("--profile", action="store_true")

    assert parse([*REQUIRED, "--profile"], declare).profile is True


def test_no_row_is_there_twice():
    names = [name for entry in foreign_flags() for name in entry.names]
    assert len(names) == len(set(names))
    assert all(entry.reason for entry in foreign_flags())


def test_a_foreign_option_is_never_what_was_meant():
    assert outcome("--profiles") == "--profiles: unknown flag"


def test_build_parser_keeps_them_out_of_the_help():
    parser, _ = build_parser("embedded")
    assert "--hybrid-mlp-ratio" not in parser.format_help()
