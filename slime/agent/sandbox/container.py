"""A sandbox in a container of docker or podman: any image, absolute paths, root inside."""

import asyncio
import logging
import os
import re
import shlex
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from slime.agent.sandbox import owners
from slime.agent.sandbox.commits import commit
from slime.agent.sandbox.engine import Client, call, find_engine
from slime.agent.sandbox.limits import MIB
from slime.agent.sandbox.protocol import EXIT_TIME_BUDGET_EXCEEDED, ExecResult, SandboxError
from slime.agent.sandbox.snapshots import Snapshot

logger = logging.getLogger(__name__)

_LIFETIME_S = 3600
_START_LIMIT_S, _PULL_LIMIT_S, _FILE_LIMIT_S, _GRACE_S = 120.0, 1800.0, 120.0, 60.0
_MARK, _VALUE = "SLIME_SANDBOX_COMMAND", "SLIME_SANDBOX_VALUE_"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EXIT_FLOOD = 128 + 9
_MARK_ROOM = 1024
"""Bytes that come before what a command writes."""
_SWEEP_PAUSE_S = 0.05
_REGULAR = "{ [ -f %(path)s ] && [ ! -L %(path)s ]; }"
_NOT_REGULAR = 73
"""The exit code for a file that is none: what is written by who exits at once may get lost in the engine."""
# Also a shell that has just been forked, and has its parent's environment still, is one of the command's.
_SWEEP = """
found=0
for folder in /proc/[0-9]*; do
    if tr '\\000' '\\n' 2> /dev/null < $folder/environ | grep -qx %(mark)s; then
        kill -KILL ${folder#/proc/} && found=1
    fi
done
echo $found
"""


@dataclass(frozen=True)
class ContainerLimits:
    """What all processes of a container together may use, as its engine holds it.

    Attributes:
        cpus: processors' time per time.
        processes: at a time, threads included.
        output_bytes: kept of what a command writes; one that writes 64 times as much is killed.
        file_bytes: of a file or tree that is read out of the container.
    """

    memory_bytes: int = 2048 * MIB
    cpus: float = 1.0
    processes: int = 256
    output_bytes: int = 64 << 10
    file_bytes: int = 256 * MIB

    def __post_init__(self) -> None:
        if wrong := {name: value for name, value in asdict(self).items() if value <= 0}:
            raise ValueError(f"limits {wrong}: wanted more than 0")


