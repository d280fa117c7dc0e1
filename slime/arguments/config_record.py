"""The whole configuration of a run as a file that ``--config`` reads back."""

import re
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from slime.arguments.core.config_entries import RECORD
from slime.arguments.core.config_files import expand
from slime.arguments.core.flag import Flag
from slime.arguments.core.mistakes import Mistakes
from slime.arguments.core.parser import read_words
from slime.arguments.registry import documented_groups
from slime.utils.redaction import is_secret, without_secrets

_NOT_OF_THE_RUN = ("config", "check", "check_gpu_memory_gb")
_OTHERS = ("sglang_", "router_")
_TOKEN = re.compile("token|key|secret|password", re.IGNORECASE)


def directory_of(args: Any) -> Path | None:
    """Where a run's record is written."""
    directory = args.run_dir or args.save
    return Path(directory) if directory else None


def write_record(directory: Path, argv: Sequence[str]) -> None:
    """Writes the record of a command line into the run's directory, as a whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    new = directory / f".{RECORD}.new"
    new.write_text(record(argv), encoding="utf-8")
    new.replace(directory / RECORD)


def record(argv: Sequence[str]) -> str:
    """Every flag of a command line, under its heading; those that have their default are comments.

    Raises:
        UsageError: the command line cannot be read.
    """
    expanded, mistakes = expand(argv), Mistakes()
    mistakes.add(*expanded.mistakes)
    args = read_words(expanded.words, None, mistakes, [])
    mistakes.end()
    return "\n".join([*_head(), *_ours(args), *_of_servers(args)]) + "\n"


def _head() -> Iterator[str]:
    try:
        number = version("slime")
    except PackageNotFoundError:
        number = "of a checkout"
    yield f"# slime {number}, {time.strftime('%Y-%m-%d %H:%M:%S %Z')}, in {Path.cwd()}"
    yield "# Flags as given; those in comments have their default. slime train --config reads this file."


def _ours(args: Namespace) -> Iterator[str]:
    for group in documented_groups():
        lines = [_line(args, spec) for spec in group.flags if spec.dest not in _NOT_OF_THE_RUN]
        yield from ["", f"{group.title}:" if any(map(_is_live, lines)) else f"# {group.title}:", *lines]


def _is_live(line: str) -> bool:
    return not line.startswith("  #")


def _line(args: Namespace, spec: Flag) -> str:
    value = getattr(args, spec.dest)
    if _holds_secret(spec.dest, value):
        return f"  # {spec.dest}: not written, it may be a secret"
    text = f"{spec.dest}: {_scalar(value)}"
    return f"  # {text}" if value == spec.default else f"  {text}"


def _of_servers(args: Namespace) -> Iterator[str]:
    """Options that other packages declare: where they are not what these take by themselves."""
    declared = {spec.dest for group in documented_groups() for spec in group.flags}
    defaults = vars(read_words([], None, Mistakes(), []))
    for heading in _OTHERS:
        names = sorted(name for name in vars(args) if name.startswith(heading) and name not in declared)
        changed = [name for name in names if getattr(args, name) != defaults.get(name)]
        if changed:
            yield from ["", f"{heading.rstrip('_')}:"]
        for name in changed:
            value = getattr(args, name)
            secret = _holds_secret(name, value)
            yield f"  # {name}: not written, it may be a secret" if secret else f"  {name}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=2**31, allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...").strip()


def _holds_secret(name: str, value: Any) -> bool:
    if value is None:
        return False
    if isinstance(value, dict):
        return any(_TOKEN.search(str(key)) or _holds_secret(str(key), item) for key, item in value.items())
    texts = value if isinstance(value, list) else [value]
    return is_secret(name) or any(isinstance(text, str) and without_secrets(text) != text for text in texts)
