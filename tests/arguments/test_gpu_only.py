"""A script written for SGLang on GPUs starts on the embedded engine."""

import re

import pytest

from slime.arguments.core.errors import UsageError
from slime.arguments.core.gpu_only import _NAMES
from slime.arguments.core.parser import parse
from tests.arguments.sglang_options import server_options

LINE = ["--hf-checkpoint", "m", "--rollout-batch-size", "1", "--rollout-engine", "embedded"]
OPTIONS = {f"--sglang-{name.removeprefix('--')}" for names in server_options() for name in names.split(",")}


def test_what_only_says_how_gpus_are_used_is_told_and_left_out():
    words = ["--sglang-mem-fraction-static", "0.7", "--sglang-cuda-graph-bs-decode", "1", "2", "4"]
    words += ["--sglang-attention-backend=fa3", "--sglang-enable-dp-attention", "--sglang-dtype", "float32"]
    notes: list[str] = []
    args = parse([*LINE, *words], None, notes)
    assert args.sglang_dtype == "float32" and not hasattr(args, "sglang_mem_fraction_static")
    names = ("mem-fraction-static", "cuda-graph-bs-decode", "attention-backend", "enable-dp-attention")
    wanted = [f"--sglang-{name}: has no effect, the embedded engine has no such option" for name in names]
    assert [note for note in notes if "embedded" in note] == wanted


@pytest.mark.parametrize("name", ["lora-paths", "chat-template", "quantization", "mem-fraction", "pp"])
def test_what_changes_what_is_served_is_refused_and_so_is_a_wrong_name(name):
    with pytest.raises(UsageError, match=f"--sglang-{name}: not an option of the embedded engine"):
        parse([*LINE, f"--sglang-{name}", "x"], None)


@pytest.mark.parametrize("names", _NAMES)
def test_the_names_are_sglangs(names):
    assert [option for option in OPTIONS if re.fullmatch(f"--sglang-({names})", option)]
