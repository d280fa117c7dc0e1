"""The original's repository, or one of its layout: its launch scripts, and a copy in which they can run.

``ORIGINAL`` of the environment says where it is. Its package ``slime`` is left out of the copy, since what is
looked at is whether its examples and launchers run with ours.
"""

import ast
import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

ORIGINAL = Path(os.environ["ORIGINAL"]).resolve() if os.environ.get("ORIGINAL") else None
_LEFT_OUT = shutil.ignore_patterns(".git", "slime", "slime_plugins", "docs", "imgs", "*.png", "*.ipynb")
_MODEL = re.compile(r"models/([\w.-]+)\.sh")


def copy_of(original: Path, target: Path) -> Path:
    """A copy without what would stand before ours on the import path."""
    return Path(shutil.copytree(original, target, ignore=_LEFT_OUT, symlinks=True))


def bash_launchers(repository: Path) -> list[str]:
    """Scripts that start a training, by their paths below the repository."""
    found = [*repository.glob("scripts/**/*.sh"), *repository.glob("examples/*/*.sh")]
    return sorted(str(path.relative_to(repository)) for path in found if _starts_training(path))


def _starts_training(script: Path) -> bool:
    text = script.read_text(encoding="utf-8", errors="replace")
    return script.parent.name != "models" and re.search(r"\btrain(_async)?\.py\b", text) is not None


def python_launchers(repository: Path) -> list[str]:
    """Modules that call ``execute_train`` at their end, by their paths below the repository."""
    found = [*repository.glob("tests/**/*.py"), *repository.glob("examples/**/*.py")]
    return sorted(
        str(path.relative_to(repository))
        for path in found
        if "execute_train(" in (text := path.read_text(encoding="utf-8")) and "__main__" in text
    )


def model_of_script(repository: Path, script: str) -> str | None:
    """The model whose flags a script of bash takes from ``scripts/models``."""
    named = _MODEL.findall((repository / script).read_text(encoding="utf-8"))
    return named[-1] if named else None


def third_parties(repository: Path) -> list[str]:
    """What the examples import that is neither theirs, nor slime's, nor installed here."""
    own = {path.stem for path in repository.glob("examples/**/*.py")} | {"examples", "slime", "slime_plugins"}
    own |= {path.name for path in repository.glob("examples/**/") if path.is_dir()}
    wanted: set[str] = set()
    for path in repository.glob("examples/**/*.py"):
        wanted.update(_imports(ast.parse(path.read_text(encoding="utf-8"))))
    return sorted(name for name in wanted - own - sys.stdlib_module_names if find_spec(name) is None)


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def helpers_of_tests(original: Path) -> dict[str, str]:
    """What its launchers import from its package that is there for them alone, by module."""
    found = original.glob("slime/**/*_test_helpers.py")
    return {".".join(path.relative_to(original).with_suffix("").parts): str(path) for path in found}
