"""From a task to a sandbox in which it is worked on, and to what the work is worth."""

import asyncio
import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from slime.agent.harbor.images import image_of
from slime.agent.harbor.prepared import PreparedImages
from slime.agent.harbor.rewards import VerifierError, from_json, from_text
from slime.agent.harbor.task import WORKDIR, HarborTask, TaskError
from slime.agent.harbor.trees import checked, tree_of
from slime.agent.sandbox import EXIT_TIME_BUDGET_EXCEEDED, ContainerSandbox, Sandbox, SandboxError

__all__ = ["Make", "VerifierError", "grade", "open_sandbox", "run_solution", "workdir_of"]

Make = Callable[[HarborTask, str, str], Sandbox]
"""Makes a sandbox of a task, an image and a network."""
_LOGS = ("/logs/verifier", "/logs/agent", "/logs/artifacts")
_REWARDS = {"reward.json": from_json, "reward.txt": from_text}
_OWN_S = 120.0
_LIVES_S = 600
"""How long a sandbox lives beyond the times that its task names."""


def container(task: HarborTask, image: str, network: str) -> ContainerSandbox:
    """Returns a container with the limits of the task."""
    values = [word for name, value in task.env.items() for word in ("--env", f"{name}={value}")]
    lifetime_s = int(task.agent_s + task.verifier_s + _LIVES_S)
    return ContainerSandbox(
        image, limits=task.limits, network=network, lifetime_s=lifetime_s, run_options=values
    )


@asynccontextmanager
async def open_sandbox(
    task: HarborTask,
    network: str | None,
    *,
    grades: bool = False,
    make: Make = container,
    prepared: PreparedImages | None = None,
) -> AsyncIterator[Any]:
    """A sandbox of the task, with its image and a folder to work in.

    Args:
        network: that of the engine which a task that wants one gets; None where tasks may not want one.
        grades: the sandbox is the one that grades.
        prepared: makes the image from which it starts of the task's.

    Raises:
        TaskError: the task wants a network, or paths such as /tests are not the sandbox's own.
        SandboxError: the sandbox cannot be had.
    """
    wants = task.verifier_needs_network if grades else task.needs_network
    if wants and network is None:
        raise TaskError(
            f"task {task.folder}: network_mode public, which is the default (wanted: no-network, or the "
            "engine's network for it, such as network='bridge'; network='none' runs it without)"
        )
    image = await image_of(task)
    sandbox = make(task, image, network if wants and network else "none")
    if not getattr(sandbox, "has_own_root", False):
        raise TaskError(
            f"task {task.folder}: {type(sandbox).__name__} has no root of its own, and tasks use {WORKDIR}, "
            "/tests and /logs (wanted: a sandbox such as ContainerSandbox)"
        )
    if prepared is not None:
        sandbox = make(task, await prepared.of(task, image), network if wants and network else "none")
    async with sandbox:
        yield sandbox


async def workdir_of(task: HarborTask, sandbox: Any) -> str:
    """The folder in which the agent works: the task's, the image's or ``WORKDIR``, which is made."""
    folder = task.workdir or (await sandbox.exec("pwd")).output.strip()
    folder = WORKDIR if folder in ("", "/") else folder
    await _must(sandbox, f"mkdir -p {shlex.quote(folder)} /logs/agent")
    return folder


async def grade(
    task: HarborTask, worked_in: Any, folder: str, network: str | None, *, make: Make = container
) -> dict[str, float]:
    """What the task's tests say about the working folder of a sandbox, as `workdir_of` named it at the start.

    They run in a new sandbox, to which nothing but that folder comes: whoever worked has never written to
    ``/tests``, ``/logs`` or the system there.

    Raises:
        VerifierError: the tests came to no reward.
        SandboxError: a sandbox failed.
    """
    place, longest = shlex.quote(folder), task.limits.file_bytes
    await _must(worked_in, f"mkdir -p {place}")
    tree = await asyncio.to_thread(checked, await worked_in.read_tree(folder), longest)
    async with open_sandbox(task, network, grades=True, make=make) as sandbox:
        await _must(sandbox, f"rm -rf {place} && mkdir -p {place}")
        await sandbox.write_tree(folder, tree)
        return await _verdict(task, sandbox, folder)


async def _verdict(task: HarborTask, sandbox: Any, folder: str) -> dict[str, float]:
    await _must(sandbox, f"rm -rf /tests /logs && mkdir -p {' '.join(_LOGS)} && chmod -R a+rwX /logs")
    await sandbox.write_tree("/tests", await asyncio.to_thread(tree_of, task.tests))
    code, said = await sandbox.exec(
        "/tests/test.sh 2>&1",
        user=task.verifier_user,
        env={**task.env, **task.verifier_env},
        workdir=folder,
        timeout=task.verifier_s,
    )
    if code == EXIT_TIME_BUDGET_EXCEEDED:
        raise VerifierError(f"task {task.folder}: its tests took longer than {task.verifier_s:g} s")
    written = (await sandbox.exec("ls -A /logs/verifier", workdir="/", timeout=_OWN_S)).output.split("\n")
    for name, read in _REWARDS.items():
        if name in written:
            return read(await sandbox.read_file(f"/logs/verifier/{name}"))
    raise VerifierError(
        f"task {task.folder}: its tests wrote no reward, and ended with exit code {code}: {said[-500:]}"
    )


async def run_solution(task: HarborTask, sandbox: Any, folder: str) -> int:
    """Works in a folder as the task's ``solution/solve.sh`` does, and returns its exit code.

    Raises:
        TaskError: it has none.
    """
    if not (task.solution / "solve.sh").is_file():
        raise TaskError(f"task {task.folder}: no solution/solve.sh")
    await sandbox.write_tree("/solution", await asyncio.to_thread(tree_of, task.solution))
    env, line = {**task.env, **task.solution_env}, "/solution/solve.sh"
    done = await sandbox.exec(line, user=task.agent_user, env=env, workdir=folder, timeout=task.agent_s)
    return int(done.exit_code)


async def _must(sandbox: Any, line: str) -> None:
    code, said = await sandbox.exec(line, workdir="/", timeout=_OWN_S)
    if code != 0:
        raise SandboxError(f"{line}: exit code {code}: {said.strip():.500}")
