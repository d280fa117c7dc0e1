"""Extras can be installed beside what we need, and what is released works without this checkout."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.page_runs import printed
from tests.wheel import Source
from tools.check_extras import check, extras
from tools.release_check import faults_of_commands, faults_of_sdist, faults_of_version, faults_of_wheel
from tools.uv_lock import APART, LOCK, PINS, fits

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
FALLBACK: str = PYPROJECT["tool"]["setuptools_scm"]["fallback_version"]
SGLANG: dict[str, dict[str, str]] = json.loads((ROOT / "constraints/sglang_requirements.json").read_text())
"""What each SGLang release asks of packages that we need too; copied from the registry's metadata."""


def ranges(lines: list[str]) -> dict[str, SpecifierSet]:
    requirements = [Requirement(line) for line in lines]
    return {requirement.name: requirement.specifier for requirement in requirements}


@pytest.mark.parametrize("release", SGLANG)
def test_sglang_releases_of_the_range_pin_versions_that_ours_admit(release: str) -> None:
    assert Version(release) in ranges(PROJECT["optional-dependencies"]["sglang"])["sglang"]
    ours = ranges(PROJECT["dependencies"])
    for name, wanted in SGLANG[release].items():
        pins = [Version(spec.version) for spec in SpecifierSet(wanted) if spec.operator == "=="]
        assert all(pin in ours[name] for pin in pins), f"{name}{wanted} is outside {ours[name]}"


def test_the_extras_that_the_cpu_lock_holds_lie_within_their_ranges() -> None:
    lines = [line for line in (ROOT / "constraints/cpu.txt").read_text().splitlines() if "==" in line]
    locked = {canonicalize_name(found.name): found.specifier for found in map(Requirement, lines)}
    for extra in set(PROJECT["optional-dependencies"]) - {"sglang", "verifiers", "openenv", "nixl"}:
        for name, specifier in ranges(PROJECT["optional-dependencies"][extra]).items():
            (pin,) = locked[canonicalize_name(name)]
            assert Version(pin.version) in specifier, f"{extra}: {name}: {pin} is outside {specifier}"


def test_the_check_of_the_extras_asks_for_each_and_names_those_that_fail(capsys) -> None:
    asked = []

    def run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        asked.append(argv[-1])
        failed = argv[-1].endswith("[sglang]")
        return subprocess.CompletedProcess(argv, int(failed), "ERROR: ResolutionImpossible" if failed else "")

    assert check(extras(), run) == ["sglang"]
    assert asked == [f"{ROOT}[{extra}]" for extra in PROJECT["optional-dependencies"]]
    assert "sglang: does not resolve\nERROR: ResolutionImpossible" in capsys.readouterr().out


def test_the_cpu_lock_lies_within_the_ranges() -> None:
    lines = [line for line in (ROOT / "constraints/cpu.txt").read_text().splitlines() if "==" in line]
    locked = {requirement.name.lower(): requirement.specifier for requirement in map(Requirement, lines)}
    for name, specifier in ranges(PROJECT["dependencies"]).items():
        (pin,) = locked[name.split("[")[0].lower()]
        assert Version(pin.version) in specifier, f"{name}: {pin} is outside {specifier}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist and the wheel."""
    output = tmp_path_factory.mktemp("dist")
    source = Source.copied_to(output / "source")
    return source.build("sdist", output), source.build("wheel", output)


@pytest.mark.slow
def test_what_is_released_has_every_file_that_a_command_needs_and_no_others(built) -> None:
    sdist, wheel = built
    assert [*faults_of_sdist(sdist), *faults_of_wheel(wheel)] == []


@pytest.mark.slow
def test_the_wheel_alone_writes_a_task(built, tmp_path: Path) -> None:
    assert list(faults_of_commands(built[1], tmp_path, thorough=False)) == []


@pytest.mark.slow
def test_a_wheel_that_lacks_a_template_and_has_a_test_is_found_out(built, tmp_path: Path) -> None:
    template, test = "slime/cli/tasks/shared/run.yaml", "tests/test_it.py"
    with zipfile.ZipFile(built[1]) as whole, zipfile.ZipFile(tmp_path / built[1].name, "w") as part:
        for name in set(whole.namelist()) - {template}:
            part.writestr(name, whole.read(name))
        part.writestr(test, "")
    assert [fault.partition(": ")[2] for fault in faults_of_wheel(tmp_path / built[1].name)] == [
        f"has no {template}",
        f"has {test}, which no command needs",
    ]


