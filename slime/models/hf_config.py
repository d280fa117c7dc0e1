"""The ``config.json`` of a Hugging Face checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class HfConfigError(ValueError):
    """The checkpoint's config.json is missing, unreadable, or describes a model that is not supported."""


@dataclass(frozen=True)
class HfConfig:
    """Its values, and where they come from, for messages."""

    values: Mapping[str, Any]
    origin: str = "config.json"

    @classmethod
    def read(cls, path: str | Path) -> "HfConfig":
        """That of the checkpoint directory ``path``.

        Raises:
            HfConfigError: no such file, or it is not a JSON object.
        """
        return cls(read_hf_config(path), str(Path(path) / "config.json"))

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def require_integers(self, *names: str) -> None:
        """Raises HfConfigError if one of them is missing or not an integer."""
        missing = [name for name in names if not isinstance(self.get(name), int)]
        if missing:
            raise HfConfigError(f"{self.origin}: {', '.join(missing)}: missing or not an integer")

    def require(self, **wanted: Any) -> None:
        """Raises HfConfigError where a value is there and another one than wanted."""
        for name, value in wanted.items():
            if self.get(name, value) != value:
                raise self.unsupported(name, self.get(name), value)

    def unsupported(self, name: str, found: Any, wanted: Any) -> HfConfigError:
        return HfConfigError(f"{self.origin}: {name} {found!r} is not supported (wanted: {wanted!r})")


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """The parsed ``config.json`` of the checkpoint directory ``path``.

    Raises:
        HfConfigError: no such file, or it is not a JSON object.
    """
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise HfConfigError(
            f"{file}: not found (wanted: a local Hugging Face checkpoint directory)"
        ) from error
    except OSError as error:
        raise HfConfigError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise HfConfigError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise HfConfigError(f"{file}: holds {type(config).__name__} (wanted: a JSON object)")
    return config
