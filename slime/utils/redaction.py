"""What may be shown of things that hold secrets."""

from urllib.parse import urlsplit, urlunsplit

HIDDEN = "***"


def without_secrets(url: str) -> str:
    """The URL without user, password, query and fragment, where tokens stand."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    user = f"{HIDDEN}@" if "@" in parts.netloc else ""
    return urlunsplit((parts.scheme, user + host, parts.path, HIDDEN if parts.query else "", ""))
