"""What a command line makes the driver import: whoever waits for an answer waits for it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slime.arguments import parse_args
from slime.arguments.registry import declared_groups, shipped_code
from slime.arguments.validate.user_code import why_unusable

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "megatron.core", "transformers", "ray", "sglang")
LOADED = f"[name for name in {HEAVY!r} if name in sys.modules]"


def run(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import sys, json\n{code}", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_a_good_command_line_is_checked_without_the_libraries_of_a_run(words):
    line = words(apply_chat_template=True)
    done = run(f"from slime.arguments import parse_args\nparse_args()\nprint({LOADED})", *line)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize("flag", [["--no-such-flag"], ["--eps-clip", "-3"]])
def test_a_wrong_flag_is_answered_without_them(words, flag):
    code = f"""
import runpy
try:
    runpy.run_path("train.py", run_name="__main__")
except SystemExit as exit_:
    print(exit_.code, {LOADED})
"""
    done = run(code, *words(), *flag)
    assert done.stdout == "2 []\n", done.stderr
    assert done.stderr.startswith("error: --")


def test_the_driver_places_processes_without_importing_what_they_do():
    modules = ("slime.ray.rollout_group", "slime.ray.train_group", "slime.ray.session")
    heavy = ("slime.ray.rollout_manager", "slime.ray.train_worker", "transformers", "megatron.core")
    code = f"import {', '.join(modules)}\nprint([name for name in {heavy!r} if name in sys.modules])"
    assert run(code).stdout == "[]\n"


def test_number_formats_are_there_when_they_are_asked_for(words):
    code = """
import copy, pickle
from slime.arguments import parse_args
from slime.arguments.core.runtime_context import with_context
args = parse_args()
same = [args, copy.deepcopy(args), pickle.loads(pickle.dumps(args)), with_context(args, rank=3)]
assert "torch" not in sys.modules and not hasattr(args, "no_such_name")
print(*(other.params_dtype for other in same), with_context(args, rank=3).rank)
assert "params_dtype" in vars(with_context(args, rank=3))
"""
    assert (
        run(code, *words(fp16=True)).stdout == "torch.float16 torch.float16 torch.float16 torch.float16 3\n"
    )


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", json.dumps({"chat_template": "{{ no.such }}"})),
    ],
)
def test_a_bad_tokenizer_is_told_alike_with_and_without_a_process_for_it(
    altered_checkpoint, words, file, content, monkeypatch, capsys
):
    path = altered_checkpoint()
    (path / file).write_text(content)
    (path / "chat_template.jinja").unlink(missing_ok=True)
    line = words(hf_checkpoint=path, apply_chat_template=True)
    alone = run("from slime.arguments import parse_args\nparse_args()", *line)
    monkeypatch.setattr(sys, "argv", ["train.py", *line])
    assert "torch" in sys.modules  # for which there is no process of its own
    with pytest.raises(SystemExit) as together:
        parse_args()
    assert alone.returncode == together.value.code == 2
    assert alone.stderr.splitlines()[-1] == capsys.readouterr().err.splitlines()[-1]


def test_defaults_need_no_look():
    """`shipped_code` is taken as it is, under each flag that has it."""
    specs = [spec for group in declared_groups() for spec in group.flags if spec.dotted_path]
    shipped = {spec.dest: spec for spec in specs if isinstance(spec.default, str)}
    assert {spec.default for spec in shipped.values()} == shipped_code()
    assert {"rollout_function_path", "data_source_path"} <= shipped.keys()
    for dest, spec in shipped.items():
        assert why_unusable(spec.default, dest, spec.awaited) is None, dest
    assert why_unusable(shipped["rollout_function_path"].default, "eval_function_path") is None
