"""Commands of pages for programs that are not here: what a shell gives them, read as they are documented.

What they name has to fit together: an image is built before it is run, and what a container starts is in the
directory that is mounted.
"""

import json
import os
import re
import subprocess
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch
from zipfile import ZipFile

import pytest
import yaml

from slime.cli.main import main
from tests.arguments.sglang_options import ServerArgs
from tests.each import hold_each
from tests.page_commands import ROOT, Command, fault
from tests.page_runs import printed
from tests.test_docker import FILES, PYPROJECT, image, instructions
from tests.test_page_programs import PIP, start
from tests.wheel import Source

pytestmark = pytest.mark.slow
NOTE = '#!/bin/sh\nprintf "%s\\0" "$@" >"$NOTE"\n'
Given = Callable[[Command], list[str]]


@pytest.fixture
def given(tmp_path: Path) -> Given:
    """The words that a program gets where a shell reads a command, in this directory."""
    programs, note = tmp_path / "programs", tmp_path / "note"
    programs.mkdir()

    def read(command: Command) -> list[str]:
        program = programs / command.words[0]
        program.write_text(NOTE)
        program.chmod(0o755)
        here = {"PATH": f"{programs}:{os.environ['PATH']}", "NOTE": str(note), "PWD": str(tmp_path)}
        script = ["bash", "-euc", " ".join(command.words)]
        subprocess.run(script, cwd=tmp_path, env=os.environ | here | {"KEY": "key"}, check=True, timeout=60)
        return note.read_text().split("\0")[:-1]

    return read


def documented(program: str, *words: str) -> ArgumentParser:
    """A parser that refuses what is not said here; ``words`` come before the flags."""
    parser = ArgumentParser(prog=program, allow_abbrev=False, add_help=False)
    for word in words:
        parser.add_argument(word, choices=[word])
    return parser


def docker_build() -> ArgumentParser:
    parser = documented("docker", "build")
    parser.add_argument("-f", "--file", required=True)
    parser.add_argument("-t", "--tag", required=True)
    parser.add_argument("--build-arg", action="append", default=[])
    parser.add_argument("path")
    return parser


def size(text: str) -> int:
    """Bytes, as Docker reads them."""
    return int(text[:-1]) * 1024 ** "bkmg".index(text[-1])


def docker_run() -> ArgumentParser:
    parser = documented("docker", "run")
    for names in (("--rm",), ("-i", "--interactive"), ("-t", "--tty")):
        parser.add_argument(*names, action="store_true")
    for names in (("-e", "--env"), ("-v", "--volume")):
        parser.add_argument(*names, action="append", default=[])
    for names in (("-u", "--user"), ("-w", "--workdir"), ("--entrypoint",)):
        parser.add_argument(*names)
    parser.add_argument("--shm-size", type=size, required=True)
    parser.add_argument("--gpus", choices=["all"])
    parser.add_argument("image")
    parser.add_argument("command", nargs=REMAINDER)
    return parser


def built(given: Given) -> dict[str, Path]:
    """The file of each image that pages build."""
    images = {}
    for command in printed("docker build"):
        args = docker_build().parse_args(given(command))
        assert args.path == "." and (ROOT / args.file).is_file()
        images[args.tag] = ROOT / args.file
    return images


def test_images_are_built_from_the_files_that_are_there(given: Given) -> None:
    assert built(given) == {image(file): file for file in FILES}


def started(args: Namespace, file: Path) -> tuple[list[str], Path]:
    """What a container starts by its image, and the directory on this machine where it does."""
    said = dict(instructions(file))
    entry = json.loads(said.get("ENTRYPOINT", "[]")) if args.entrypoint is None else [args.entrypoint]
    mounts = {there: here for here, _, there in (volume.partition(":") for volume in args.volume)}
    (mounted, here), *more = mounts.items()
    workdir = Path(args.workdir or said["WORKDIR"])
    assert not more and workdir.is_relative_to(mounted), f"{workdir} is not mounted"
    return [*entry, *args.command], Path(here) / workdir.relative_to(mounted)


