"""Folders of local sandboxes: their removal, and snapshots of what is in them.

A snapshot is a tar file of the workspace, which each sandbox that starts from it unpacks in memory. It is
shown there read-only and unpacked inside, so that nothing in it becomes a file of this machine.
"""

import asyncio
import atexit
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime.agent.sandbox.limits import MIB
from slime.agent.sandbox.protocol import SandboxError
from slime.agent.sandbox.snapshots import Snapshot

logger = logging.getLogger(__name__)

_LIMIT_S = 300.0
_PIECE = 16 * MIB


async def snapshot_of(sandbox: Any, make: Callable[[Path], Any]) -> Snapshot[Any]:
    """What is in the workspace of a local sandbox.

    Args:
        make: makes a sandbox that starts from a tar file.

    Raises:
        SandboxError: a sandbox could change it, or it cannot be read.
    """
    if "files" not in sandbox.held:
        raise SandboxError(
            "LocalSandbox: a snapshot could be changed by whoever starts from it: "
            f"{sandbox.missing['files']} (wanted: files of its own, as where the machine permits namespaces)"
        )
    folder = tempfile.mkdtemp(prefix="slime-snapshot-")
    tree = Path(folder, "workspace.tar")
    try:
        await _read_out(sandbox, tree)
    except BaseException:
        await asyncio.to_thread(shutil.rmtree, folder)
        raise
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # one that nobody has removed until then
    return Snapshot(str(tree), lambda: make(tree), lambda: asyncio.to_thread(shutil.rmtree, folder))


async def _read_out(sandbox: Any, tree: Path) -> None:
    """In pieces: files in a sandbox have a size, and each passes as one message."""
    place, size = f"/tmp/{uuid.uuid4().hex}", min(_PIECE, sandbox.limits.file_bytes)
    # Without the folder itself, which is nobody's to change.
    names = f"cd {shlex.quote(sandbox.workspace)} && find . -mindepth 1 -maxdepth 1 -print0"
    pack = f"{{ tar --null -T - -cf -; echo $? > {place}.code; }} | split -a 5 -b {size} - {place}/"
    await _must(sandbox, f"mkdir {place}; {names} | {pack} && exit $(cat {place}.code)")
    pieces = (await _must(sandbox, f"ls {place}")).split()
    with tree.open("wb") as file:
        for name in pieces:
            file.write(await sandbox.read_bytes(f"{place}/{name}"))
    os.chmod(tree, 0o444)
    await _must(sandbox, f"rm -rf {place} {place}.code")


async def unpack(sandbox: Any, tree: Path) -> None:
    """Fills the workspace of a local sandbox, which shows the file.

    Raises:
        SandboxError: it does not fit.
    """
    line = f"tar -C {shlex.quote(sandbox.workspace)} -xpf {shlex.quote(str(tree))}"
    await _must(sandbox, line)


async def _must(sandbox: Any, line: str) -> str:
    code, said = await sandbox.exec(line, timeout=_LIMIT_S)
    if code != 0:
        raise SandboxError(f"LocalSandbox: a snapshot: exit code {code}: {said.strip()[-500:]}")
    return str(said)


def remove_tree(folder: str) -> None:
    """Remove a folder, however deep it is and though its owner may not look into parts of it.

    What cannot be removed is named in a warning.
    """
    try:
        shutil.rmtree(folder)
        return
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        # Both walk without recursion, and neither follows a link.
        for command in (("chmod", "-R", "u+rwX"), ("rm", "-rf")):
            subprocess.run(
                [*command, "--", folder], stdin=subprocess.DEVNULL, capture_output=True, check=False
            )
    if os.path.lexists(folder):
        logger.warning("%s: a sandbox left it behind, and it cannot be removed", folder)
