"""What an extra needs can be installed beside what we need."""

import json
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SGLANG: dict[str, dict[str, str]] = json.loads((ROOT / "constraints/sglang_requirements.json").read_text())
"""Of each SGLang release, what it asks of packages that we need too; copied from the registry's metadata."""


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


def test_the_cpu_lock_lies_within_the_ranges() -> None:
    lines = [line for line in (ROOT / "constraints/cpu.txt").read_text().splitlines() if "==" in line]
    locked = {requirement.name.lower(): requirement.specifier for requirement in map(Requirement, lines)}
    for name, specifier in ranges(PROJECT["dependencies"]).items():
        (pin,) = locked[name.split("[")[0].lower()]
        assert Version(pin.version) in specifier, f"{name}: {pin} is outside {specifier}"
