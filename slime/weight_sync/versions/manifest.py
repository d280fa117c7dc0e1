"""What a version of weights consists of, and on which other one it builds."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from slime.utils.misc import naming
from slime.weight_sync.versions.codec import Bytes

MANIFEST = "manifest.json"
NO_VERSION = f"is no version of weights (wanted: a directory with {MANIFEST})"
_NAME = re.compile(r"\.?weight_v(\d{6,})(\.partial)?")


class Entry(NamedTuple):
    """A tensor of a version: its format, the file that has it or its change, and its checksum."""

    shape: tuple[int, ...]
    dtype: str
    file: str
    digest: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """
        Raises:
            ValueError: there is no such format.
        """
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype {self.dtype!r} (wanted: e.g. 'bfloat16')")
        return dtype

    def tensor(self, data: Bytes) -> torch.Tensor:
        """The tensor of these bytes, whose memory it shares."""
        if not data.size:
            return torch.empty(self.shape, dtype=self.torch_dtype)
        return torch.from_numpy(data).view(self.torch_dtype).view(self.shape)


class Link(NamedTuple):
    """A version by number and content: of one number there may be several, after a failure for instance."""

    version: int
    state: str


@dataclass(frozen=True)
class VersionManifest:
    """
    Attributes:
        state: says what all tensors hold, those that have not changed included: see `state_of`.
        checksum: the algorithm of the tensors' checksums.
        tensors: all of a whole version; of changes those that have changed, as they are afterwards.
        base: what changes are changes of; None for a whole version.
        encoding: of changes.
    """

    version: int
    state: str
    checksum: str
    tensors: Mapping[str, Entry]
    base: Link | None = None
    encoding: str = ""

    @property
    def link(self) -> Link:
        return Link(self.version, self.state)

    def content(self) -> dict[str, Any]:
        """What the file of it says."""
        content: dict[str, Any] = {"version": str(self.version), "state": self.state}
        if self.base is not None:
            content |= {"base": {"version": str(self.base.version), "state": self.base.state}}
            content |= {"encoding": self.encoding}
        content |= {
            "checksum": self.checksum,
            "tensors": {name: entry._asdict() for name, entry in self.tensors.items()},
        }
        return content

    def write(self, directory: Path) -> None:
        write_json(directory / MANIFEST, self.content())

    @classmethod
    def read(cls, directory: Path) -> "VersionManifest":
        """
        Raises:
            ValueError: the version is not there, or its manifest is none, or not that of a version that is
                whole or builds on an earlier one.
        """
        path = directory / MANIFEST
        if not path.is_file():  # a pipe of that name would never be read to its end
            raise ValueError(f"{directory}: {NO_VERSION}")
        return cls.parse(path.read_bytes(), str(path))

    @classmethod
    def parse(cls, content: bytes, where: str) -> "VersionManifest":
        """
        Args:
            where: names it in an error.

        Raises:
            ValueError: see `read`.
        """
        try:
            found = _parsed(json.loads(content))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{where}: not a manifest of weights ({error!r:.200})") from error
        if found.base is None and found.state != (state := state_of(found.tensors)):
            raise ValueError(f"{where}: state {found.state} (wanted: {state}, by its tensors)")
        if found.base is not None and found.base.version >= found.version:
            raise ValueError(f"{where}: builds on version {found.base.version} (wanted: an earlier one)")
        return found


def state_of(tensors: Mapping[str, Entry]) -> str:
    """Equal where names, formats and checksums of all tensors are."""
    lines = (f"{name}\t{e.dtype}\t{list(e.shape)}\t{e.digest}\n" for name, e in sorted(tensors.items()))
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def directory_of(root: Path, version: int) -> Path:
    return root / f"weight_v{version:06d}"


def version_of(path: Path) -> int | None:
    """The version that a directory is named after, one that is being written too; None for any other."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def write_json(path: Path, content: object) -> None:
    with naming(path):
        path.write_text(as_json(content))


def as_json(content: object) -> str:
    return json.dumps(content, indent=1) + "\n"


def _parsed(content: Any) -> VersionManifest:
    base = content.get("base")
    tensors = {name: _entry(entry) for name, entry in content["tensors"].items()}
    return VersionManifest(
        int(content["version"]),
        str(content["state"]),
        str(content["checksum"]),
        tensors,
        None if base is None else Link(int(base["version"]), str(base["state"])),
        str(content.get("encoding", "")),
    )


def _entry(entry: Any) -> Entry:
    if Path(entry["file"]).name != entry["file"]:
        raise ValueError(f"{entry['file']!r} is not a file of that directory")
    shape = tuple(int(size) for size in entry["shape"])
    return Entry(shape, str(entry["dtype"]), entry["file"], str(entry["digest"]))
