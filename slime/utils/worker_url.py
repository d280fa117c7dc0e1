"""Addresses of workers, as whoever registers one writes them."""

import re
from typing import Any
from urllib.parse import urlsplit

_NAME = re.compile(r"[a-z0-9_][a-z0-9_-]{0,62}(\.[a-z0-9_-]{1,63})*\.?")
_ADDRESS = re.compile(r"[0-9a-f:.]*:[0-9a-f:.]*")
_LONGEST_HOST = 253
WANTED = "http://host:port"


def worker_url(value: Any) -> str | None:
    """The address without a slash at its end; None of anything that is no address of a worker.

    Nothing may follow the port, and there is neither user nor password, which would be shown to whoever lists
    workers.
    """
    return None if spelling(value) is None else value.rstrip("/")


def spelling(value: Any) -> str | None:
    """Returns one spelling for all spellings of an address; None of anything that is no address."""
    if not isinstance(value, str) or not value.isascii() or not value.isprintable():
        return None
    try:
        parts = urlsplit(value)
        port, host = parts.port, parts.hostname
    except ValueError:  # a port beyond 65535, a bracket that is not closed
        return None
    extra = parts.path.rstrip("/") or "?" in value or "#" in value or "@" in parts.netloc
    if parts.scheme not in ("http", "https") or not host or extra or port == 0:
        return None
    if len(host) > _LONGEST_HOST or not (_NAME.fullmatch(host) or _ADDRESS.fullmatch(host)):
        return None
    shown = f"[{host}]" if ":" in host else host
    implied = {"http": 80, "https": 443}[parts.scheme]
    return f"{parts.scheme}://{shown}" + ("" if port in (None, implied) else f":{port}")
