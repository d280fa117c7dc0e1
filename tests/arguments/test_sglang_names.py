"""Options of earlier SGLang versions are taken under those of today, or refused with what to write."""

import pytest

from slime.arguments.core.errors import UsageError
from slime.arguments.core.parser import parse
from slime.arguments.core.sglang_names import GONE, RENAMED, refuse_gone, with_current_names
from tests.arguments.sglang_options import as_installed, server_options

OPTIONS = {f"--sglang-{name.removeprefix('--')}" for names in server_options() for name in names.split(",")}


def test_an_earlier_name_is_taken_for_todays():
    options = {"--sglang-cuda-graph-bs-decode", "--sglang-mamba-scheduler-strategy"}
    words = ["--sglang-cuda-graph-bs", "1", "2", "--sglang-mamba-scheduler-strategy=auto", "--lr", "1"]
    current, notes = with_current_names(words, options)
    assert current == ["--sglang-cuda-graph-bs-decode", *words[1:]]
    assert notes == [
        "--sglang-cuda-graph-bs: is called --sglang-cuda-graph-bs-decode since SGLang 0.5.20, "
        "and taken as that"
    ]


def test_a_switch_that_has_become_a_value_brings_it():
    words = ["--sglang-disable-piecewise-cuda-graph", "--lr", "1"]
    current, (note,) = with_current_names(words, OPTIONS)
    assert current == ["--sglang-cuda-graph-backend-prefill", "disabled", "--lr", "1"]
    assert "is called --sglang-cuda-graph-backend-prefill disabled since SGLang 0.5.20" in note


def test_only_sglangs_own_options_are_renamed():
    words = ["--cuda-graph-bs", "1", "cuda-graph-bs"]
    assert with_current_names(words, OPTIONS) == (words, [])


@pytest.mark.parametrize("name", [*RENAMED, *GONE])
def test_what_the_table_calls_gone_is_gone(name):
    assert f"--sglang-{name}" not in OPTIONS


@pytest.mark.parametrize("since_and_now", RENAMED.values())
def test_the_new_name_is_there_and_takes_the_value(since_and_now, monkeypatch):
    as_installed(monkeypatch)
    name, *value = since_and_now[1].split()
    assert f"--sglang-{name}" in OPTIONS
    line = ["--hf-checkpoint", "x", "--rollout-batch-size", "1", "--rollout-engine", "sglang"]
    if value:
        parse([*line, f"--sglang-{name}", *value], None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "--sglang-torchao-config",
            "--sglang-torchao-config: SGLang has no such option since 0.5.18 (wanted: --sglang-quantization)",
        ),
        (
            "--sglang-cuda-graph-bs",
            "--sglang-cuda-graph-bs: SGLang has no such option since 0.5.20 "
            "(wanted: --sglang-cuda-graph-bs-decode)",
        ),
    ],
)
def test_one_without_a_successor_says_since_when(name, message):
    with pytest.raises(UsageError) as error:
        refuse_gone(name)
    assert str(error.value) == message


def test_a_name_that_sglang_never_had_is_left_to_the_parser():
    refuse_gone("--sglang-no-such-option")
    refuse_gone("--torchao-config")


def test_a_command_line_has_them(monkeypatch):
    as_installed(monkeypatch)
    line = ["--hf-checkpoint", "x", "--rollout-batch-size", "1", "--rollout-engine", "sglang"]
    args = parse([*line, "--sglang-cuda-graph-max-bs", "64"], None)
    assert args.sglang_cuda_graph_max_bs_decode == 64
    with pytest.raises(UsageError, match=r"has no such option since 0\.5\.18"):
        parse([*line, "--sglang-torchao-config", "int8wo"], None)
