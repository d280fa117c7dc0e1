"""The wheel of this checkout, built from a copy, so that nothing is left in it."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PARTS = ("slime", "slime_plugins", "pyproject.toml", "README.md", "LICENSE")
_BUILD = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"


def build_wheel(directory: Path) -> Path:
    """Builds it in ``directory`` and returns its file."""
    source = directory / "source"
    source.mkdir()
    for part in _PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, source / part)
    command = [sys.executable, "-c", _BUILD, str(directory)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return directory / done.stdout.splitlines()[-1]


def installed(directory: Path) -> dict[str, str]:
    """Puts the wheel's content where Python finds it before this checkout; returns the environment for it."""
    site, scripts = directory / "site", directory / "bin"
    scripts.mkdir()
    with zipfile.ZipFile(build_wheel(directory)) as wheel:
        wheel.extractall(site)
    shutil.rmtree(directory / "source")
    command = scripts / "slime"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m slime.cli "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(scripts), str(Path(sys.executable).parent), os.defpath])
    return {"PATH": path, "PYTHONPATH": str(site), "HOME": str(directory)}
