"""The shell scripts are valid bash, and train.py accepts the flags they pass."""

import itertools
import json
import math
import os
import re
import shutil
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from slime.arguments.core.errors import UsageError
from slime.arguments.core.flag import option_string
from slime.arguments.core.parser import parse
from slime.arguments.model_only import model_args
from slime.models import shape_from_hf_config
from tests.arguments.sglang_options import as_installed
from tests.each import hold_each
from tests.models.public_configs import CONFIGS, text_of
from tests.page_runs import printed

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for end in ("sh", "sbatch") for path in (ROOT / "scripts").rglob(f"*.{end}"))
RUNS = sorted((ROOT / "scripts").rglob("run-*.sh"))
LAUNCHERS = RUNS + sorted((ROOT / "scripts/quickstart").glob("*.sh"))
MODELS = sorted((ROOT / "scripts/models").glob("*.sh"))


GPUS = ("--actor-num-nodes", "--actor-num-gpus-per-node")


@pytest.fixture
def sglang(monkeypatch):
    as_installed(monkeypatch)


def name(path):
    return str(path.relative_to(ROOT / "scripts"))


def flags_of(launcher, tmp_path, *extra, cwd=ROOT, **variables):
    """What a launcher passes to train.py, caught by a program named python that comes first in PATH."""
    fake = tmp_path / "bin" / "python"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    fake.chmod(0o755)
    places = {name: str(tmp_path / name.lower()) for name in ("MODELS", "DATASETS", "RUNS", "OUTPUT")}
    env = os.environ | {"PATH": f"{fake.parent}:{os.environ['PATH']}", "SEED": "3", "NUM_ROLLOUT": "4"}
    command = ["bash", str(launcher), *extra]
    done = subprocess.run(
        command, env=env | places | variables, cwd=cwd, capture_output=True, text=True, check=True
    )
    script, *flags = done.stdout.rstrip("\0").split("\0")
    assert (cwd / script).resolve() in (ROOT / "train.py", ROOT / "train_async.py")
    return flags


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """``launched(launcher)``: what it passes to train.py, and the directory of the places that it names."""
    root = tmp_path_factory.mktemp("launched")

    @cache
    def run(launcher):
        return flags_of(launcher, root), root

    return run


def test_every_script_is_valid_bash():
    def check(script):
        done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")

    hold_each(SCRIPTS, check, name, least=100)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    files = [*SCRIPTS, *(ROOT / "examples").glob("*/run.sh"), ROOT / ".ci/run"]
    done = subprocess.run(["shellcheck", *map(str, files)], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == ""


def test_every_launcher_passes_each_flag_once(launched):
    def check(launcher):
        flags = [word for word in launched(launcher)[0] if word.startswith("--")]
        assert [flag for flag, times in Counter(flags).items() if times > 1] == []

    hold_each(LAUNCHERS, check, name, least=40)


def test_train_py_knows_and_supports_the_flags_of_every_launcher(launched, sglang):
    def check(launcher):
        flags, root = launched(launcher)
        words = [*flags, "--rollout-engine", "sglang"]
        args = parse(words, None)
        assert args.hf_checkpoint.startswith(str(root))
        with pytest.raises(UsageError, match="--learning-rate"):
            parse([*words, "--learning-rate", "1"], None)

    hold_each(LAUNCHERS, check, name, least=40)


def test_the_layout_of_every_launcher_fits_its_model(launched):
    """Sizes divide what they should, for the published shape."""

    def check(launcher):
        (model,) = re.findall(r"^use_model (.+)$", launcher.read_text(), re.MULTILINE)
        words, _ = launched(launcher)
        place = Path(words[words.index("--hf-checkpoint") + 1])
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(CONFIGS[model]))
        size = {flag: int(words[words.index(flag) + 1]) for flag in GPUS if flag in words}
        args = model_args(without_sglang(words), math.prod(size.values()))
        assert args.num_layers == text_of(CONFIGS[model])["num_hidden_layers"]

    hold_each(RUNS, check, name, least=35)


def without_sglang(words):
    """SGLang's options are no part of a model."""
    kept, keep = [], True
    for word in words:
        keep = not word.startswith("--sglang-") if word.startswith("--") else keep
        kept += [word] if keep else []
    return kept


@cache
def words_of(model):
    command = f'source "{model}"; printf "%s\\0" "${{MODEL_ARGS[@]}}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    return [word for word in done.stdout.split("\0") if word]


def test_pre_commit_and_ci_run_the_same_tools():
    assert "scripts/test.sh" in (ROOT / ".ci/run").read_text()
    assert os.access(ROOT / ".ci/run", os.X_OK)
    script = (ROOT / "scripts/test.sh").read_text()
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    for tool in ("ruff check", "ruff format", "mypy", "shellcheck"):
        assert tool in script
        assert tool in config


