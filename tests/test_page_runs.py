"""Commands of pages run as printed, where small models have the printed names."""

import json
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from runpy import run_module, run_path
from unittest.mock import patch

import pytest

from slime.arguments import validated_args
from slime.arguments.config_record import write_record
from slime.cli.main import main
from tests.families import chat_family
from tests.mtp_models import MtpReference
from tests.page_commands import ROOT, Command, blocks
from tests.page_runs import (
    AT_NIGHT,
    CHECKED,
    NAMES,
    PRINTED,
    RUN,
    begins,
    every_command,
    is_checked,
    is_name,
    is_printed,
    is_run,
    printed,
)
from tools.convert_hf_to_fp8 import main as to_fp8
from tools.convert_hf_to_mxfp4 import main as to_mxfp4
from tools.make_tiny_model import make_tokenizer

COMMANDS = every_command()
BASE = {
    "--hf-checkpoint": "Qwen3-4B",
    "--fp32": "",
    "--prompt-data": "data.jsonl",
    "--input-key": "prompt",
    "--apply-chat-template": "",
    "--rm-type": "random",
    "--rollout-batch-size": "4",
    "--n-samples-per-prompt": "2",
    "--num-rollout": "2",
    "--rollout-max-response-len": "64",
    "--actor-num-gpus-per-node": "1",
    "--rollout-num-gpus": "1",
}
"""What a page leaves to the reader: flags that every run must have."""
WANTED = {
    "--mtp-num-layers": {"--hf-checkpoint": "mtp"},
    "--debug-train-only": {"--n-samples-per-prompt": "1", "--input-key": "conversation"},
}
"""What some flags want besides."""
HERE = {
    "/models/Qwen3-0.6B": "Qwen3-4B",
    "/models/policy": "Qwen3-4B",
    "/models/teacher": "Qwen3-4B",
    "/data/problems.jsonl": "data.jsonl",
    "/shared/run7": "shared",
}
"""Places of pages, and those of this test."""


def test_every_command_is_run() -> None:
    assert [str(command) for command in COMMANDS if not is_known(command)] == []
    every = (*RUN, *CHECKED, *PRINTED, *AT_NIGHT)
    assert [words for words in every if not any(begins(c, words) for c in COMMANDS)] == []
    assert NAMES - {" ".join(command.words) for command in COMMANDS} == set()


def is_known(command: Command) -> bool:
    kinds = (is_name, is_run, is_checked, is_printed)
    return any(kind(command) for kind in kinds)


def test_tests_that_take_commands_from_pages_read_them_there() -> None:
    """By their beginning, or, as a recipe, from the page itself."""
    for beginning, file in (PRINTED | AT_NIGHT).items():
        text = (ROOT / file).read_text()
        for command in printed(beginning):
            assert f'printed("{beginning}")' in text or command.page in text, f"{file}: {command}"


def test_a_command_that_nobody_has_thought_of_is_noticed() -> None:
    new = Command("docs/page.md", ("python", "tools/check_extras.py"))
    assert not is_known(new)
    launcher = Command("docs/page.md", ("bash", "scripts/run-qwen3-4B.sh", "--check"))
    assert is_printed(launcher)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where commands are given: models, data, flags and plug-ins under the names that pages print."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, family in (("Qwen3-4B", "qwen3"), ("Qwen3-30B-A3B", "qwen3_moe")):
        chat_family(family, Path(name))
    MtpReference("mimo", Path("mtp"), vocab_size=320)
    make_tokenizer().save_pretrained("mtp")
    for name, family, convert in (
        ("DeepSeek-V3", "deepseek_v3", to_fp8),
        ("gpt-oss-20b", "gpt_oss", to_mxfp4),
    ):
        chat_family(family, Path("plain", name))
        assert convert(["--model-dir", f"plain/{name}", "--save-dir", name]) == 0
    prompt = [{"role": "user", "content": "1+1"}]
    row = {"prompt": prompt, "label": "2", "conversation": [*prompt, {"role": "assistant", "content": "2"}]}
    row["metadata"] = {"lora_adapter": "math"}
    Path("data.jsonl").write_text((json.dumps(row) + "\n") * 8)
    for name in ("RUN_DIR", "A", "B", "DIR"):
        write_record(Path(name), [*words_of(BASE), "--run-dir", name])
        metrics = {"axis": "rollout", "step": 0, "rollout/raw_reward": 1}
        Path(name, "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    write_flags_and_code()
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("my_task", "my_package")]:
        del sys.modules[name]


