"""Where versions of weights lie: a directory, or a folder that a URL names."""

from collections.abc import Container, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch

from slime.models.checkpoint.safetensors_file import Spec
from slime.utils.stores import is_url
from slime.weight_sync.versions.folder import Folder
from slime.weight_sync.versions.manifest import VersionManifest
from slime.weight_sync.versions.remote import Remote


class TensorFile(Protocol):
    def write(self, name: str, tensor: torch.Tensor) -> None: ...


class DraftPart(Protocol):
    """What one of several writers, each on a trainer rank, writes of a version that rank 0 has begun."""

    def file(self, name: str, specs: Mapping[str, Spec]) -> AbstractContextManager[TensorFile]:
        """A safetensors file that takes these tensors."""

    def check(self, files: Mapping[str, str], written: Mapping[str, str], algorithm: str) -> None:
        """Reads, where it can, what was written.

        Args:
            files: by the names of tensors.
            written: checksums by name of what was given to files.

        Raises:
            ValueError: a tensor is read otherwise than it was written; it is named.
        """

    def discard(self) -> None:
        """Removes the files of this part."""


class Draft(DraftPart, Protocol):
    """A version that is being written. Until it is published there is none for readers."""

    def write_json(self, name: str, content: object) -> None: ...

    def copy_assets(self, assets: Path) -> None:
        """Adds what belongs to the weights of a checkpoint directory."""

    def publish(self, manifest: VersionManifest) -> None:
        """Makes it a version."""

    def remove(self) -> None:
        """Removes what there is of it, other parts too."""


class Storage(Protocol):
    """Versions of one run. ``str`` of it is for messages.

    Attributes:
        source: what readers are told, from the root or a URL.
    """

    @property
    def source(self) -> str: ...

    def take(self, writer: str) -> None:
        """Has this trainer alone write versions that are read, until another one comes.

        Raises:
            DirectoryTaken: another one has come after it.
            OSError: nothing can be written there.
        """

    def require(self, writer: str) -> None:
        """
        Raises:
            DirectoryTaken: another one has come after this trainer.
            OSError: it cannot be read.
        """

    def has_taken(self, writer: str) -> bool:
        """Whether this trainer, of which another rank has called `take`, has what is here.

        Raises:
            OSError: it cannot be read.
        """

    def draft(self, version: int) -> Draft: ...

    def draft_part(self, version: int) -> DraftPart:
        """A part of a draft that another rank has made."""

    def remove_others(self, kept: Container[int]) -> None:
        """Removes all versions but these."""

    def speed(self, nbytes: int) -> float:
        """Bytes per second of a file of this size that is written there and not kept."""


def storage_of(place: str) -> Storage:
    """The storage that a path or a URL names.

    Raises:
        ImportError, ValueError: nothing opens the URL.
    """
    return Remote(place) if is_url(place) else Folder(Path(place))
