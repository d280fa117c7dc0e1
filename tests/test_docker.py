"""What the files of docker/ name: packages, files, versions and commands are those of the project."""

import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
INSTRUCTIONS = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "USER", "WORKDIR"}


def instructions(file: Path) -> list[tuple[str, str]]:
    """Each instruction with what stands behind it, in one line."""
    lines = [line for line in file.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (word, " ".join(rest.split()))
        for word, _, rest in (line.partition(" ") for line in joined.split("\n"))
    ]


def arguments(file: Path) -> dict[str, str]:
    found = (rest.partition("=") for word, rest in instructions(file) if word == "ARG")
    return {name: value for name, _, value in found}


def image(file: Path) -> str:
    return f"slime:{file.name.removesuffix('.Dockerfile')}"


def is_sent(path: str) -> bool:
    """Whether .dockerignore, which leaves out all but what it names, lets Docker have it."""
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    return any(fnmatch(path, pattern) or path.startswith(f"{pattern}/") for pattern in kept)


def test_there_is_one_for_gpus_and_one_without() -> None:
    assert [image(file) for file in FILES] == ["slime:cpu", "slime:gpu"]


@pytest.mark.parametrize("file", FILES, ids=image)
def test_every_line_is_an_instruction_and_every_file_that_is_copied_is_there(file: Path) -> None:
    lines = instructions(file)
    assert {word for word, _ in lines} <= INSTRUCTIONS
    copied = [rest.split()[:-1] for word, rest in lines if word == "COPY" and "--from" not in rest]
    sources = [source for words in copied for source in words]
    assert sources and all((ROOT / source).exists() and is_sent(source) for source in sources)
    built = {"pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "slime", "slime_plugins"}
    assert built <= set(sources)  # as setuptools finds them; CHANGELOG.md is for an sdist alone


@pytest.mark.parametrize("file", FILES, ids=image)
def test_versions_are_those_of_the_project(file: Path) -> None:
    found = arguments(file)
    assert found["PYTHON"] in SpecifierSet(PYPROJECT["project"]["requires-python"])
    assert found["VERSION"] == PYPROJECT["tool"]["setuptools_scm"]["fallback_version"]
    name = PYPROJECT["project"]["name"].upper()
    assert f'SETUPTOOLS_SCM_PRETEND_VERSION_FOR_{name}="$VERSION"' in file.read_text()


def test_sglang_is_one_of_those_that_ours_admits_and_that_is_tested() -> None:
    version = arguments(ROOT / "docker/gpu.Dockerfile")["SGLANG"]
    (wanted,) = (Requirement(line) for line in PYPROJECT["project"]["optional-dependencies"]["sglang"])
    known = json.loads((ROOT / "constraints/sglang_requirements.json").read_text())
    assert version in wanted.specifier and version in known
    assert f"sglang=={version}\n" in (ROOT / "constraints/sglang_cpu.txt").read_text()


def test_the_image_without_gpus_has_what_scripts_install() -> None:
    """The packages under the same constraints, and those without what they ask for."""
    script = (ROOT / "scripts/lib/environment.sh").read_text()
    (apart,) = re.findall(r"--no-deps ([a-z -]+?)\)", script)
    runs = " ".join(rest for word, rest in instructions(ROOT / "docker/cpu.Dockerfile") if word == "RUN")
    assert f"--no-deps -c /opt/slime/cpu.txt {apart}" in runs


@pytest.mark.parametrize("file", FILES, ids=image)
def test_what_an_image_starts_is_there(file: Path) -> None:
    starts = [json.loads(rest) for word, rest in instructions(file) if word in ("ENTRYPOINT", "CMD")]
    assert starts[0][0] in {*PYPROJECT["project"]["scripts"], "bash"}


@pytest.mark.parametrize("file", FILES, ids=image)
def test_the_command_that_builds_it_is_told(file: Path) -> None:
    command = f"docker build -f docker/{file.name} -t {image(file)} ."
    assert command in file.read_text() and command in (ROOT / "docs/cluster.md").read_text()


def test_files_for_clusters_take_an_image_that_is_built_so() -> None:
    text = (ROOT / "scripts/cluster/kuberay.yaml").read_text()
    spec = yaml.safe_load(text)["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert spec["containers"][0]["image"] in map(image, FILES)
