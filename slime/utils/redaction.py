"""What may be shown of things that hold secrets."""

import re

HIDDEN = "***"
_SECRET_NAME = re.compile("password|api_key|secret|db_url|redis_url|wandb_key")
_USER = re.compile(r"(?<=://)[^/?#\s]*@")
_QUERY = re.compile(r"(://[^?#\s]*)\?[^#\s]*")
_FRAGMENT = re.compile(r"(://[^#\s]*)#\S*")


def is_secret(name: str) -> bool:
    """Whether an option (``--api-key``) or an argument (``api_key``) of this name holds a secret.

    Servers have options that nothing here lists, so it goes by parts of names.
    """
    return _SECRET_NAME.search(name.replace("-", "_")) is not None


def without_secrets(text: str) -> str:
    """The text; its addresses without user, password, query and fragment, where tokens stand."""
    shown = _USER.sub(f"{HIDDEN}@", text)
    return _FRAGMENT.sub(r"\1", _QUERY.sub(rf"\1?{HIDDEN}", shown))