CHANGES = "# Changelog\n\n## [0.2.0] - unreleased\n\n## [0.1.0] - 2026-01-02\n"


@pytest.mark.parametrize(
    ("version", "changes", "fault"),
    [
        ("0.1.0", CHANGES, None),
        ("0.1.1.dev3+g0123456", CHANGES, None),
        ("0.2.0", CHANGES, "0.2.0: found unreleased (wanted: ## [0.2.0] - YYYY-MM-DD)"),
        ("0.3.0", CHANGES, "0.3.0: found nothing (wanted: ## [0.3.0] - YYYY-MM-DD)"),
        ("0.3.1.dev0", CHANGES.replace("unreleased", "2026-02-03"), "no version is unreleased"),
    ],
)
def test_the_changelog_has_to_tell_of_a_version(version: str, changes: str, fault: str | None) -> None:
    found = list(faults_of_version(Version(version), changes))
    assert len(found) == (fault is not None) and all(str(fault) in line for line in found)


def version_in(place: Path) -> str:
    command = [sys.executable, "-m", "setuptools_scm", "--config", "pyproject.toml"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_versions_come_from_tags_and_there_is_one_without(tmp_path: Path) -> None:
    """As in a tarball, a clone without tags, a release, and what is built after it."""
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]

    def git(*words: str) -> None:
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    assert version_in(tmp_path) == FALLBACK
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    assert Version(version_in(tmp_path)).is_devrelease
    (command,) = printed("git tag")
    git(*command.words[1:])
    assert f"v{version_in(tmp_path)}" == command.words[-1] == "v0.1.0"
    git("commit", "--quiet", "--allow-empty", "--message", "second")
    assert version_in(tmp_path).startswith("0.1.1.dev1+g")


def test_the_version_without_git_is_the_next_one_of_the_changelog() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert (
        f"## [{Version(FALLBACK).base_version}] - unreleased" in changes and Version(FALLBACK).is_devrelease
    )


def test_the_lock_with_hashes_has_the_versions_of_the_constraints() -> None:
    lines = LOCK.read_text().splitlines()
    found = {canonicalize_name(line.split("==")[0]): line for line in lines if not line.startswith("#")}
    pinned = [Requirement(line) for line in PINS.read_text().splitlines() if "==" in line]
    assert found.keys() == {canonicalize_name(pin.name) for pin in pinned} - set(APART)
    for pin in pinned:
        if pin.name not in APART:
            words = found[canonicalize_name(pin.name)].split()
            assert f"=={words[0].split('==')[1]}" == str(pin.specifier)
            assert words[1:] and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", word) for word in words[1:])


@pytest.mark.parametrize(
    ("wheel", "taken"),
    [
        ("a-1-py3-none-any.whl", True),
        ("a-1-cp311-cp311-manylinux_2_28_x86_64.whl", True),
        ("a-1-cp39-abi3-manylinux_2_17_aarch64.manylinux2014_aarch64.whl", True),
        ("a-1-cp313-cp313-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp311-cp311-win_amd64.whl", False),
        ("a-1-cp312-cp312-musllinux_1_2_x86_64.whl", False),
    ],
)
def test_the_lock_has_the_files_of_our_interpreters_on_linux(wheel: str, taken: bool) -> None:
    assert fits(wheel) is taken


@pytest.mark.nightly
def test_a_release_can_be_built_as_its_check_demands(tmp_path: Path) -> None:
    """In isolation, which asks a package index for setuptools."""
    pytest.importorskip("twine", reason="wanted: pip install -c constraints/cpu.txt -e '.[release]'")
    (command,) = printed("python tools/release_check.py")
    words = [sys.executable, *command.words[1:], "--output", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "can be released as" in done.stdout and len(list(tmp_path.iterdir())) == 2


@pytest.mark.nightly
def test_the_lock_that_is_written_again_is_the_one_that_is_there(tmp_path: Path) -> None:
    """In a copy of what is read; asks a package index."""
    pytest.importorskip("uv", reason="wanted: pip install uv")
    for folder in ("tools", "constraints"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    lock = tmp_path / "constraints/cpu.lock"
    lock.unlink()
    (command,) = printed("python tools/uv_lock.py")
    subprocess.run([sys.executable, *command.words[1:]], cwd=tmp_path, check=True, timeout=900)
    assert lock.read_text() == (ROOT / "constraints/cpu.lock").read_text()
