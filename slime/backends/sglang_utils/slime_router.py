"""slime's own router as a managed process: what it is started with.

It serves the stock router's ``/workers``, so `RouterProcess` speaks to both. Bodies pass through it
untouched, and a request is sent to a second engine only if the first could not be connected to.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.arguments.views import FleetView


def slime_router_command(
    args: FleetView, *, host: str, port: int, api_key: str | None, args_path: Path
) -> list[str]:
    """The command line, which names a file that only this user can read, and that the router removes.

    The file has all of ``args`` that JSON can say: middleware of users' may read any of it.
    """
    values = {name: value for name, value in vars(args).items() if _is_plain(value)}
    place = {"sglang_router_ip": host, "sglang_router_port": port, "sglang_api_key": api_key}
    args_path.parent.mkdir(parents=True, exist_ok=True)
    args_path.unlink(missing_ok=True)
    descriptor = os.open(args_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(values | place, file)
    return [sys.executable, "-m", "slime.router", str(args_path)]


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)
