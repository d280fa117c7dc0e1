"""YAML files that flags name."""

import re
from pathlib import Path
from typing import Any

import yaml

from slime.arguments.core.errors import UsageError
from slime.arguments.core.values import why_no_file


class PlainLoader(yaml.SafeLoader):
    """Values of plain types, and 4e-4 is a number, as in YAML 1.2: PyYAML wants 4.0e-4."""


PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*\.?|\.\d)\d*[eE][-+]?\d+$"), list("-+.0123456789")
)


def load_plain_yaml(text: str) -> Any:
    """The value of a YAML text; raises ``yaml.YAMLError``."""
    return yaml.load(text, PlainLoader)


def place_in(path: str | Path, *keys: str | int) -> str:
    """``path:line`` of what these keys and indices lead to; the path alone where that is not known."""
    try:
        node = yaml.compose(Path(path).read_text(encoding="utf-8"), PlainLoader)
        line = None
        for key in keys:
            if isinstance(node, yaml.MappingNode):
                marks = {found.value: (found, value) for found, value in node.value}
                found, node = marks[str(key)]
            else:
                found = node = node.value[int(key)]
            line = found.start_mark.line + 1
    except (OSError, yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return str(path)
    return f"{path}:{line}" if line else str(path)


def read_yaml(where: str, path: Path) -> Any:
    """The content of a file; interpolations are resolved.

    Args:
        where: the flag and its value, for messages.

    Raises:
        UsageError: it is not a file, or not valid YAML.
    """
    if reason := why_no_file(path):
        raise UsageError(f"{where}: {reason}")
    # Not for every command line.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import MarkedYAMLError, YAMLError

    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=True, throw_on_missing=True)
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from error
    except MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UsageError(f"{where}: {line}{error.problem or error.context}") from error
    except (OSError, YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise UsageError(f"{where}: {next(iter(str(error).splitlines()), 'not valid YAML')}") from error
