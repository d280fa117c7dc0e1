"""What harnesses share: the steps from a sandbox and a task to an agent that has ended."""

import logging
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from slime.agent.sandbox.protocol import (
    AGENT_USER,
    EXIT_TIME_BUDGET_EXCEEDED,
    IS_USER,
    Sandbox,
    SandboxError,
    ensure_agent_user,
    exec_and_wait,
)

logger = logging.getLogger(__name__)

_TAG = "slime-agent"
_INSTALL_LIMIT_S = 900.0
_TAIL_BYTES = 2000
_NOT_RUN = (126, 127)
"""The exit codes of a shell that cannot run a program, or does not find it."""


@dataclass(frozen=True)
class HarnessContext:
    """The task of one agent.

    Attributes:
        workdir: where it works, in the sandbox.
        session_id: of its session with the adapter, and so its key.
        adapter_url: as the sandbox reaches it, without a path.
    """

    workdir: str
    session_id: str = field(repr=False)
    adapter_url: str


async def run_agent(
    sb: Sandbox,
    *,
    workdir: str,
    start_cmd: str,
    env: Mapping[str, str],
    time_budget_sec: float,
    user: str = AGENT_USER,
) -> int:
    """Runs a command-line agent to its end, or to that of its time; it is killed then, with all of its group.

    Args:
        start_cmd: a line of shell. Keys belong into ``env``: other processes see command lines.

    Returns:
        Its exit code, or `EXIT_TIME_BUDGET_EXCEEDED`.
    """
    out = f"/tmp/{_TAG}.out"
    code, _ = await exec_and_wait(
        sb,
        cmd=start_cmd,
        time_budget_sec=time_budget_sec,
        tag=_TAG,
        user=user,
        env=env,
        workdir=workdir,
        out_file=out,
    )
    if code not in (0, EXIT_TIME_BUDGET_EXCEEDED):
        tail = (await sb.exec(f"tail -c {_TAIL_BYTES} {out}", user=user)).output
        logger.warning("an agent ended with exit code %d; its output ends with:\n%s", code, tail)
        if code in _NOT_RUN:
            raise SandboxError(f"the agent could not be run, exit code {code}: {tail.strip():.500}")
    return code


class BaseHarness(ABC):
    """Runs one kind of command-line agent in a sandbox. A kind says what is installed, written and started.

    What it writes lies in ``folder``, which the agent's user alone can read. The agent's environment has
    ``SLIME_WORKDIR``, ``SLIME_ADAPTER_URL`` and ``SLIME_PROMPT_FILE``.

    Attributes:
        name: of the agent.
        executable: its program, by name or path.
        user: as whom it runs.
    """

    name = "agent"
    user = AGENT_USER

    def __init__(self, executable: str) -> None:
        self.executable = executable

    @property
    def folder(self) -> str:
        return f"/tmp/slime-{self.name}"

    def install_command(self) -> str:
        """Returns a line of shell that installs the agent; nothing if it has to be there."""
        return ""

    def config_files(self, ctx: HarnessContext) -> Mapping[str, str]:
        """Returns the agent's configuration, by paths below ``folder``."""
        return {}

    def environment(self, ctx: HarnessContext) -> Mapping[str, str]:
        """Returns the agent's environment, its key included."""
        return {}

    @abstractmethod
    def start_command(self) -> str:
        """Returns a line of shell that works on the text in ``$SLIME_PROMPT_FILE``."""

    async def install_cli(self, sb: Sandbox) -> None:
        """Installs the agent's program, unless the sandbox has it.

        Raises:
            SandboxError: it is not there afterwards.
        """
        look = f"command -v {shlex.quote(self.executable)}"
        if (await sb.exec(look, user=self.user)).exit_code == 0:
            return
        said = "it is not installed, and there is no command that installs it"
        if line := self.install_command():
            said = (await sb.exec(line, timeout=_INSTALL_LIMIT_S)).output
        code, _ = await sb.exec(look, user=self.user)
        if code != 0:
            raise SandboxError(f"{self.name}: no {self.executable} in the sandbox: {said.strip():.500}")

    async def install(self, sb: Sandbox) -> None:
        """All that comes before a task: the agent's user and its program.

        Raises:
            SandboxError: one of them cannot be had.
        """
        await ensure_agent_user(sb, user=self.user)
        await self.install_cli(sb)

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Writes the agent's configuration for a task."""
        await self._write(sb, self.config_files(ctx))

    async def launch_and_wait(
        self, sb: Sandbox, ctx: HarnessContext, *, prompt: str, time_budget_sec: float
    ) -> int:
        """Starts the agent, whose configuration has been written, on a prompt.

        Returns:
            Its exit code, or `EXIT_TIME_BUDGET_EXCEEDED`.

        Raises:
            SandboxError: it could not be run.
        """
        await self._write(sb, {"prompt": prompt})
        own = {
            "SLIME_WORKDIR": ctx.workdir,
            "SLIME_ADAPTER_URL": ctx.adapter_url,
            "SLIME_PROMPT_FILE": f"{self.folder}/prompt",
        }
        return await run_agent(
            sb,
            workdir=ctx.workdir,
            start_cmd=self.start_command(),
            env={**own, **self.environment(ctx)},
            time_budget_sec=time_budget_sec,
            user=self.user,
        )

    async def run(
        self,
        sb: Sandbox,
        *,
        workdir: str,
        session_id: str,
        adapter_url: str,
        time_budget_sec: float,
        prompt: str,
    ) -> int:
        """All steps, one after the other.

        Args:
            time_budget_sec: of the agent's work, without its installation.

        Returns:
            The agent's exit code, or `EXIT_TIME_BUDGET_EXCEEDED`.

        Raises:
            SandboxError: the agent is not there, or could not be run; that says nothing about the model.
        """
        ctx = HarnessContext(workdir, session_id, adapter_url.rstrip("/"))
        await ensure_agent_user(sb, workdir, user=self.user)
        await self.install_cli(sb)
        await self.write_config(sb, ctx)
        return await self.launch_and_wait(sb, ctx, prompt=prompt, time_budget_sec=time_budget_sec)

    async def _write(self, sb: Sandbox, files: Mapping[str, str]) -> None:
        """Writes files that nobody but the agent's user can read, at no time."""
        folder, user = shlex.quote(self.folder), shlex.quote(self.user)
        await self._must(sb, f"mkdir -p {folder} && chmod 700 {folder}")
        for name, text in files.items():
            await sb.write_file(f"{self.folder}/{name}", text)
        given = f"{IS_USER % user} || chown -R {user} {folder}"
        await self._must(sb, f"chmod -R go= {folder} && {{ {given}; }}")

    async def _must(self, sb: Sandbox, line: str) -> None:
        code, said = await sb.exec(line)
        if code != 0:
            raise SandboxError(f"{self.name}: {line}: exit code {code}: {said.strip():.500}")
