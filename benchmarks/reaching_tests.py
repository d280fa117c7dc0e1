"""Which files of tests reach a module of ours, by what imports what."""

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMES = ROOT / "benchmarks" / "results" / "suite_times.json"
_TREES = ("slime", "slime_plugins", "tests", "examples", "tools")
_DOTTED = rf"(?:{'|'.join(_TREES)})(?:\.\w+)+"
_FROM = re.compile(rf"^\s*from ({_DOTTED}|slime) import (\([^)]*\)|.*)$", re.MULTILINE)
_NAMED = re.compile(rf"^\s*import ({_DOTTED})|[\"']({_DOTTED})[\"']", re.MULTILINE)
_OTHER_TIERS = ("tests/e2e/", "tests/gpu/", "tests/sglang_cpu/", "tests/benchmarks/")
_COMMON_WORDS = ("test", "utils", "base", "types", "common", "model", "models")
"""Parts of names that say nothing of what a module does."""


def reaching(path: str) -> list[str]:
    """Returns the files of tests that import a module, or what imports it, the nearest ones first.

    Nearest is what is named after it, then what has few imports between and lies in folders of the same
    names, then what takes least time. Whole runs are left out.
    """
    hops, words, folders = _distances(path), _words(path), Path(path).parts[1:-1]

    def far(name: str) -> tuple[bool, int, float, str]:
        pairs = zip(folders, Path(name).parts[1:-1], strict=False)
        shared = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
        return not words & _words(name), hops[name] - shared, seconds(name), name

    return sorted(filter(_is_test, hops), key=far)


def importing(path: str) -> list[str]:
    """Returns the files of tests that import from a module themselves, whole runs left out."""
    return [name for name in _needing().get(path, ()) if _is_test(name)]


def seconds(name: str) -> float:
    """Returns what a file of tests takes on an idle machine, as was measured."""
    return _measured().get(name, 1.0)


@cache
def _measured() -> dict[str, float]:
    return {name: taken for name, (taken, _) in json.loads(TIMES.read_text())["files"].items()}


def _words(path: str) -> set[str]:
    return {*Path(path).stem.split("_")} - {*_COMMON_WORDS}


@cache
def _is_test(name: str) -> bool:
    """Whether it is a file of tests that start no Ray."""
    if not Path(name).name.startswith("test_") or name.startswith(_OTHER_TIERS):
        return False
    return "pytestmark = pytest.mark.cluster" not in (ROOT / name).read_text()


def _distances(path: str) -> dict[str, int]:
    """Returns how many imports are between a module and each file that needs it."""
    found, newest = {path: 0}, {path}
    while newest:
        hops = 1 + max(found.values())
        newest = {name for near in newest for name in _needing().get(near, ())} - found.keys()
        found |= dict.fromkeys(newest, hops)
    return found


@cache
def _needing() -> dict[str, set[str]]:
    """Returns, by file, the files that name it."""
    found: dict[str, set[str]] = {}
    for tree in _TREES:
        for file in sorted((ROOT / tree).rglob("*.py")):
            name = str(file.relative_to(ROOT))
            for other in {*_named(file)} - {name}:
                found.setdefault(other, set()).add(name)
    return found


def _named(file: Path) -> Iterator[str]:
    """Yields the files that one names: in imports, as dotted paths in text, and the fixtures around tests."""
    text = file.read_text()
    for module, names in _FROM.findall(text):
        yield from _files_of(module)
        for name in re.findall(r"\w+", names):
            yield from _files_of(f"{module}.{name}", whole=True)
    for imported, quoted in _NAMED.findall(text):
        yield from _files_of(imported or quoted)
    if file.name.startswith("test_"):
        for folder in file.parents:
            if folder != ROOT and folder.is_relative_to(ROOT) and (folder / "conftest.py").is_file():
                yield str((folder / "conftest.py").relative_to(ROOT))


@cache
def _files_of(dotted: str, whole: bool = False) -> list[str]:
    """Returns the file of a module, or of the one that something is in; of a package what runs it too."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:end])
        files = [base.with_suffix(".py"), base / "__init__.py", base / "__main__.py"]
        if there := [str(file.relative_to(ROOT)) for file in files if file.is_file()]:
            return there
        if whole:
            break
    return []
