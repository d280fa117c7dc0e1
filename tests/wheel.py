"""The wheel and the sdist of this checkout, built from a copy, so that nothing is left in it."""

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tools.release_check import BESIDE, PACKAGES

ROOT = Path(__file__).parents[1]
_BUILD = "import sys; from setuptools.build_meta import build_{kind} as build; print(build(sys.argv[1]))"


@dataclass(frozen=True)
class Source:
    """A copy of what an sdist is built from, without git's data."""

    directory: Path

    @classmethod
    def copied_to(cls, directory: Path) -> "Source":
        directory.mkdir()
        for package in PACKAGES:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / package, directory / package, ignore=ignored)
        for name in BESIDE:
            shutil.copy(ROOT / name, directory / name)
        return cls(directory)

    def build(self, kind: str, output: Path) -> Path:
        """Builds the ``wheel`` or the ``sdist``, with the build backend of our own environment."""
        command = [sys.executable, "-c", _BUILD.format(kind=kind), str(output)]
        done = subprocess.run(command, cwd=self.directory, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return output / done.stdout.splitlines()[-1]


def build_wheel(directory: Path) -> Path:
    """Builds it in ``directory`` and returns its file."""
    source = Source.copied_to(directory / "source")
    wheel = source.build("wheel", directory)
    shutil.rmtree(source.directory)
    return wheel


def installed(directory: Path) -> dict[str, str]:
    """Puts the wheel's content where Python finds it before this checkout; returns the environment for it."""
    site, scripts = directory / "site", directory / "bin"
    scripts.mkdir()
    with zipfile.ZipFile(build_wheel(directory)) as wheel:
        wheel.extractall(site)
    command = scripts / "slime"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m slime.cli "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(scripts), str(Path(sys.executable).parent), os.defpath])
    return {"PATH": path, "PYTHONPATH": str(site), "HOME": str(directory)}