class ContainerSandbox:
    """Runs commands in a container of its own, which ends with it.

    What a command leaves running goes on until the end of the sandbox, unless its time was up. The image
    needs ``sh``, ``sleep``, ``cat``, ``tr`` and ``grep``, and ``tar`` for trees.

    Attributes:
        name: of the container.
        keeps_background: as `LocalSandbox` has it.
        has_own_root: absolute paths are the sandbox's own, and commands may write to all of them.
    """

    keeps_background = True
    has_own_root = True

    def __init__(
        self,
        image: str,
        *,
        limits: ContainerLimits | None = None,
        network: str = "none",
        workdir: str | None = None,
        lifetime_s: int | None = None,
        engine: str | None = None,
        run_options: Sequence[str] = (),
    ) -> None:
        """
        Args:
            image: pulled if the engine does not have it.
            network: of the engine's; with ``none`` no address but loopback is there.
            workdir: where commands start and relative paths begin; default the image's.
            lifetime_s: after which the container ends whatever becomes of this process; default
                SLIME_AGENT_SANDBOX_LIFETIME_SEC or 3600.
            engine: its program; default SLIME_AGENT_CONTAINER_ENGINE, docker or podman.
            run_options: more words for the engine's ``run``, such as ``("--runtime", "runsc")``.
        """
        self.image, self.limits = image, limits or ContainerLimits()
        self.name = f"slime-{uuid.uuid4().hex}"
        self._network, self._workdir, self._asked_engine = network, workdir, engine
        self._lifetime_s = lifetime_s or int(os.environ.get("SLIME_AGENT_SANDBOX_LIFETIME_SEC", _LIFETIME_S))
        self._run_options = tuple(run_options)
        self._options: Any = {"limits": limits, "network": network, "workdir": workdir, "engine": engine}
        self._options |= {"lifetime_s": lifetime_s, "run_options": run_options}
        self._engine = ""

    async def __aenter__(self) -> Self:
        """
        Raises:
            SandboxError: there is no engine, or it does not start the container; the message says why.
        """
        engine = find_engine(self._asked_engine)
        await _remove_orphans_once(engine)
        await have_image(engine, self.image)
        self._engine = engine
        try:
            said = await call([engine, *self._run_words()], limit_s=_START_LIMIT_S)
            if said.code != 0:
                raise SandboxError(
                    f"ContainerSandbox: {self.image}: {said.errors.decode('utf-8', 'replace'):.500}"
                )
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _run_words(self) -> list[str]:
        limits = self.limits
        labels = [f"{name}={value}" for name, value in owners.labels(self._lifetime_s).items()]
        return [
            *("run", "--detach", "--rm", "--init", "--pull", "never", "--name", self.name),
            *(word for label in labels for word in ("--label", label)),
            *("--network", self._network, "--pids-limit", str(limits.processes)),
            *("--memory", f"{limits.memory_bytes}b", "--memory-swap", f"{limits.memory_bytes}b"),
            *("--cpus", f"{limits.cpus:g}", "--security-opt", "no-new-privileges"),
            *("--cap-drop", "NET_RAW", "--cap-drop", "MKNOD", "--user", "0"),
            *self._run_options,
            *("--entrypoint", "sleep", self.image, str(self._lifetime_s)),
        ]

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        timeout: float = 60,
    ) -> ExecResult:
        """Run a line of shell. All that it has started is killed once its time is up.

        Raises:
            SandboxError: the sandbox is not open or has ended, there is no such user or folder.
        """
        keep = self.limits.output_bytes
        command = _Command(cmd, user, env or {}, workdir or self._workdir)
        words = self._exec_words(command)
        client = await Client.start(words, keep=keep + _MARK_ROOM, merged=True, env=command.client_env)
        try:
            await client.until_said(command.mark.encode(), _START_LIMIT_S)
            code = await client.end(timeout)
            if code is None:
                code = _EXIT_FLOOD if client.is_flood else EXIT_TIME_BUDGET_EXCEEDED
                await self._end_command(command, client)
        except TimeoutError as error:
            raise SandboxError(
                f"ContainerSandbox: {self.image}: a command was not started within {_START_LIMIT_S:g} s"
            ) from error
        finally:
            await client.stop()
        said = command.output_of(bytes(client.output), self.image)
        output = said[:keep].decode(errors="replace")
        if len(said) > keep:
            output += f"\n[output cut off after {keep} bytes]"
        return ExecResult(code, output)

    def _exec_words(self, command: "_Command", interactive: bool = False) -> list[str]:
        if not self._engine:
            raise SandboxError("ContainerSandbox: is not open (wanted: async with)")
        words = ["--interactive"] if interactive else []
        return [self._engine, "exec", *words, *command.options, self.name, *command.words]

    async def _end_command(self, command: "_Command", client: Client) -> None:
        """Kills what the command has started, until a look finds nothing more.

        Where that cannot be done, as among processes that multiply, the sandbox ends.
        """
        try:
            async with asyncio.timeout(_GRACE_S):
                while await self._sweep(command) or not client.has_ended:
                    await asyncio.sleep(_SWEEP_PAUSE_S)
        except (TimeoutError, SandboxError) as error:
            await self.close()
            raise SandboxError(
                "ContainerSandbox: processes of a command could not be ended, so the sandbox was: "
                f"{str(error) or 'they multiply'}"
            ) from error

    async def _sweep(self, command: "_Command") -> bool:
        look = _Command(_SWEEP % {"mark": f"{_MARK}={command.mark}"}, command.user, {}, "/")
        said = await call(self._exec_words(look), limit_s=_GRACE_S)
        return look.output_of(said.output + said.errors, self.image).strip() != b"0"

    async def write_file(self, path: str, content: str | bytes) -> None:
        """Write a file as root; a relative path starts at the working directory."""
        data = content.encode() if isinstance(content, str) else content
        place = shlex.quote(path)
        check = f"[ ! -e {place} ] && [ ! -L {place} ] || {_REGULAR % {'path': place}} || exit {_NOT_REGULAR}"
        await self._bytes(f'{check}; mkdir -p "$(dirname {place})" && cat > {place}', path, data)

    async def read_file(self, path: str) -> str:
        """The text of a file, read as root, with marks for what is no UTF-8.

        Raises:
            SandboxError: it cannot be read, or is longer than ``limits.file_bytes``.
        """
        place = shlex.quote(path)
        data = await self._bytes(f"{_REGULAR % {'path': place}} || exit {_NOT_REGULAR}; cat {place}", path)
        return data.decode(errors="replace")

    async def read_tree(self, path: str) -> bytes:
        """A folder's content as a tar file, written by programs of the sandbox: trust nothing in it.

        Raises:
            SandboxError: it cannot be read, or is longer than ``limits.file_bytes``.
        """
        # Status 1 says that a file has changed meanwhile.
        tree = await self._bytes(f"tar -C {shlex.quote(path)} -cf - . || [ $? -eq 1 ]", path)
        if not tree:
            raise SandboxError(f"ContainerSandbox: {path!r:.200}: cannot be read by tar")
        return tree

    async def write_tree(self, path: str, tree: bytes) -> None:
        """Unpack a tar file in a folder, as root. Members may lead out of the folder."""
        place = shlex.quote(path)
        await self._bytes(f"mkdir -p {place} && tar -C {place} -xf -", path, tree)

    async def _bytes(self, cmd: str, path: str, given: bytes | None = None) -> bytes:
        """What a command of ours writes to standard output."""
        # Where the image starts may have been removed.
        folder = "/" if path.startswith("/") else self._workdir
        command, keep = _Command(cmd, "root", {}, folder), self.limits.file_bytes
        words = self._exec_words(command, interactive=given is not None)
        said = await call(words, limit_s=_FILE_LIMIT_S, keep=keep + _MARK_ROOM, given=given)
        if said.code != 0:
            told = (said.output[-300:] + said.errors[-300:]).decode(errors="replace").strip()
            told = "not a regular file" if said.code == _NOT_REGULAR else told
            raise SandboxError(f"ContainerSandbox: {path!r:.200}: {told.replace(command.mark, '')}")
        output = command.output_of(said.output, self.image)
        if len(output) > keep:
            raise SandboxError(f"ContainerSandbox: {path!r:.200}: more than {keep} bytes (limits.file_bytes)")
        return output

    async def snapshot(self) -> Snapshot["ContainerSandbox"]:
        """An image of all files as they are now; raises SandboxError where the engine makes none."""
        if not self._engine:
            raise SandboxError("ContainerSandbox: is not open (wanted: async with)")
        return await commit(self._engine, self.name, lambda image: ContainerSandbox(image, **self._options))

    async def close(self) -> None:
        """End every process of the sandbox and remove its files."""
        engine, self._engine = self._engine, ""
        if not engine:
            return
        # Whoever is cancelled while it closes leaves nothing behind either.
        removal = asyncio.ensure_future(
            call([engine, "rm", "--force", "--volumes", self.name], limit_s=_START_LIMIT_S)
        )
        try:
            said = await asyncio.shield(removal)
        except SandboxError:
            self._engine = engine  # whoever closes it again tries again
            raise
        if said.code != 0 and b"o such container" not in said.errors:
            logger.warning("container %s: %s", self.name, said.errors.decode(errors="replace"))


