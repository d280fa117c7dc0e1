"""What stands in a YAML or TOML file of flags, each with its line."""

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from slime.arguments.core.errors import UsageError
from slime.arguments.core.values import why_no_file
from slime.arguments.core.yaml_file import PlainLoader

RECORD = "resolved.yaml"
"""The name under which a run's directory has its flags."""
_Keys = tuple[str, ...]

_TOML_TABLE = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]")
_TOML_KEY = re.compile(r"\s*([\w\"'-]+)\s*=")


@dataclass(frozen=True)
class Entry:
    """A key of a file.

    Attributes:
        value: of a plain type, or a ``Tree``.
        place: ``file:line``.
    """

    key: str
    value: Any
    place: str


@dataclass
class Tree:
    """The entries of a mapping, in order, and what is wrong with it."""

    entries: list[Entry] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """The mapping as a dict."""
        return {
            entry.key: entry.value.plain() if isinstance(entry.value, Tree) else entry.value
            for entry in self.entries
        }


def read_tree(path: str, where: str) -> Tree:
    """The content of a file; ``.toml`` is TOML, anything else YAML.

    Raises:
        UsageError: there is none, or it cannot be parsed.
    """
    if reason := why_no_file(path):
        raise UsageError(f"{where}: {reason}")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise UsageError(f"{where}: cannot be read ({error.strerror})") from error
    return _toml(path, text) if path.endswith(".toml") else _yaml(path, text)


def _yaml(path: str, text: str) -> Tree:
    loader = PlainLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return Tree()
        if not isinstance(node, yaml.MappingNode):
            raise UsageError(f"{path}:{node.start_mark.line + 1}: no mapping (wanted: flag: value)")
        return _of_mapping(path, node, loader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"{path}{line}: not valid YAML ({error.problem or error.context})") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{path}: not valid YAML ({next(iter(str(error).splitlines()), '')})") from error
    finally:
        loader.dispose()


def _of_mapping(path: str, node: yaml.MappingNode, loader: yaml.SafeLoader) -> Tree:
    tree, lines = Tree(), dict[str, int]()
    loader.flatten_mapping(node)
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        place = f"{path}:{line}"
        key = str(key_node.value)
        if not isinstance(key_node, yaml.ScalarNode):
            tree.mistakes.append(f"{place}: a key that is not a name (wanted: the name of a flag)")
        elif key in lines:
            tree.mistakes.append(f"{place}: {key} stands in line {lines[key]} already (wanted: once)")
        else:
            lines[key] = line
            try:
                tree.entries.append(Entry(key, _value(path, value_node, loader), place))
            except (yaml.YAMLError, ValueError) as error:  # ValueError: no such date
                tree.mistakes.append(f"{place}: {key} cannot be read ({error})")
    return tree


def _value(path: str, node: yaml.Node, loader: yaml.SafeLoader) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _of_mapping(path, node, loader)
    return loader.construct_object(node, deep=True)


def _toml(path: str, text: str) -> Tree:
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        place = f"{path}:{line[1]}" if line else path
        raise UsageError(f"{place}: not valid TOML ({error})") from error
    return _of_table(path, content, (), _toml_lines(text))


def _of_table(path: str, table: dict[str, Any], above: _Keys, lines: dict[_Keys, int]) -> Tree:
    tree = Tree()
    for key, value in table.items():
        line = lines.get((*above, key))
        found = _of_table(path, value, (*above, key), lines) if isinstance(value, dict) else value
        tree.entries.append(Entry(key, found, f"{path}:{line}" if line else path))
    return tree


def _toml_lines(text: str) -> dict[_Keys, int]:
    """The lines of keys and tables; `tomllib` does not tell them. A key within an inline table has none."""
    lines: dict[_Keys, int] = {}
    table: _Keys = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if heading := _TOML_TABLE.match(line):
            table = tuple(part.strip(" \"'") for part in heading[1].split("."))
            lines.setdefault(table, number)
        elif key := _TOML_KEY.match(line):
            lines.setdefault((*table, key[1].strip("\"'")), number)
    return lines
