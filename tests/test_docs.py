"""What pages name exists: files, modules, functions; and each room has its README."""

import ast
import asyncio
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.calculator_tool.reward import reward as calculator_reward
from examples.openai_agent.generate import grade
from slime.utils.types import Sample
from tests.run_args import plugin_args

ROOT = Path(__file__).parents[1]
LISTED = [ROOT / "slime/backends" / folder for folder in ("megatron_utils", "fsdp_utils", "embedded_engine")]
ROOMS = [*sorted(file.parent for file in ROOT.glob("slime/*/__init__.py")), *LISTED]
READMES = [room / "README.md" for room in ROOMS]
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *READMES),
    *(page for page in sorted(ROOT.glob("docs/**/*.md")) if page.name != "flags.md"),
    *sorted(ROOT.glob("examples/*/README.md")),
]
TREES = ("slime", "tests", "tools", "docker", "scripts", "benchmarks", "examples", "docs", "constraints")
LAUNCH_SCRIPTS = ROOT / "tests/arguments/launch_scripts"
_FILE = re.compile(rf"\b(?:{'|'.join(TREES)})/[\w./-]+\.(?:sh|py|md|txt|json)\b")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def quoted(text: str) -> list[str]:
    """What stands between single backquotes, outside code blocks."""
    return re.findall(r"`([^`\n]+)`", _FENCE.sub("", text))


def missing_files(page: Path, text: str) -> list[str]:
    """Paths that a page names in backquotes and that do not exist.

    A path starts at the root of the repository; in the README of a room also in the room or one folder below.
    """
    room = page.parent if page.parent in ROOMS else None
    missing = []
    for word in quoted(text):
        if word.startswith(tuple(f"{tree}/" for tree in TREES)):
            found = list(ROOT.glob(word.rstrip("/")))
        elif room and re.fullmatch(r"[\w/]+(\.py|/)", word):
            found = [p for base in (room, *room.iterdir(), ROOT) if (p := base / word).exists()]
        else:
            continue
        if not found:
            missing.append(word)
    return missing


def missing_anywhere(text: str) -> list[str]:
    """What looks like a file of the repository, in text, links and code, and does not exist."""
    named = set(_FILE.findall(text))
    return sorted(path for path in named if not (ROOT / path).exists())


def is_of_the_original(page: Path, path: str) -> bool:
    """Whether it is the path of a launch script there, whose flags are kept here."""
    return page.name == "launch-scripts.md" and (LAUNCH_SCRIPTS / path).with_suffix(".txt").exists()


def unresolved(text: str) -> list[str]:
    """Dotted paths below slime or examples in backquotes that name neither a module nor something in one."""
    paths = [word for word in quoted(text) if re.fullmatch(r"(slime|examples)(\.\w+)+", word)]
    return [path for path in paths if not _resolves(path)]


