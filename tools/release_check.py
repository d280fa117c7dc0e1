"""Builds the sdist and the wheel and looks at both as somebody does who installs them. Uploads nothing.

    python tools/release_check.py                  # builds into dist/
    python tools/release_check.py --output DIR

Needs the extra ``release``. ``python -m build`` makes the sdist, and out of it the wheel; twine reads what an
index would show of them; then a new environment gets the wheel, and of this checkout nothing else. Its other
packages are those of the environment that this is run with. What does not hold gets a line, and then the exit
status is 1.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.utils import parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("slime", "slime_plugins")
BESIDE = {"pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"}
"""What an sdist holds of this repository beside the packages."""
_WRITTEN = {"PKG-INFO", "setup.cfg", "slime.egg-info"}
_HEADING = re.compile(r"^## \[([^\]]+)\] - (\S+)", re.MULTILINE)
_TASKS = "slime/cli/tasks/"
_HANGS = 600


def packaged(root: Path = ROOT) -> set[str]:
    """Every file that a command may need: all of the packages but the READMEs of their folders."""
    files = (file for package in PACKAGES for file in (root / package).rglob("*") if file.is_file())
    names = {str(file.relative_to(root)) for file in files if "__pycache__" not in file.parts}
    return {name for name in names if name.startswith(_TASKS) or not name.endswith("README.md")}


def faults_of_wheel(wheel: Path, root: Path = ROOT) -> Iterator[str]:
    """What is missing in it, and what is too much."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        ours = {name for name in names if ".dist-info/" not in name}
        points = [archive.read(name).decode() for name in names if name.endswith("entry_points.txt")]
    yield from _differences(wheel.name, ours, packaged(root))
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        yield f"{wheel.name}: has no LICENSE"
    if "slime = slime.cli.main:main" not in "".join(points):
        yield f"{wheel.name}: installs no command slime"


def faults_of_sdist(sdist: Path, root: Path = ROOT) -> Iterator[str]:
    """What is missing in it, and what is too much: READMEs of folders are neither."""
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    ours = {name for name in names if name.split("/")[0] not in _WRITTEN}
    extra = {name for name in ours - BESIDE if name.endswith("/README.md") and name.startswith(PACKAGES)}
    wanted = packaged(root) | BESIDE
    yield from _differences(sdist.name, ours - (extra - wanted), wanted)


def _differences(where: str, found: set[str], wanted: set[str]) -> Iterator[str]:
    yield from (f"{where}: has no {name}" for name in sorted(wanted - found))
    yield from (f"{where}: has {name}, which no command needs" for name in sorted(found - wanted))


def faults_of_version(version: Version, changelog: str) -> Iterator[str]:
    """Whether the changelog tells of it: a release has a date, what comes between releases a heading."""
    headings = dict(_HEADING.findall(changelog))
    if version.is_devrelease:
        if "unreleased" not in headings.values():
            yield f"CHANGELOG.md: no version is unreleased (found: {version}, wanted: ## [NEXT] - unreleased)"
        return
    date = headings.get(str(version))
    if date is None or not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        yield f"CHANGELOG.md: {version}: found {date or 'nothing'} (wanted: ## [{version}] - YYYY-MM-DD)"


def new_environment(directory: Path, wheel: Path) -> Path:
    """An environment with the wheel and the packages that we run with; returns its interpreter."""
    venv.create(directory, symlinks=True)
    python = directory / "bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install"]
    _run([*pip, "--quiet", "--no-index", "--no-deps", "--no-compile", str(wheel)], directory)
    # A path in a .pth file brings packages, but not what .pth files there do, as that of an editable install.
    (own,) = directory.glob("lib/python*/site-packages")
    (own / "packages_of_the_other.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def faults_of_commands(wheel: Path, directory: Path, thorough: bool) -> Iterator[str]:
    """What somebody meets who has installed the wheel and writes a first task.

    Args:
        directory: an empty one.
        thorough: also makes the task's model and asks whether its run would start.
    """
    python = new_environment(directory / "venv", wheel)
    slime = str(python.with_name("slime"))
    place = _run([str(python), "-c", "import slime; print(slime.__file__)"], directory).strip()
    if not place.startswith(str(directory)):
        yield f"import slime: found {place} (wanted: below {directory})"
    version = parse_wheel_filename(wheel.name)[1]
    if (shown := _run([slime, "--version"], directory).strip()) != f"slime {version}":
        yield f"slime --version: {shown} (wanted: slime {version})"
    _run([slime, "new-task", "task"], directory)
    task = directory / "task"
    _run([str(python), "make_data.py"], task)
    if thorough:
        model = ["-m", "slime.cli.tiny_model", "--output", "outputs/model", "--num-layers", "2"]
        _run([str(python), *model], task)
        _run([slime, "check", "--config", "sft.yaml"], task)


def _run(command: Sequence[str], directory: Path) -> str:
    """Standard output of a command that knows nothing of this checkout.

    Raises:
        SystemExit: it failed; shows what it said.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=_HANGS
    )
    if done.returncode:
        raise SystemExit(
            f"error: {' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def build(output: Path) -> tuple[Path, Path]:
    """Makes sdist and wheel of this checkout as its users do, in an environment of their own."""
    with tempfile.TemporaryDirectory() as new:
        _run([sys.executable, "-m", "build", "--outdir", new, str(ROOT)], ROOT)
        output.mkdir(parents=True, exist_ok=True)
        moved = [Path(shutil.move(file, output / file.name)) for file in sorted(Path(new).iterdir())]
    (sdist,) = (file for file in moved if file.name.endswith(".tar.gz"))
    (wheel,) = (file for file in moved if file.suffix == ".whl")
    return sdist, wheel


def main() -> int:
    """Builds, looks, and tells."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="where sdist and wheel are put")
    sdist, wheel = build(parser.parse_args().output)
    print(_run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)], ROOT), end="")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = parse_wheel_filename(wheel.name)[1]
    with tempfile.TemporaryDirectory() as place:
        commands = list(faults_of_commands(wheel, Path(place), thorough=True))
    contents = [*faults_of_sdist(sdist), *faults_of_wheel(wheel)]
    faults = [*contents, *faults_of_version(version, changelog), *commands]
    print(
        "\n".join(f"error: {fault}" for fault in faults) or f"{sdist}\n{wheel}\ncan be released as {version}"
    )
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
