"""``--allowed-hosts``: which hosts reward models, and images and videos in prompts, are fetched from.

Without the flag ``--rm-url`` is asked as it is, and what a prompt names may be at any public address.
"""

import ipaddress
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import urlsplit

FLAG = "--allowed-hosts"
WANTED = "HOST, HOST:PORT or *.DOMAIN"
_DEFAULT_PORTS = {"http": 80, "https": 443}
_CARRIERS = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("::/96"))
"""Networks of IPv6 whose last 32 bits are an IPv4 address that packets may be sent on to."""

_told: dict[str, Sequence[str] | None] = {}
"""What `tell_hosts` was told in this process, under one key."""


class HostRefused(ValueError):
    """A URL leads to a host that nothing may be fetched from."""


def tell_hosts(entries: Sequence[str] | None) -> None:
    """Keeps this process to the hosts of ``args.allowed_hosts``, whoever fetches what a prompt names."""
    _told[FLAG] = entries


def hosts_of_run(what: str) -> Sequence[str] | None:
    """What `tell_hosts` was told; None for all at public addresses.

    Raises:
        HostRefused: nothing was told, so that nobody knows where ``what`` may lead.
    """
    if FLAG not in _told:
        raise HostRefused(
            f"{what}: this process was not told where URLs may lead (wanted: allowed_hosts, or a call of "
            "slime.utils.allowed_hosts.tell_hosts with args.allowed_hosts)"
        )
    return _told[FLAG]


def bad_entries(entries: Sequence[str]) -> Iterator[str]:
    """Says which entries name no host."""
    for entry in entries:
        host, port = _parsed(entry)
        if not host or "*" in host.removeprefix("*.") or (port is not None and not 0 < port < 65536):
            yield f"{FLAG} {entry}: wanted {WANTED}"


def require_listed(url: str, entries: Sequence[str] | None, what: str) -> None:
    """Anything is listed where there is no list.

    Args:
        what: the flag or the field that the URL stands in.

    Raises:
        HostRefused: the list has not its host, or not with this port.
    """
    if entries is not None and not is_listed(url, entries):
        raise HostRefused(f"{what}: host {shown_host(url)} is not in {FLAG} ({', '.join(entries)})")


def is_listed(url: str, entries: Iterable[str]) -> bool:
    """Whether one of the entries names the host of the URL, and its port or none."""
    parts = urlsplit(url)
    host, port = _plain(parts.hostname or ""), parts.port or _DEFAULT_PORTS.get(parts.scheme)
    return any(_names(*_parsed(entry), host, port) for entry in entries)


def require_public(addresses: Iterable[str], host: str, what: str) -> None:
    """Looks at what the name of a host was resolved to.

    Raises:
        HostRefused: one of the addresses is loopback, private, link-local or otherwise not of the internet.
    """
    for address in addresses:
        if not _is_public(address):
            raise HostRefused(
                f"{what}: host {host} is at {address}, which is no public address (wanted: {FLAG} {host})"
            )


def shown_host(url: str) -> str:
    """Host and port as the URL has them, without what may be secret."""
    return urlsplit(url).netloc.rpartition("@")[2] or "(none)"


def _parsed(entry: str) -> tuple[str, int | None]:
    """Host and port of an entry; no host if it is no entry."""
    try:
        parts = urlsplit(f"//{entry}")
        host, port = parts.hostname or "", parts.port
    except ValueError:  # a port that is no number, or half a bracket
        return "", None
    extra = parts.path or parts.query or parts.fragment or "@" in entry or entry.endswith(":")
    return ("", None) if extra or any(map(str.isspace, entry)) else (_plain(host), port)


def _plain(host: str) -> str:
    return host.lower().removesuffix(".")


def _names(listed: str, listed_port: int | None, host: str, port: int | None) -> bool:
    if listed_port not in (None, port):
        return False
    return host.endswith(listed[1:]) if listed.startswith("*.") else host == listed


def _is_public(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if inner is None and any(found in network for network in _CARRIERS):
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return _is_public(str(inner))
    return found.is_global and not found.is_multicast
