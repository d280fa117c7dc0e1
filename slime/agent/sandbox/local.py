"""A sandbox on this machine: a process in namespaces of its own, with limits. Linux, no daemon, no image."""

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import psutil

from slime.agent.jail.kernel import NOBODY
from slime.agent.sandbox.limits import ControlGroup, Limits
from slime.agent.sandbox.ports import OpenPorts
from slime.agent.sandbox.protocol import ExecResult, SandboxError
from slime.agent.sandbox.snapshots import Snapshot
from slime.agent.sandbox.workspaces import remove_tree, snapshot_of, unpack
from slime.processes.marks import kill_marked

GUARANTEES = ("files", "processes", "network", "privileges", "syscalls", "memory", "leftovers")
ASKED_FOR = ("files", "processes", "network", "privileges")
_ROOT = Path(__file__).parents[3]
_START = "import sys; sys.path.insert(0, sys.argv[1]); from slime.agent.jail.serve import main; main()"
_START_LIMIT_S = 60.0
_GRACE_S = 10.0
_POLL_S = 0.002
_LONGEST_LINE = 1 << 30
_MARK = "SLIME_SANDBOX"


class LocalSandbox:
    """Runs commands shut off from this machine's files, processes and network.

    Attributes:
        held: what it guarantees, of ``GUARANTEES``; known once it is entered.
        missing: why it does not guarantee the rest.
        workspace: the folder where commands start, in the sandbox; it and /tmp can be written to.
        python: the interpreter that commands find as ``python``.
        keeps_background: whether what a command leaves running goes on after it.
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        isolation: Collection[str] = ASKED_FOR,
        allow_weaker: bool = False,
        readable: Collection[str | Path] = (),
        python: str = sys.executable,
        namespaces: bool = True,
        keep_background: bool = False,
        ports: Collection[int] = (),
        start_from: Path | None = None,
    ) -> None:
        """
        Args:
            isolation: what must be guaranteed; entering fails where the machine cannot.
            allow_weaker: enter all the same, for code that is trusted as far as this process is.
            readable: more paths that the sandbox shows, read-only. Python's own are there.
            namespaces: off to try what a machine without them holds.
            keep_background: let servers and the like that a command starts run until the end of the sandbox.
            ports: of this machine, which commands reach at 127.0.0.1: the address of an adapter holds inside
                too. Nothing else of the network is there.
            start_from: of a `snapshot`: what is in the workspace at first.
        """
        if unknown := set(isolation) - set(GUARANTEES):
            raise ValueError(f"isolation {sorted(unknown)}: unknown (wanted: {', '.join(GUARANTEES)})")
        if beyond := [port for port in ports if not 0 < port < 1 << 16]:
            raise ValueError(f"ports {beyond}: wanted numbers from 1 to 65535")
        shown = [
            sys.prefix,
            sys.base_prefix,
            *_folders_of(python),
            *([str(start_from)] if start_from else []),
        ]
        paths = {*shown, *(str(Path(path).absolute()) for path in readable)}
        own: dict[str, Any] = {"limits": limits, "isolation": isolation, "allow_weaker": allow_weaker}
        own |= {"readable": readable, "python": python, "namespaces": namespaces, "ports": ports}
        self._options, self._start_from = {**own, "keep_background": keep_background}, start_from
        if "/" in paths:
            raise ValueError("readable /: would show the whole machine (wanted: folders in it)")
        self.limits = limits or Limits()
        self.held: tuple[str, ...] = ()
        self.missing: dict[str, str] = {}
        self.workspace = ""
        self.python = python
        self.keeps_background = keep_background
        self._isolation, self._allow_weaker = isolation, allow_weaker
        self._readable, self._namespaces = sorted(paths), namespaces
        self._ports = sorted(set(ports))
        self._open_ports: OpenPorts | None = None
        self._mark = uuid.uuid4().hex
        self._folder = ""
        self._group: ControlGroup | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._inside: list[psutil.Process] = []
        self._busy = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """
        Raises:
            SandboxError: something that was asked for is not held here; the message says what, and why.
        """
        if sys.platform != "linux":
            raise SandboxError(f"LocalSandbox: works on Linux, not on {sys.platform}")
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="slime-sandbox-")
        if os.geteuid() == 0:
            os.chown(self._folder, NOBODY, NOBODY)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._process = await self._launch([theirs.fileno()] if self._ports else [])
            # It waits for its configuration, so all its children will be in the group.
            self._limit_all_memory(self._process.pid)
            status = await self._ask(self._configuration(theirs.fileno()), _START_LIMIT_S)
            with contextlib.suppress(psutil.NoSuchProcess):
                self._inside = await asyncio.to_thread(psutil.Process(self._process.pid).children)
            self.workspace = status["workspace"]
            self.held += tuple(status["held"])
            self.missing |= status["missing"]
            self._refuse_less()
            if status["no_ports"]:
                raise SandboxError(
                    f"LocalSandbox: ports {self._ports} cannot be reached from inside ({status['no_ports']}; "
                    "wanted a kernel and a container that permit namespaces)"
                )
            if self._ports:
                self._open_ports = OpenPorts(ours, self._ports)
        if self._start_from:
            await unpack(self, self._start_from)

    async def _launch(self, descriptors: Sequence[int]) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _START, str(_ROOT)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={_MARK: self._mark},
            cwd="/",
            start_new_session=True,
            limit=_LONGEST_LINE,
            pass_fds=descriptors,
        )

    def _configuration(self, channel: int) -> dict[str, Any]:
        return {
            "workspace": self._folder,
            "readable": self._readable,
            "disk_bytes": self.limits.disk_bytes,
            "limits": asdict(self.limits),
            "namespaces": self._namespaces,
            "keep_background": self.keeps_background,
            "ports": self._ports,
            "channel": channel,
        }

    def _limit_all_memory(self, pid: int) -> None:
        try:
            self._group = ControlGroup.of(f"slime-{self._mark}", pid, self.limits.memory_bytes)
            self.held += ("memory",)
        except OSError as error:
            self.missing["memory"] = str(error)

    def _refuse_less(self) -> None:
        lacking = [name for name in self._isolation if name not in self.held]
        if lacking and not self._allow_weaker:
            reasons = "; ".join(f"{name}: {self.missing.get(name, 'not held')}" for name in lacking)
            raise SandboxError(
                f"LocalSandbox: this machine cannot hold {', '.join(lacking)} ({reasons}); wanted a kernel "
                "and a container that permit namespaces, or allow_weaker=True for code that you trust"
            )

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        timeout: float = 60,
    ) -> ExecResult:
        """Run a line of shell. There is one user, without rights, whatever ``user`` says.

        Every process that it has started ends with it, unless ``keep_background`` was asked for.

        Raises:
            SandboxError: the sandbox is not entered or has been destroyed, the folder does not exist, or its
                processes have used the processor time of ``limits.total_cpu_s``.
        """
        search = f"{Path(self.python).parent}:/usr/local/bin:/usr/bin:/bin"
        own = {"PATH": search, "TMPDIR": self._writable_tmp, "LANG": "C.UTF-8", _MARK: self._mark}
        request = {
            "do": "exec",
            "cmd": cmd,
            "env": own | dict(env or {}),
            "workdir": workdir,
            "timeout": timeout,
        }
        reply = await self._ask(request, timeout + _GRACE_S)
        output = reply["output"].encode("latin-1").decode(errors="replace")
        if reply["truncated"]:
            output += f"\n[output cut off after {self.limits.output_bytes} bytes]"
        return ExecResult(reply["exit_code"], output)

    @property
    def _writable_tmp(self) -> str:
        return "/tmp" if "files" in self.held else self.workspace

    async def write_file(self, path: str, content: str | bytes) -> None:
        """Write a file; a relative path starts at the workspace."""
        data = content.encode() if isinstance(content, str) else content
        await self._ask({"do": "write", "path": path, "content": data.decode("latin-1")}, _START_LIMIT_S)

    async def read_file(self, path: str) -> str:
        """The text of a file, with marks for what is no UTF-8.

        Raises:
            SandboxError: it cannot be read.
        """
        return (await self.read_bytes(path)).decode(errors="replace")

    async def read_bytes(self, path: str) -> bytes:
        """What is in a file; raises as `read_file` does."""
        reply = await self._ask({"do": "read", "path": path}, _START_LIMIT_S)
        return base64.b64decode(reply["content"])

    async def snapshot(self) -> Snapshot["LocalSandbox"]:
        """What is in the workspace now, which has to fit into /tmp too.

        Raises:
            SandboxError: it does not, or this machine could not keep others from changing it.
        """
        return await snapshot_of(self, lambda tree: LocalSandbox(**self._options, start_from=tree))

    async def _ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        async with self._busy:
            process = self._process
            if process is None or process.stdin is None or process.stdout is None:
                raise SandboxError("LocalSandbox: is not open (wanted: async with)")
            line = b""
            try:
                async with asyncio.timeout(limit_s):
                    with contextlib.suppress(ConnectionError):
                        process.stdin.write(json.dumps(request).encode() + b"\n")
                        await process.stdin.drain()
                    line = await process.stdout.readline()
            except TimeoutError as error:
                raise SandboxError(f"LocalSandbox: no reply within {limit_s:g} s") from error
            finally:
                if not line.endswith(
                    b"\n"
                ):  # a reply that comes later would be taken for that of the next request
                    self._kill()
        if not line:
            raise SandboxError("LocalSandbox: its first process has died")
        reply = json.loads(line)
        if "error" in reply:
            raise SandboxError(f"LocalSandbox: {reply['error']}")
        return reply

    def _kill(self) -> None:
        """Kills the sandbox; where there is no namespace its first process is asked to end all others."""
        if self._process is None:
            return
        alone = self.workspace and "processes" not in self.held
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM if alone else signal.SIGKILL)

    async def _wait_for_end(self, process: asyncio.subprocess.Process) -> None:
        try:
            await asyncio.wait_for(process.wait(), _GRACE_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def _end_of_namespace(self) -> None:
        """Waits for the end of the namespace: its process 1 ends last, perhaps after its parent, our own
        child.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_LIMIT_S):
                while any(map(_lives, self._inside)):
                    await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """End every process of the sandbox and remove its files."""
        if self._open_ports is not None:
            await self._open_ports.close()
            self._open_ports = None
        if self._process is not None:
            self._kill()
            await self._wait_for_end(self._process)
            self._process = None
            await self._end_of_namespace()
            if "processes" not in self.held:  # its first process may have been killed before them
                await asyncio.to_thread(kill_marked, _MARK, self._mark)
        if self._group is not None:
            await asyncio.to_thread(self._group.remove)
        if self._folder:
            await asyncio.to_thread(remove_tree, self._folder)


def _folders_of(program: str) -> list[str]:
    return [str(path.parent) for path in (Path(program).absolute(), Path(program).resolve())]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