def _resolves(path: str) -> bool:
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            spec = find_spec(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        if spec is not None:
            rest = parts[end:]
            return not rest or hasattr(import_module(".".join(parts[:end])), rest[0])
    return False


def test_each_room_has_a_readme() -> None:
    assert [name(readme) for readme in READMES if not readme.is_file()] == []


@pytest.mark.parametrize("room", LISTED, ids=name)
def test_a_readme_lists_every_file_of_its_folder(room: Path) -> None:
    patterns = quoted((room / "README.md").read_text(encoding="utf-8"))
    listed = {file for word in patterns if word.endswith(".py") for file in room.glob(word)}
    files = {file for file in room.rglob("*.py") if file.name != "__init__.py"}
    assert sorted(map(name, files - listed)) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_names_only_what_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [*missing_files(page, text), *missing_anywhere(text)]
    assert [path for path in missing if not is_of_the_original(page, path)] == []
    assert unresolved(text) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_line_of_a_page_begins_with_a_stray_space(page: Path) -> None:
    prose = _FENCE.sub("", page.read_text(encoding="utf-8"))
    assert re.findall(r"^ \S.*", prose, re.MULTILINE) == []


def marks_of_a_merge(text: str) -> list[str]:
    """Lines with which git shows both sides of a conflict."""
    return re.findall(r"^(?:<{7}|>{7}) .*", text, re.MULTILINE)


def test_no_page_shows_both_sides_of_a_merge() -> None:
    assert [name(page) for page in PAGES if marks_of_a_merge(page.read_text(encoding="utf-8"))] == []
    assert marks_of_a_merge("a\n<<<<<<< HEAD\nb\n=======\nc\n>>>>>>> d824ec89 (Heal)\n") == [
        "<<<<<<< HEAD",
        ">>>>>>> d824ec89 (Heal)",
    ]


def test_what_does_not_exist_is_noticed() -> None:
    page = ROOT / "slime/training/README.md"
    assert missing_files(page, "`slime/nothing.py`, `nothing.py`, `trainer.py`, `grpo.py`") == [
        "slime/nothing.py",
        "nothing.py",
    ]
    assert missing_anywhere("python tools/nothing.py and tools/make_tiny_model.py") == ["tools/nothing.py"]
    assert unresolved("`slime.utils.types.Sample`, `slime.utils.types.Sampl`, `slime.nothing`") == [
        "slime.utils.types.Sampl",
        "slime.nothing",
    ]


def import_table() -> Iterator[tuple[list[str], list[str]]]:
    """The rows of docs/customization.md that give import paths: modules, and what is taken from them."""
    text = (ROOT / "docs/customization.md").read_text(encoding="utf-8")
    section = text.split("## Import paths")[1].split("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("| `slime"):
            modules, names = line.strip("| ").split(" | ")
            yield quoted(modules), quoted(names)


def test_plug_ins_find_what_the_import_table_promises() -> None:
    rows = list(import_table())
    assert len(rows) > 15
    for modules, names in rows:
        loaded = [import_module(module) for module in modules]
        assert [found for found in names if not any(hasattr(module, found) for module in loaded)] == []


def imported_names(source: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def blocks_of_python() -> list[tuple[Path, str]]:
    return [
        (page, code)
        for page in PAGES
        for language, code in _FENCE.findall(page.read_text(encoding="utf-8"))
        if language == "python"
    ]


def test_the_code_in_pages_imports_what_exists() -> None:
    blocks = blocks_of_python()
    assert len(blocks) >= 4
    for page, code in blocks:
        for module, attribute in imported_names(code):
            if module.split(".")[0] in ("slime", "examples"):
                assert _resolves(f"{module}.{attribute}"), f"{page}: {module}.{attribute}"


def test_rewards_in_pages_and_examples_that_compare_take_what_stands_around_an_answer() -> None:
    """As the token that ends a response, and the space around an answer and its label."""
    response, label = "It is \\boxed{ 4}.<|im_end|>", "4\n"
    rewards = [calculator_reward]
    for page, code in blocks_of_python():
        if "def reward(" in code and "== sample.label" in code:
            found: dict[str, Any] = {}
            exec(compile(code, page, "exec"), found)
            rewards.append(found["reward"])
    assert len(rewards) == 2
    for reward in rewards:
        sample = Sample(response=response, label=label, metadata={"turns": [response]})
        assert asyncio.run(reward(plugin_args(), sample)) == 1.0
    assert grade(response, label) == 1.0


def site() -> dict[str, Any]:
    """What ``mkdocs.yml`` says, without the places that need MkDocs' own tags."""
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def pages_of(entry: Any) -> Iterator[str]:
    """The pages below an entry of the navigation."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for inner in entry.values():
            yield from pages_of(inner)
    else:
        for inner in entry:
            yield from pages_of(inner)


def test_the_navigation_has_every_page_below_few_headings() -> None:
    nav = site()["nav"]
    assert len(nav) <= 8
    pages = [str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")]
    assert sorted(pages_of(nav)) == sorted(pages)


def test_what_people_search_for_stands_in_a_heading() -> None:
    words = ("out of memory", "stuck", "dashboard", "LoRA", "hangs", "NCCL", "port", "slow", "reward")
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    headings = " ".join(re.findall(r"^## (.*)$", text, re.MULTILINE)).lower()
    assert [word for word in words if word.lower() not in headings] == []
    assert "## Talking to a model: chat" in (ROOT / "docs/command.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("**/*.md")), ids=name)
def test_a_page_says_its_point_in_its_first_three_lines(page: Path) -> None:
    """Its first paragraph is prose, and short; a decision begins with its context."""
    title, point = page.read_text(encoding="utf-8").split("\n\n")[:2]
    assert title.startswith("# ") and "\n" not in title
    assert re.match(r"[\w*`]", point) and not point.startswith("```")
    assert len(point.splitlines()) <= (4 if "decisions" in page.parts else 3)