class _Command:
    """One command: what the engine's ``exec`` is given, and what is told apart in what comes back.

    Values of the environment reach the engine by its own environment, and not by its command line, which
    other users of the machine see.
    """

    def __init__(self, cmd: str, user: str, env: Mapping[str, str], workdir: str | None) -> None:
        if wrong := [name for name in env if not _NAME.fullmatch(name)]:
            raise SandboxError(f"ContainerSandbox: env {wrong!r:.200}: no names of variables")
        self.mark, self.user = uuid.uuid4().hex, user
        self.client_env = {f"{_VALUE}{n}": value for n, value in enumerate(env.values())}
        folder = [] if workdir is None else ["--workdir", workdir]
        values = [word for name in self.client_env for word in ("--env", name)]
        self.options = ["--user", user, "--env", f"{_MARK}={self.mark}", *values, *folder]
        moves = [
            f'export {name}="${held}"; unset {held}; '
            for name, held in zip(env, self.client_env, strict=True)
        ]
        self.words = ["sh", "-c", f'echo {self.mark}; {"".join(moves)}exec sh -c "$0"', cmd]

    def output_of(self, said: bytes, image: str) -> bytes:
        """What the command itself wrote: a line with its mark comes before that.

        Raises:
            SandboxError: the engine did not start it.
        """
        before, mark, output = said.partition(self.mark.encode() + b"\n")
        if not mark:
            told = before.decode(errors="replace").strip()
            raise SandboxError(f"ContainerSandbox: {image}: a command was not started: {told:.500}")
        return output


async def have_image(engine: str, image: str) -> None:
    """Pull an image unless the engine has it.

    Raises:
        SandboxError: it is not to be had.
    """
    if (engine, image) in _IMAGES:
        return
    if (await call([engine, "image", "inspect", image], limit_s=_START_LIMIT_S)).code == 0:
        _IMAGES.add((engine, image))
        return
    said = await call([engine, "pull", "--quiet", image], limit_s=_PULL_LIMIT_S)
    if said.code != 0:
        raise SandboxError(f"ContainerSandbox: {image}: {said.errors.decode(errors='replace').strip():.500}")


_SWEPT: set[str] = set()
_IMAGES: set[tuple[str, str]] = set()


async def _remove_orphans_once(engine: str) -> None:
    """With the first sandbox of a process; a later one would find what others have found."""
    if engine in _SWEPT:
        return
    _SWEPT.add(engine)
    await owners.remove_orphans(engine)
    await owners.remove_orphaned_images(engine)
