"""The reader's side: whole checkpoints on the engine's machine, made of what a trainer publishes."""

import fcntl
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError

from slime.models.checkpoint.safetensors_dir import SafetensorReader
from slime.models.checkpoint.tensor_slices import bytes_of
from slime.weight_sync.versions.codec import apply, bytes_in
from slime.weight_sync.versions.folder import remove_others, verify
from slime.weight_sync.versions.manifest import Entry, directory_of, state_of, version_of
from slime.weight_sync.versions.source import Source, Version, source_of
from slime.weight_sync.versions.staged import StagedVersion

_LOCK = ".lock"
_POLL_S = 0.05


Held = Mapping[str, Version]
"""Whole versions of this machine by their state."""


def pull(
    source: Path | str, local: Path, version: int, timeout_s: float = 600.0, kept: Collection[int] = ()
) -> Path:
    """Makes a version that a trainer has published a whole checkpoint in ``local``, and returns where.

    It starts from what is there, where the version builds on that; else from the newest whole version before
    it. Every tensor is held against its checksum before the checkpoint gets its name. Engines of a machine
    may share ``local``: they come one after the other, and the second one finds it made.

    Args:
        source: a directory, or a URL from which files are fetched to ``local`` first.
        timeout_s: how long it waits for another reader.
        kept: versions that stay there besides it and the one on which it builds, unless changes are made
            to a whole one that was fetched: two have room.

    Raises:
        ValueError: the version, or one on which it builds, is missing, damaged or another one than it builds
            on; names the directory, and the tensor if it is one.
        OSError: a directory cannot be read or written; names ``local`` too.
        TimeoutError: another reader does not finish.
    """
    try:
        return _pull(source, local, version, timeout_s, kept)
    except TimeoutError:
        raise
    except OSError as error:  # of removing a tree it has no more than the name of a file
        raise OSError(f"{local}: {error}") from error


def _pull(place: Path | str, local: Path, version: int, timeout_s: float, others: Collection[int]) -> Path:
    source = source_of(place, local)
    wanted = source.version(version)
    local.mkdir(parents=True, exist_ok=True)
    with _alone(local, timeout_s), source:
        held = _held(local)
        try:
            made = _made(source, local, wanted, held, others)
        except (ValueError, OSError):
            if not held:
                raise
            made = _made(source, local, wanted, {}, others)  # what was here may be what is damaged
        base = wanted.manifest.base
        # The same weights may be there under an older version.
        kept = {version, version_of(made) or version, *others}
        if base is not None:
            kept.add(base.version)
        remove_others(local, kept)
        return made


def _held(local: Path) -> dict[str, Version]:
    """What cannot be read is not held."""
    held = {}
    for path in sorted(local.iterdir()):
        if version_of(path) is not None and not path.name.startswith("."):
            try:
                found = Version.read(path)
            except (ValueError, OSError):
                continue
            if found.manifest.base is None:
                held[found.manifest.state] = found
    return held


def _made(source: Source, local: Path, wanted: Version, held: Held, kept: Collection[int]) -> Path:
    state = wanted.manifest.state
    if state in held:
        path, manifest = held[state]
        verify(path, {name: entry.digest for name, entry in manifest.tensors.items()}, manifest.checksum)
        return path
    start, links = _chain(source, wanted, held)
    tensors = dict(start.manifest.tensors)
    for path, link in links:
        for name, entry in link.tensors.items():
            before = tensors.get(name)
            if before is None or (before.shape, before.dtype) != (entry.shape, entry.dtype):
                raise ValueError(f"{path}: {name}: is another tensor than in the version before")
            tensors[name] = entry
    if state_of(tensors) != state:
        raise ValueError(
            f"{wanted.path}: the versions before it lead to state {state_of(tensors)} (wanted: {state})"
        )
    if start.manifest.state not in held:
        start = source.whole(start, () if links else kept)  # two versions have room
        if start.path.parent == local and not links:
            return start.path
    links = [source.fetched(link) for link in links]
    staged = StagedVersion(local, wanted.manifest.version, wanted.manifest.checksum)
    with staged.or_nothing():
        _write(start, links, tensors, staged)
        if state_of(staged.entries) != state:
            raise ValueError(f"{start.path}: a tensor has another format than its manifest says")
        staged.publish(start.path)
    return directory_of(local, wanted.manifest.version)


def _chain(source: Source, wanted: Version, held: Held) -> tuple[Version, list[Version]]:
    """A whole version, and the changes that lead from it to the one that is wanted, in order."""
    links = [wanted]
    while (base := links[-1].manifest.base) is not None and base.state not in held:
        try:
            found = source.version(base.version)
        except ValueError as error:
            raise ValueError(f"{links[-1].path}: builds on version {base.version}: {error}") from error
        if found.manifest.state != base.state:
            raise ValueError(
                f"{links[-1].path}: builds on version {base.version} of state {base.state} "
                f"(found: {found.manifest.state})"
            )
        links.append(found)
    start = links.pop() if base is None else held[base.state]
    # Those without a change have no files.
    return start, [link for link in reversed(links) if link.manifest.tensors]


def _write(
    start: Version, links: Sequence[Version], tensors: Mapping[str, Entry], staged: StagedVersion
) -> None:
    """Writes the tensors file by file, as they lie in the version from which it starts.

    Raises:
        ValueError: a file or a change is damaged, or leads to another tensor.
    """
    files: dict[str, list[str]] = {}
    for name, entry in start.manifest.tensors.items():
        files.setdefault(entry.file, []).append(name)
    with ExitStack() as stack:
        first = stack.enter_context(SafetensorReader(start.path))
        readers = [(link, stack.enter_context(SafetensorReader(link.path))) for link in links]
        for names in files.values():
            staged.write([(name, _folded(name, tensors[name], first, readers)) for name in names])
            for name in names:
                found, wanted = staged.entries[name].digest, tensors[name].digest
                if found != wanted:
                    changing = [link.path for link in links if name in link.manifest.tensors]
                    last = [start.path, *changing][-1]
                    raise ValueError(f"{last}: {name}: checksum {found} (wanted: {wanted})")


def _folded(
    name: str, entry: Entry, start: SafetensorReader, links: Sequence[tuple[Version, SafetensorReader]]
) -> torch.Tensor:
    """A tensor with all changes made; it is written nowhere in between.

    Raises:
        ValueError: a change is damaged.
    """
    tensor = _read(start, name)
    data = unchanged = bytes_in(tensor)
    for (path, manifest), reader in links:
        if name in manifest.tensors:
            payload = _read(reader, name)
            try:
                data = apply(data, bytes_of(payload), manifest.encoding)
            except ValueError as error:
                raise ValueError(f"{path}: {name}: {error}") from error
    if data is unchanged:
        return tensor
    return entry.tensor(data)


def _read(reader: SafetensorReader, name: str) -> torch.Tensor:
    try:
        return reader.read(name).contiguous()
    except SafetensorError as error:
        raise ValueError(f"{reader.path}: {name}: {error}") from error


@contextmanager
def _alone(local: Path, timeout_s: float) -> Iterator[None]:
    """One reader at a time; the lock ends with its process."""
    descriptor = os.open(local / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    try:
        deadline = time.monotonic() + timeout_s
        while not _taken(descriptor):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{local}: another reader has it for {timeout_s:g} s (wanted: its end)")
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
