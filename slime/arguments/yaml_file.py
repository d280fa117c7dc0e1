"""YAML files that flags name."""

from pathlib import Path
from typing import Any

from slime.arguments.errors import UsageError
from slime.arguments.values import why_no_file


def read_yaml(where: str, path: Path) -> Any:
    """The content of a file; interpolations are resolved.

    Args:
        where: the flag and its value, for messages.

    Raises:
        UsageError: it is no file, or not valid YAML.
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
