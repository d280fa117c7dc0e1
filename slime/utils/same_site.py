"""Requests that a browser sends for a page of somebody else, to a server on its user's machine.

No key protects one that asks for none, and a page anywhere may make its visitors' browsers ask it: with an
``Origin`` that is not the server's, or under a name of its own that it has made to mean 127.0.0.1.
"""

import ipaddress
from urllib.parse import urlsplit

FOREIGN = {"error": "asked by a page of another site (Host or Origin are not those of this server)"}


def is_foreign(host: str, origin: str, listens_on: str) -> bool:
    """Whether a request was made by a page of another site.

    Args:
        host: the header ``Host``, empty without; so is ``origin``, which only browsers send.
        listens_on: the address of the server. On loopback it is asked under loopback's names only.
    """
    if origin and _netloc(origin) != host.lower():
        return True
    return bool(host) and _is_loopback(listens_on) and not _is_loopback(_name(host))


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # a bracket that is not closed
        return None


def _name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    if name.rstrip(".").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
