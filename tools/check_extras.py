"""Checks that every extra of pyproject.toml can be resolved; needs a package index, installs nothing.

    python tools/check_extras.py            # all of them
    python tools/check_extras.py sglang     # these

Takes one to two minutes for each, and downloads what the index gives no metadata for.
Exits with 1 if one fails.
"""

import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def extras() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["optional-dependencies"])


def command(extra: str) -> list[str]:
    """What pip is asked: as if nothing were installed, or it would only compare with that."""
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    return [*pip, "--dry-run", "--ignore-installed", f"{ROOT}[{extra}]"]


def run_quietly(argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def check(names: Sequence[str], run: Run = run_quietly) -> list[str]:
    """The extras that cannot be resolved, each printed with what pip says."""
    failed = []
    for extra in names:
        result = run(command(extra))
        if result.returncode == 0:
            print(f"{extra}: resolves")
            continue
        failed.append(extra)
        print(f"{extra}: does not resolve\n{result.stdout}")
    return failed


if __name__ == "__main__":
    chosen = sys.argv[1:] or extras()
    if unknown := set(chosen) - set(extras()):
        sys.exit(f"error: no such extra: {', '.join(sorted(unknown))} (wanted: {', '.join(extras())})")
    sys.exit(1 if check(chosen) else 0)
