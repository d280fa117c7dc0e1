"""Writes constraints/cpu.lock: the packages of constraints/cpu.txt with hashes, for uv and for pip.

    pip install uv
    python tools/uv_lock.py

uv asks the package index for each version. Of its files the lock has those that Linux needs with Python
3.11 and 3.12, or the sources of what has none. torch is not in it: its build for CPUs comes from another
index, with another hash.
"""

import argparse
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
PINS, LOCK = ROOT / "constraints/cpu.txt", ROOT / "constraints/cpu.lock"
APART = ("torch",)
_PYTHONS = ("cp311", "cp312")
_HEAD = """\
# Made by tools/uv_lock.py of cpu.txt: the same versions, with hashes. After `uv venv --python 3.11`:
#     uv pip install --no-deps --require-hashes -r constraints/cpu.lock
#     uv pip install --no-deps --torch-backend cpu -c constraints/cpu.txt torch
#     uv pip install --no-deps -e .
"""


def resolve() -> Mapping[str, Any]:
    """What uv knows of every pinned version, in the format of PEP 751."""
    with tempfile.TemporaryDirectory() as place:
        found = Path(place) / "pylock.toml"
        words = ["--quiet", "--no-deps", "--universal", "--python-version", "3.11.5", "--no-config"]
        apart = [word for name in APART for word in ("--no-emit-package", name)]
        command = [sys.executable, "-m", "uv", "pip", "compile", *words, *apart, "-o", str(found), str(PINS)]
        subprocess.run([*command, "--format", "pylock.toml"], check=True, stdout=subprocess.DEVNULL)
        return tomllib.loads(found.read_text(encoding="utf-8"))


def lines(packages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A requirement with hashes for each package."""
    for package in sorted(packages, key=lambda package: package["name"]):
        files = [wheel for wheel in package.get("wheels", ()) if fits(_name_of(wheel))]
        hashes = sorted({file["hashes"]["sha256"] for file in files or [package["sdist"]]})
        yield " ".join([f"{package['name']}=={package['version']}", *(f"--hash=sha256:{h}" for h in hashes)])


def fits(wheel: str) -> bool:
    """Whether an interpreter of ours on Linux can take a wheel of this name."""
    return any(_is_ours(tag) for tag in parse_wheel_filename(wheel)[3])


def _is_ours(tag: Tag) -> bool:
    python = tag.interpreter in (*_PYTHONS, "py3", "py2.py3") or tag.abi == "abi3"
    return python and (tag.platform == "any" or tag.platform.startswith(("manylinux", "linux")))


def _name_of(wheel: Mapping[str, Any]) -> str:
    return str(wheel.get("name") or wheel["url"].rsplit("/", 1)[-1])


def main() -> int:
    """Writes the lock."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False).parse_args()
    LOCK.write_text(_HEAD + "\n".join(lines(resolve()["packages"])) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
