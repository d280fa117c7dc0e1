"""What an extra needs can be installed beside what we need."""

import json
import subprocess
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.wheel import build_wheel
from tools.check_extras import check, extras

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
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
    for extra in set(PROJECT["optional-dependencies"]) - {"sglang"}:
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


@pytest.mark.slow
def test_the_wheel_has_every_file_that_a_command_needs(tmp_path: Path) -> None:
    """All of the package but the READMEs of its rooms, the command, and nothing else."""
    with zipfile.ZipFile(build_wheel(tmp_path)) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        commands = wheel.read(next(name for name in wheel.namelist() if name.endswith("entry_points.txt")))
    files = [file for folder in ("slime", "slime_plugins") for file in (ROOT / folder).rglob("*")]
    wanted = {str(file.relative_to(ROOT)) for file in files if file.is_file()}
    tasks = "slime/cli/tasks/"
    wanted = {name for name in wanted if "__pycache__" not in name}
    wanted = {name for name in wanted if name.startswith(tasks) or not name.endswith("README.md")}
    assert names == wanted
    assert b"slime = slime.cli.main:main" in commands
