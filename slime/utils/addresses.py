"""Ports and addresses of this machine."""

import ipaddress
import os
import socket
from urllib.parse import urlsplit

HIGHEST_PORT = 65535
API_KEY = "SLIME_API_KEY"
"""The environment variable that stands for ``--sglang-api-key``, and is in no command line."""


def is_port_available(port: int, host: str = "") -> bool:
    """Whether a server could listen on the port; the empty host stands for all interfaces."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def find_available_port(base: int, consecutive: int = 1) -> int:
    """The first port from ``base`` upwards such that it and the following ones are free.

    Raises:
        RuntimeError: there is none up to 65535.
    """
    run = 0
    for port in range(base, HIGHEST_PORT + 1):
        run = run + 1 if is_port_available(port) else 0
        if run == consecutive:
            return port - consecutive + 1
    raise RuntimeError(f"no {consecutive} consecutive free ports between {base} and {HIGHEST_PORT}")


def get_host_info() -> tuple[str, str]:
    """Host name and the address under which other nodes reach this one.

    ``SLIME_HOST_IP`` overrides the address; ``SLIME_PREFER_IPV6`` (1, true, yes) prefers IPv6.
    """
    hostname = socket.gethostname()
    if configured := os.environ.get("SLIME_HOST_IP"):
        return hostname, configured
    prefer_ipv6 = os.environ.get("SLIME_PREFER_IPV6", "").lower() in ("1", "true", "yes")
    families = (socket.AF_INET6, socket.AF_INET) if prefer_ipv6 else (socket.AF_INET, socket.AF_INET6)
    for family in families:
        if address := _routed_address(family):
            return hostname, address
    return hostname, "127.0.0.1"


def _routed_address(family: socket.AddressFamily) -> str | None:
    """The address of the interface that leads outside. Connecting a UDP socket sends no packet."""
    outside = "2001:4860:4860::8888" if family == socket.AF_INET6 else "8.8.8.8"
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((outside, 80))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host; names other than localhost count as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_web_address(url: str) -> bool:
    """Whether it is the URL of a server of HTTP or HTTPS."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or half a bracket
        return False


def wrap_ipv6(host: str) -> str:
    """The host as it stands in a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def http_url(host: str, port: int) -> str:
    return f"http://{wrap_ipv6(host)}:{port}"
