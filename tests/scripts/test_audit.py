"""The audit fails for what is wrong with any part of it, with programs that stand for its tools."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.page_runs import printed

ROOT = Path(__file__).parents[2]
NOT_ASKED = 3
LOOKED_UP: dict[str, Any] = {"name": "torch", "version": "2.13.0", "vulns": []}
WEAK = LOOKED_UP | {"vulns": [{"id": "PYSEC-1"}]}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found on PyPI"}


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("packages", "failing", "status"),
    [
        ([LOOKED_UP, UNKNOWN], "none", 0),
        ([LOOKED_UP], "--allow-only", 1),
        ([LOOKED_UP], "--fail-on", 1),
        ([LOOKED_UP, WEAK], "--require-hashes", 1),
        ([UNKNOWN], "none", NOT_ASKED),
        ([LOOKED_UP], "--require-hashes", NOT_ASKED),
        ([UNKNOWN], "--fail-on", 1),
    ],
    ids=[
        *["all is well", "a licence", "one of several licences", "a weakness", "nothing was looked up"],
        *["a look that ended early", "a licence where nothing was looked up"],
    ],
)
def test_it_fails_for(tmp_path: Path, packages: list[Any], failing: str, status: int) -> None:
    found = tmp_path / "found.json"
    found.write_text(json.dumps({"dependencies": packages}))
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to(sys.executable)
    # Writes where it is told to; what is asked to fail does so after that, as the real ones do.
    tool = f"""words="$*"
while [ $# -gt 0 ]; do
    case "$1" in --output-file | --output) cp "{found}" "$2" ;; esac
    shift
done
case "$words" in *{failing}*) exit 1 ;; esac"""
    for name in ("cyclonedx-py", "pip-licenses", "pip-audit"):
        program(tmp_path / "tools/bin" / name, tool)
    program(tmp_path / "tools/bin/python", "exit 0")
    environment = os.environ | {
        "SLIME_VENV": str(tmp_path / "venv"),
        "SLIME_AUDIT_VENV": str(tmp_path / "tools"),
    }
    (command,) = printed("bash scripts/audit.sh")
    done = subprocess.run(
        [*command.words, str(tmp_path / "audit")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert ("could not be asked for" in done.stderr) == (status == NOT_ASKED or UNKNOWN in packages[:1])
    assert ("weaknesses: torch 2.13.0" in done.stdout) == (WEAK in packages)
    looked_up = sum("skip_reason" not in package for package in packages)
    assert f"{looked_up} of {len(packages)} packages looked up" in done.stdout
    assert {path.name for path in (tmp_path / "audit").iterdir()} == {
        "sbom.json",
        "licences.md",
        "weaknesses.json",
    }