def test_containers_start_what_their_images_and_directories_have(given: Given, monkeypatch) -> None:
    """In the order of the page: the first writes the task whose script the next one runs."""
    images = built(given)
    found = []

    def check(command: Command) -> None:
        args = docker_run().parse_args(given(command))
        assert args.shm_size >= 2**31  # of the default of 64 MiB Ray would use files
        assert args.user is None or args.user == str(os.getuid())
        (program, *rest), place = started(args, images[args.image])
        found.append(f"{program} {rest[0]}")
        if rest[0] == "new-task":
            with patch("os.getcwd", return_value=str(place)):
                monkeypatch.chdir(place)
                assert main(rest) == 0
        elif program == "bash":
            subprocess.run(["bash", "-n", place / rest[0]], check=True, timeout=60)
        else:
            assert fault(Command(command.page, (program, *rest))) is None

    hold_each(printed("docker run"), check)
    assert found == ["slime new-task", "bash run.sh", "slime train"]


def test_kubernetes_gets_a_file_for_its_operator(given: Given) -> None:
    parser = documented("kubectl", "apply")
    parser.add_argument("-f", "--filename", required=True)
    (command,) = printed("kubectl")
    args = parser.parse_args(given(command))
    (job,) = yaml.safe_load_all((ROOT / args.filename).read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    images = {image(file) for file in FILES}
    cluster = job["spec"]["rayClusterSpec"]
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    assert {container["image"] for pod in pods for container in pod["containers"]} <= images


def test_skypilot_gets_the_secrets_of_its_file(given: Given) -> None:
    parser = documented("sky", "launch")
    parser.add_argument("--secret", action="append", default=[])
    parser.add_argument("file")
    (command,) = printed("sky")
    args = parser.parse_args(given(command))
    secrets = dict(secret.split("=", 1) for secret in args.secret)
    task = yaml.safe_load((ROOT / args.file).read_text())
    assert {name for name, value in task["secrets"].items() if value is None} == secrets.keys()
    assert re.fullmatch(r"[0-9a-f]{64}", secrets["RAY_AUTH_TOKEN"])
    assert "RAY_AUTH_MODE" in task["envs"] and (ROOT / task["workdir"] / "pyproject.toml").is_file()


def test_jupyter_opens_the_notebook_that_is_run(given: Given) -> None:
    from tests.examples.test_notebooks import NOTEBOOK

    (command,) = printed("jupyter")
    name, file = given(command)
    assert name == "notebook" and ROOT / file == NOTEBOOK
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["language"]) == (4, "python")


def test_sglang_takes_the_flags_of_its_server(given: Given) -> None:
    """Those of the release that is recorded."""
    parser = documented("python", "-m", "sglang.launch_server")
    ServerArgs.add_cli_args(parser)
    (command,) = printed("python -m sglang.launch_server")
    _, module, *flags = given(command)
    server = documented(module)
    ServerArgs.add_cli_args(server)
    args = server.parse_args(flags)
    assert (args.api_key, args.port) == ("key", 30000) and args.model_path and args.host


def test_what_developers_and_sandboxes_install_is_an_extra_of_ours_or_a_package(tmp_path: Path) -> None:
    """By pip itself, from a copy, and up to what it would install: nothing is asked of an index."""
    source = Source.copied_to(tmp_path / "copy").directory
    (source / "constraints").symlink_to(ROOT / "constraints")
    with ZipFile(tmp_path / "e2b-1.0-py3-none-any.whl", "w") as stand_in:
        stand_in.writestr("e2b-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: e2b\nVersion: 1.0\n")
        stand_in.writestr("e2b-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        stand_in.writestr("e2b-1.0.dist-info/RECORD", "")
    ours = {"PIP_NO_DEPS": "1", "PIP_DRY_RUN": "1", "PIP_FIND_LINKS": str(tmp_path)}
    known = PYPROJECT["project"]["optional-dependencies"]

    def check(command: Command) -> None:
        # PIP_NO_BUILD_ISOLATION=0 is how pip says: none. Without dependencies it takes any name of an extra.
        assert "Would install " in start(command, source, **PIP, **ours, PIP_NO_BUILD_ISOLATION="0")
        named = re.findall(r"\[(.*?)\]", " ".join(command.words))
        assert {extra for names in named for extra in names.split(",")} <= known.keys()

    extras = (*printed("pip install -e"), *printed("pip install -c constraints/cpu.txt"))
    hold_each([*extras, *printed("pip install e2b")], check, least=3)


@pytest.mark.parametrize(
    ("parser", "words"),
    [
        (docker_build, "build -f docker/cpu.Dockerfile --tags slime:cpu ."),
        (docker_build, "build -t slime:cpu ."),
        (docker_run, "run --shm 2g slime:cpu new-task t"),
        (docker_run, "run --shm-size much slime:cpu new-task t"),
    ],
)
def test_a_word_that_is_not_documented_is_refused(parser: Callable[[], ArgumentParser], words: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(words.split())
