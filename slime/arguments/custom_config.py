"""``--custom-config-path``: a YAML file whose keys become attributes of ``args``.

They are set right after parsing, so that everything derived from a flag follows them too, and they go
through the same checks. A key that is no flag is for the user's own hooks and may hold anything.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from slime.arguments.concern import Concern
from slime.arguments.errors import UsageError
from slime.arguments.flags import Flag, flag, without_none


@dataclass(frozen=True)
class CustomConfigArgs:
    """Flags that come from a file."""

    custom_config_path: str | None = flag(
        help="YAML file whose keys are set on args before anything is derived"
    )


def apply_custom_config(args: Namespace, specs: Mapping[str, Flag]) -> None:
    """Sets the keys of the file that ``args.custom_config_path`` names; they win over flags.

    Raises:
        UsageError: the file cannot be read, or a value is not of its flag's type.
    """
    if args.custom_config_path is None:
        return
    where = f"--custom-config-path {args.custom_config_path}"
    for key, value in _read(where, Path(args.custom_config_path)).items():
        setattr(args, str(key), _checked(where, specs.get(str(key)), value))


def _read(where: str, path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{where}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{where}: not valid YAML ({error})") from error
    if not isinstance(values, dict):
        raise UsageError(f"{where}: holds {type(values).__name__} (wanted: a mapping)")
    return values


def _checked(where: str, spec: Flag | None, value: Any) -> Any:
    if spec is None or value is None:
        return value
    wanted, _ = without_none(spec.type)
    if wanted is float and type(value) is int:
        return float(value)
    kind = get_origin(wanted) or wanted
    if kind in (int, float, str, bool, list, dict) and type(value) is not kind:
        raise UsageError(f"{where}: {spec.dest} is {value!r} (wanted: {kind.__name__})")
    choices = spec.choices or (get_args(wanted) if kind is Literal else None)
    if choices and value not in choices:
        raise UsageError(f"{where}: {spec.dest} is {value!r} (wanted: {' or '.join(map(str, choices))})")
    return value


CONCERN = Concern({"config file": CustomConfigArgs})
