"""Folders on their way into sandboxes, as tar files: those of a task, and one that an agent has worked in."""

import io
import logging
import tarfile
from pathlib import Path

from slime.agent.sandbox import SandboxError

logger = logging.getLogger(__name__)


def tree_of(folder: Path) -> bytes:
    """A folder of this machine; in a sandbox all of it belongs to root, and scripts can be run."""

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        if member.isfile() and member.name.endswith(".sh"):
            member.mode |= 0o555
        return member

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as target:
        target.add(folder, arcname=".", filter=owned)
    return out.getvalue()


def checked(tree: bytes, longest: int) -> bytes:
    """Returns what of a tree can be unpacked in an empty folder and changes nothing outside of it.

    Whoever wrote the tree may have chosen each byte. Folders, files and links are kept, whatever the links
    point to, unless a member lies behind one; sockets, pipes and devices are not.

    Raises:
        SandboxError: it is no tree, or its files have more than so many bytes.
    """
    out = io.BytesIO()
    try:
        with (
            tarfile.open(fileobj=io.BytesIO(tree), mode="r:") as source,
            tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as target,
        ):
            _copy(source, target, longest)
    except (tarfile.TarError, ValueError, OverflowError, OSError) as error:
        raise SandboxError(f"a tree of a sandbox cannot be read: {error!s:.200}") from error
    return out.getvalue()


def _copy(source: tarfile.TarFile, target: tarfile.TarFile, longest: int) -> None:
    kinds: dict[tuple[str, ...], str] = {}
    left_out, size = [], 0
    for member in source:
        path = tuple(part for part in member.name.split("/") if part not in ("", "."))
        kind = _kind(member)
        if not kind or member.name.startswith("/") or not _fits(path, kind, kinds, member):
            left_out.append(member.name)
            continue
        size += member.size if kind == "file" else 0
        if size > longest:
            raise SandboxError(f"a tree of a sandbox has more than {longest} bytes")
        kinds[path] = kind
        target.addfile(_plain(member, path), source.extractfile(member) if kind == "file" else None)
    if left_out:
        logger.warning("left out of a tree: %s", ", ".join(map(ascii, left_out[:10])))


def _kind(member: tarfile.TarInfo) -> str:
    kinds = {"folder": member.isdir(), "file": member.isreg(), "link": member.issym(), "same": member.islnk()}
    return next((name for name, holds in kinds.items() if holds), "")


def _fits(
    path: tuple[str, ...], kind: str, kinds: dict[tuple[str, ...], str], member: tarfile.TarInfo
) -> bool:
    """Whether nothing but folders lies above, and nothing stands there."""
    if ".." in path or (not path and kind != "folder") or path in kinds:
        return False
    if kind == "same":
        first = tuple(part for part in member.linkname.split("/") if part not in ("", "."))
        if member.linkname.startswith("/") or kinds.get(first) not in ("file", "same"):
            return False
    return all(kinds.get(path[:depth], "folder") == "folder" for depth in range(len(path)))


def _plain(member: tarfile.TarInfo, path: tuple[str, ...]) -> tarfile.TarInfo:
    """The member without anything that an archive may say besides."""
    made = tarfile.TarInfo("/".join((".", *path)))
    made.type = tarfile.REGTYPE if member.isreg() else member.type
    made.size = member.size if member.isreg() else 0
    made.mode, made.mtime = member.mode & 0o7777, max(0, int(member.mtime))
    made.uid, made.gid, made.linkname = member.uid, member.gid, member.linkname
    return made
