"""Containers for tests: of the stand-in for docker, or of an engine that is here."""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from slime.agent.sandbox import SandboxError, container
from slime.agent.sandbox.engine import ENGINE, find_engine
from tests.agent import stand_in_engine

IMAGE = "tests/tiny:1"
REAL_IMAGE = os.environ.get("SLIME_TEST_CONTAINER_IMAGE")
"""An image with a shell, which the engine that is here has; tests use it beside the stand-in."""


def real_engine():
    """The path of the engine that is here, or None where tests are not asked to use it."""
    try:
        return find_engine() if REAL_IMAGE else None
    except SandboxError:
        return None


@cache
def has_namespaces():
    words = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "mount", "-t", "proc"]
    return (
        bool(shutil.which("unshare"))
        and not subprocess.run(
            [*words, "proc", "/proc"], capture_output=True, timeout=60, check=False
        ).returncode
    )


class StandIn:
    """The stand-in, with an image that has the folders /workspace and /tmp."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        self.folder = folder
        root = folder / "images" / IMAGE.replace("/", "_") / "root"
        for name in ("workspace", "tmp", "root"):
            (root / name).mkdir(parents=True)
        (root.parent / "settings.json").write_text(json.dumps({"workdir": "/workspace"}))
        (folder / "containers").mkdir()
        self.program = folder / "docker"
        self.program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {stand_in_engine.__file__} "$@"\n')
        self.program.chmod(0o755)
        monkeypatch.setenv("STAND_IN_ENGINE_FOLDER", str(folder))
        monkeypatch.setenv(ENGINE, str(self.program))
        for known in ("_SWEPT", "_IMAGES"):
            monkeypatch.setattr(container, known, set())

    @property
    def calls(self):
        """The words of each call so far."""
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]

    @property
    def running(self):
        return [folder.name for folder in (self.folder / "containers").iterdir()]

    def remove_all(self):
        for name in self.running:
            subprocess.run([self.program, "rm", name], timeout=60, check=False)
