"""What every sandbox can do, and what is done with it over its protocol alone."""

import asyncio
import shlex
import time
from collections.abc import Mapping
from typing import NamedTuple, Protocol, Self

EXIT_TIME_BUDGET_EXCEEDED = -1
"""The exit code of a command that was ended because its time was up."""
_FIRST_POLL_S, _LONGEST_POLL_S = 0.1, 5.0
AGENT_USER = "agent"
IS_USER = '[ "$(id -un)" = %s ]'
"""A test of shell: where commands run as this user whatever is asked for, nothing has to be given to them."""


class SandboxError(RuntimeError):
    """The sandbox does not work, or cannot hold what it was asked to."""


class ExecResult(NamedTuple):
    """How a command ended; what it wrote to standard output and standard error, in one."""

    exit_code: int
    output: str


class Sandbox(Protocol):
    """A place to run commands that nobody trusts.

    async with LocalSandbox() as sandbox:
        code, output = await sandbox.exec("python -c 'print(6 * 7)'", timeout=10)
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        timeout: float = 60,
    ) -> ExecResult:
        """Run a line of shell for at most ``timeout`` seconds, then ``EXIT_TIME_BUDGET_EXCEEDED``."""
        ...

    async def write_file(self, path: str, content: str | bytes) -> None: ...

    async def read_file(self, path: str) -> str: ...


async def exec_and_wait(
    sb: Sandbox,
    *,
    cmd: str,
    time_budget_sec: float,
    tag: str,
    user: str = "root",
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    out_file: str | None = None,
    want_output: bool = False,
) -> ExecResult:
    """Run a command detached, so that no connection has to last as long, and wait for the mark of its end.

    A sandbox that ends what a command leaves running runs it as one command of its own.

    Args:
        time_budget_sec: after which it is killed, with ``EXIT_TIME_BUDGET_EXCEEDED``.
        tag: names its files below /tmp; one command at a time has it.
        out_file: where its output goes, default /tmp/<tag>.out.
        want_output: read that file; the result's output is empty without.
    """
    base = f"/tmp/{tag}"
    out = out_file or f"{base}.out"
    await sb.exec(f"rm -f {shlex.quote(base)}.done", user=user)
    await sb.write_file(f"{base}.sh", cmd + "\n")
    if not getattr(sb, "keeps_background", True):
        line = f"sh {base}.sh > {shlex.quote(out)} 2>&1"
        exit_code, _ = await sb.exec(line, user=user, env=env, workdir=workdir, timeout=time_budget_sec)
        return ExecResult(exit_code, await _text(sb, out, user) if want_output else "")
    inner = f"sh {base}.sh > {shlex.quote(out)} 2>&1; echo $? > {base}.part; mv {base}.part {base}.done"
    start = f"setsid sh -c {shlex.quote(inner)} < /dev/null > /dev/null 2>&1 & echo $! > {base}.pid"
    code, said = await sb.exec(start, user=user, env=env, workdir=workdir)
    if code != 0:
        raise SandboxError(f"{tag}: the command could not be started, exit code {code}: {said:.500}")
    exit_code = await _poll(sb, base, user, time.monotonic() + time_budget_sec)
    if exit_code == EXIT_TIME_BUDGET_EXCEEDED:
        # It may have become the leader of a group before the first kill, between two of them, or not yet.
        kill = f"first=$(cat {base}.pid); for target in -$first $first -$first; do kill -KILL $target; done"
        await sb.exec(kill, user=user)
    return ExecResult(exit_code, await _text(sb, out, user) if want_output else "")


async def _text(sb: Sandbox, file: str, user: str) -> str:
    return (await sb.exec(f"cat {shlex.quote(file)}", user=user)).output


async def _poll(sb: Sandbox, base: str, user: str, deadline: float) -> int:
    pause = _FIRST_POLL_S
    while True:
        code, said = await sb.exec(f"cat {base}.done 2> /dev/null", user=user)
        if code == 0 and said.strip():
            return int(said)
        if (left := deadline - time.monotonic()) <= 0:
            return EXIT_TIME_BUDGET_EXCEEDED
        await asyncio.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_POLL_S)


async def ensure_agent_user(sb: Sandbox, workdir: str | None = None, *, user: str = AGENT_USER) -> None:
    """Have a user of this name, who owns ``workdir`` if one is given.

    Raises:
        SandboxError: there is none, and none can be made.
    """
    name = shlex.quote(user)
    code, said = await sb.exec(
        f"id -u {name} > /dev/null 2>&1 || if command -v useradd > /dev/null; then useradd -m {name}; "
        f"else adduser -D {name}; fi"
    )
    if code != 0:
        raise SandboxError(f"user {user}: {said.strip():.500}")
    if workdir is not None:
        place = shlex.quote(workdir)
        owned = f"mkdir -p {place} && {{ {IS_USER % name} || chown -R {name} {place}; }}"
        code, said = await sb.exec(owned)
        if code != 0:
            raise SandboxError(f"{workdir}: cannot be given to user {user}: {said.strip():.500}")
