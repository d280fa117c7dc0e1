"""The ``config.json`` of a Hugging Face checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

LARGEST_NUMBER = 1e30  # so that float32 can hold it


class HfConfigError(ValueError):
    """The checkpoint's config.json is missing, unreadable, or describes a model that is not supported."""


@dataclass(frozen=True)
class HfConfig:
    """The values of a config.json, and where they come from, for messages."""

    values: Mapping[str, Any]
    origin: str = "config.json"

    @classmethod
    def read(cls, path: str | Path) -> "HfConfig":
        """Reads the config of the checkpoint directory ``path``.

        Raises:
            HfConfigError: no such file, or it is not a JSON object.
        """
        return cls(read_hf_config(path), str(Path(path) / "config.json"))

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    @property
    def text(self) -> "HfConfig":
        """The config of the language model: all of it, or ``text_config``, where it is a part of a larger
        model.

        Raises:
            HfConfigError: ``text_config`` is no mapping, or the two differ about tied embeddings.
        """
        nested, tied = self.get("text_config"), "tie_word_embeddings"
        if nested is None:
            return self
        if not isinstance(nested, dict):
            raise self.wrong("text_config", nested, "a mapping")
        inner = HfConfig(nested, f"{self.origin}: text_config")
        if None not in (own := self.get(tied), nested.get(tied)) and own != nested[tied]:
            raise inner.wrong(tied, nested[tied], f"{own!r}, as outside of it")
        return replace(inner, values={**nested, tied: own}) if own is not None else inner

    def filled(self, **defaults: Any) -> "HfConfig":
        """Returns this config with these values for fields that are missing, as ``transformers`` takes
        them.
        """
        return replace(self, values={**defaults, **self.values})

    @property
    def dtype(self) -> str | None:
        """The number format of the weights; None if it does not say."""
        names = [self.get("dtype"), self.get("torch_dtype")]
        if isinstance(nested := self.get("text_config"), dict):
            names += [nested.get("dtype"), nested.get("torch_dtype")]
        return next((str(name) for name in names if name), None)

    def size(self, name: str, default: int | None = None, *, at_most: int = 2**31 - 1) -> int:
        """A count or a width; without a ``default`` it has to be there.

        Raises:
            HfConfigError: it is missing, or no integer of 1 to ``at_most``.
        """
        value = default if self.get(name) is None else self.get(name)
        if value is None:
            raise HfConfigError(f"{self.origin}: {name}: missing")
        if type(value) is not int or not 1 <= value <= at_most:
            raise self.wrong(name, value, f"an integer, 1 to {at_most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0; without a ``default`` it has to be there.

        Raises:
            HfConfigError: it is missing, or something else.
        """
        if default is None and self.get(name) is None:
            raise HfConfigError(f"{self.origin}: {name}: missing")
        return self.positive(name, self.get(name, default))

    def switch(self, name: str) -> bool:
        """A switch; off if it is missing.

        Raises:
            HfConfigError: it is neither true nor false.
        """
        value = self.get(name)
        if not isinstance(value, bool | None):
            raise self.wrong(name, value, "true or false")
        return bool(value)

    def mapping(self, *names: str) -> Mapping[str, Any]:
        """The first of these that is there; empty without any.

        Raises:
            HfConfigError: it is no mapping.
        """
        name, value = next(((name, value) for name in names if (value := self.get(name))), ("", {}))
        if not isinstance(value, dict):
            raise self.wrong(name, value, "a mapping")
        return value

    def positive(self, name: str, value: Any) -> float:
        """``value`` as a number; raises HfConfigError if it is none above 0."""
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < LARGEST_NUMBER:
            raise self.wrong(name, value, "a number above 0")
        return float(value)

    def wrong(self, name: str, found: Any, wanted: str) -> HfConfigError:
        return HfConfigError(f"{self.origin}: {name} is {found!r:.80} (wanted: {wanted})")

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
    if not file.is_file():
        raise HfConfigError(f"{file}: not found (wanted: a local Hugging Face checkpoint directory)")
    return _read_object(file)


def read_stop_ids(path: str | Path) -> frozenset[int]:
    """Token ids that end a response, by ``config.json`` and, where there is one, ``generation_config.json``.

    Raises:
        HfConfigError: a file cannot be read, or says something else than token ids.
    """
    ids: set[int] = set()
    for file in (Path(path) / "config.json", Path(path) / "generation_config.json"):
        found = _stop_ids(_read_object(file)) if file.is_file() else None
        several = found if isinstance(found, list) else [found] if found is not None else []
        if not all(type(token) is int and token >= 0 for token in several):
            raise HfConfigError(f"{file}: eos_token_id is {found!r:.80} (wanted: token ids)")
        ids.update(several)
    return frozenset(ids)


def _stop_ids(values: dict[str, Any]) -> Any:
    """What a file says of them, for the whole model or else for the language model in it."""
    nested = values.get("text_config")
    inner = nested.get("eos_token_id") if isinstance(nested, dict) else None
    return inner if values.get("eos_token_id") is None else values["eos_token_id"]


def _read_object(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise HfConfigError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise HfConfigError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise HfConfigError(f"{file}: holds {type(values).__name__} (wanted: a JSON object)")
    return values