def write_flags_and_code() -> None:
    """What pages show of a run's files, and flags for what they leave out."""
    Path("run.yaml").write_text("".join(f"{name[2:]}: {value or 'true'}\n" for name, value in BASE.items()))
    Path("bigger.toml").write_text("num_rollout = 4\n")
    teacher = (ROOT / "slime/cli/tasks/distillation/teacher.yaml").read_text()
    Path("teacher.yaml").write_text(teacher.replace("outputs/model-teacher", "Qwen3-4B"))
    fleet = part("docs/fleets.md", "name: judge", "yaml").replace("/models/judge", "Qwen3-4B")
    # An engine has one GPU here, and the tiny model a context of 1,024 tokens.
    fleet = fleet.replace("num_gpus_per_engine: 2", "num_gpus_per_engine: 1").replace("16384", "512")
    Path("fleet.yaml").write_text(fleet)
    Path("my_task").mkdir()
    for name, start in (("loss", "def loss("), ("generate", "def generate("), ("reward", "def reward(")):
        Path(f"my_task/{name}.py").write_text(part("docs/customization.md", start, "python"))
    base = "from starlette.middleware.base import BaseHTTPMiddleware\n"
    code = part("docs/router.md", "class Stamping", "python")
    Path("my_package.py").write_text(f"{base}\n{code}\nTracing = Stamping\n")


def part(page: str, text: str, language: str) -> str:
    return next(code for code in blocks(ROOT / page, language) if text in code)


def words_of(flags: dict[str, str]) -> list[str]:
    return [word for pair in flags.items() for word in pair if word]


def run(command: Command) -> object:
    """The exit status; as the shell would start it, in this process."""
    program, *words = command.words
    try:
        if program == "slime":
            return main(complete(words) if words[0] == "check" else words)
        with patch("sys.argv", words[1:] if words[0] == "-m" else words):
            if words[0] == "-m":
                run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                run_path(str(ROOT / words[0]), run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    return 0


def complete(words: list[str]) -> list[str]:
    """Words with the flags that a run must have, which pages leave out; those of a file are there."""
    needed = dict(BASE)
    for flag, wanted in WANTED.items():
        needed |= wanted if flag in words else {}
    lacking = {} if "--config" in words else {name: needed[name] for name in needed.keys() - set(words)}
    return [*words, *words_of(lacking)]


def check_before_a_start(command: Command) -> int:
    """0 if a run would start; what is wrong raises."""
    words = command.words[1:] if command.words[0] == "slime" else command.words[2:]
    here = HERE | {"/dev/shm/run7": str(Path("local").absolute())}
    given = [here.get(word, word) for word in words if word not in ("train", "--async")]
    validated_args(complete(given))
    return 0


def test_commands_run_as_printed(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Runs in the order of the pages; those that train come up to their start."""
    here = [command for command in COMMANDS if is_run(command) or is_checked(command)]
    faults = {}
    for number, command in enumerate(here):
        folder = Path(f"tasks/{number}" if command.begins("slime", "new-task") else ".")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with chdir(folder):
                status = run(command) if is_run(command) else check_before_a_start(command)
        except Exception as error:
            status = repr(error)
        # `diff` says so that there is a difference, `doctor` that this machine lacks something.
        if status != 0 and not (status == 1 and command.words[1] in ("diff", "doctor")):
            faults[str(command)] = f"{status}: {capfd.readouterr().err[-300:]}"
    assert not faults, "\n".join(f"{command}: {why}" for command, why in faults.items())
    assert sum(map(is_run, here)) > 20 and sum(map(is_checked, here)) > 15
    assert (place / "Qwen3-30B-A3B-INT4/config.json").is_file()