def test_a_ready_environment_is_not_installed_again(tmp_path):
    """use_environment with the fingerprint in place calls no pip."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/activate").write_text("echo activated\n")
    library = ROOT / "scripts/lib/environment.sh"
    stamp = f'environment_fingerprint dev,test >"{venv}/.installed-dev,test"'
    command = f'set -e; source "{library}"; {stamp}; use_environment dev test'
    env = os.environ | {"SLIME_VENV": str(venv)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout) == (0, "activated\n"), done.stderr


def test_a_missing_interpreter_is_named(tmp_path):
    library = ROOT / "scripts/lib/environment.sh"
    env = os.environ | {"SLIME_VENV": str(tmp_path / "venv"), "SLIME_PYTHON": "no-such-python"}
    command = f'set -e; source "{library}"; use_environment'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no suitable Python: found no-such-python, wanted 3.11 or 3.12")


def test_arguments_of_every_launcher_come_last(tmp_path):
    def check(launcher):
        assert flags_of(launcher, tmp_path, "--num-rollout", "7")[-2:] == ["--num-rollout", "7"]

    hold_each(RUNS, check, name, least=35)


def test_launchers_pass_on_what_pages_print_behind_them(tmp_path, sglang):
    def check(command):
        flags = flags_of(command.words[1], tmp_path, *command.words[2:])
        assert flags[len(flags) - len(command.words[2:]) :] == [*command.words[2:]]
        parse([*flags, "--rollout-engine", "sglang"], None)

    hold_each(printed("bash scripts/run-"), check, least=7)


def test_relative_places_are_those_of_the_caller(tmp_path):
    places = {"MODELS": "models", "DATASETS": "my data", "RUNS": "../runs"}
    flags = flags_of(ROOT / "scripts/run-qwen3-4B.sh", tmp_path, cwd=tmp_path, **places)
    value = dict(itertools.pairwise(flags))
    assert value["--hf-checkpoint"] == f"{tmp_path}/models/Qwen3-4B"
    assert value["--prompt-data"] == f"{tmp_path}/my data/dapo-math-17k/dapo-math-17k.jsonl"
    assert value["--save"] == f"{tmp_path}/../runs/qwen3-4B"


def test_a_launcher_stays_where_it_was_started(tmp_path):
    """So that paths in flags are the caller's too; plug-ins of the repository are found all the same."""
    told = 'printf "%s\\n" "$PWD" "$PYTHONPATH"'
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\n[ "$1" = -c ] || {told}\n')
    fake.chmod(0o755)
    command = ["bash", str(ROOT / "scripts/run-retool-qwen3-4B.sh")]
    done = run_without_slime(command, cwd=tmp_path, bin=str(tmp_path), PYTHONPATH="/mine")
    assert done.stdout.splitlines() == [str(tmp_path), f"{ROOT}:/mine"], done.stderr


def test_a_relative_environment_is_the_callers(tmp_path):
    library = ROOT / "scripts/lib/environment.sh"
    bin_ = tmp_path / "venv/bin"
    bin_.mkdir(parents=True)
    (bin_ / "activate").touch()
    (bin_ / "python").write_text('#!/bin/sh\necho "$0 in $PWD"\n')
    (bin_ / "python").chmod(0o755)
    command = ["bash", "-c", f'set -e; source "{library}"; use_environment']
    done = run_without_slime(command, cwd=tmp_path, SLIME_VENV="venv")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"{bin_}/python in {ROOT}"


def test_no_model_file_says_what_config_json_says(tmp_path):
    def check(model):
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS[model]))
        words = words_of(ROOT / f"scripts/models/{model}.sh")
        args = model_args([*words, "--hf-checkpoint", str(tmp_path)], 1)
        assert args.num_layers == text_of(CONFIGS[model])["num_hidden_layers"]
        shape = {option_string(name) for name in (*shape_from_hf_config(tmp_path), "spec")}
        assert not shape & {*words}

    assert {model.stem for model in MODELS} == CONFIGS.keys()
    hold_each(CONFIGS, check, least=55)


def run_without_slime(command, cwd=ROOT, **more):
    """By a shell that finds a Python, but none of what slime needs."""
    env = {"PATH": f"{more.pop('bin', '/nowhere')}:/usr/bin:/bin"} | more
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("script", ["scripts/run-qwen3-4B.sh", "examples/retool/run.sh"])
def test_an_environment_that_is_not_active_is_told(script, tmp_path):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    done = run_without_slime(["bash", script], bin=str(tmp_path), OUTPUT=str(tmp_path / "out"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: no environment is active: found {fake}, wanted one with what slime needs "
        "(. .venv/bin/activate)\n"
    )


def test_directories_that_cd_would_look_in_change_nothing(tmp_path):
    """With CDPATH ``cd`` prints where it went, which would become a part of the repository's path."""
    for library in ("launch.sh", "environment.sh"):
        command = ["bash", "-c", f'source scripts/lib/{library}; printf %s "$REPOSITORY"']
        done = run_without_slime(command, CDPATH=f"{ROOT}:{tmp_path}")
        assert (done.stdout, done.stderr) == (str(ROOT), "")


def test_an_interpreter_may_lie_on_a_path_with_a_blank(tmp_path):
    python = tmp_path / "my python" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    command = ["bash", "-c", "source scripts/lib/environment.sh; find_python"]
    done = run_without_slime(command, SLIME_PYTHON=str(python))
    assert (done.stdout, done.stderr) == (f"{python}\n", "")
